"""zero_ext.initialize: a DeepSpeed script trains as one process does with plain torch."""

import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import MLP, Tied, assert_bits, gather_objects, mean_square
from setups import train_batch, values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
import zero_ext.deepspeed as deepspeed
from zero_ext.deepspeed.ops import adam, lion
from zero_ext.deepspeed.runtime import lr_schedules

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MICROS = 3
ADAMW = {"lr": 0.05, "weight_decay": 0.1, "betas": [0.8, 0.9]}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICROS,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": ADAMW},
}


@pytest.fixture
def path(request, anywhere, tmp_path):
    return tmp_path if anywhere is None else request.getfixturevalue("shared_path")


def initialized(mesh, model, stage=2, optimizer=None, lr_scheduler=None, **config):
    """The engine alone; parameters straddle ranks and fill several units."""
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **config}
    if isinstance(optimizer, dict):
        config["optimizer"], optimizer = optimizer, None
    elif optimizer is not None:
        del config["optimizer"]
    engine, *_ = zero_ext.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        config=config,
        mesh=mesh,
        bucket_mb=200 / 2**20,
    )
    return engine


def train(engine, rank, steps, micros=MICROS) -> None:
    dtype = next(engine.parameters()).dtype
    for step in steps:
        for micro in range(micros):
            loss = mean_square(engine, train_batch(rank, step, micro, dtype))
            engine.backward(loss)
            engine.step()


class OneProcess:
    """Plain torch: all ranks' micro-batches in one process, each loss divided."""

    def __init__(self, mesh, model, optimizer, clip=None):
        self.world = 1 if mesh is None else mesh.size()
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.norm = None

    def train(self, steps) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            for micro in range(MICROS):
                for rank in range(self.world):
                    loss = mean_square(self.model, train_batch(rank, step, micro))
                    (loss / (MICROS * self.world)).backward()
            if self.clip is not None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()


def assert_close(engine, plain: OneProcess) -> None:
    """fp32 sums in another order, five steps of an update that divides by their roots."""
    for name, value in values_of(engine.module).items():
        expected = plain.model.get_parameter(name)
        torch.testing.assert_close(
            value, expected, rtol=2e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


# Training


@STAGES
def test_a_script_trains_as_one_process(anywhere, rank, stage):
    engine = initialized(
        anywhere,
        MLP(13),
        stage,
        gradient_clipping=0.05,
        scheduler={
            "type": "WarmupDecayLR",
            "params": {
                "warmup_num_steps": 2,
                "total_num_steps": 6,
                "warmup_max_lr": 0.04,
                "warmup_type": "linear",
            },
        },
    )
    model = MLP(13)
    torchs = torch.optim.AdamW(model.parameters(), **{**ADAMW, "betas": (0.8, 0.9)})
    plain = OneProcess(anywhere, model, torchs, clip=0.05)
    for step, lr in enumerate([0.0, 0.0, 0.02, 0.04, 0.03]):
        assert engine.get_lr() == pytest.approx([lr])
        torchs.param_groups[0]["lr"] = lr
        train(engine, rank, [step])
        plain.train([step])
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm.item(), rel=1e-4)
    assert_close(engine, plain)
    assert (engine.micro_steps, engine.global_steps) == (5 * MICROS, 5)
    assert engine.global_samples == 5 * engine.train_batch_size() == 5 * 4 * MICROS * plain.world
    assert engine.get_lr() == pytest.approx([0.02])


@STAGES
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_is_the_library_itself(anywhere, rank, stage, clip):
    engine = initialized(anywhere, MLP(13), stage, bf16={"enabled": True}, gradient_clipping=clip)
    model = zero_ext.shard(MLP(13).bfloat16(), stage, mesh=anywhere, accumulation_steps=MICROS)
    optimizer = zero_ext.optim.AdamW(
        model.parameters(), **{**ADAMW, "betas": (0.8, 0.9)}, max_grad_norm=clip
    )
    train(engine, rank, range(3))
    for step in range(3):
        for micro in range(MICROS):
            batch = train_batch(rank, step, micro, torch.bfloat16)
            (mean_square(model, batch) / MICROS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(q), zero_ext.full_tensor(p), name)


@STAGES
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam], ids=["ours", "torch's"])
def test_the_norm_is_there_without_clipping(anywhere, rank, stage, kind):
    engine = initialized(anywhere, MLP(13), stage, lambda parameters: kind(parameters, lr=0.05))
    model = MLP(13)
    plain = OneProcess(anywhere, model, kind(model.parameters(), lr=0.05), clip=float("inf"))
    assert engine.get_global_grad_norm() is None and engine.gradient_clipping() == 0
    for step in range(2):
        train(engine, rank, [step])
        plain.train([step])
        expected = None if stage == 0 else pytest.approx(plain.norm.item(), rel=1e-4)
        assert engine.get_global_grad_norm() == expected


def test_the_norm_may_be_left_out(anywhere, rank):
    zero = {"stage": 2, "compute_grad_norm": False}
    engine = initialized(anywhere, MLP(13), zero_optimization=zero)
    train(engine, rank, [0])
    assert engine.get_global_grad_norm() is None


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_on_one_rank_skips_the_step_and_the_schedule(anywhere, rank, stage):
    engine = initialized(
        anywhere,
        MLP(13),
        stage,
        fp16={"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "auto_cast": True},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    )
    train(engine, rank, range(2))
    assert engine.get_lr() == pytest.approx([0.05 / 4]) and engine.loss_scale() == 1024
    before = values_of(engine.module)
    last = 0 if anywhere is None else anywhere.size() - 1
    for micro in range(MICROS):
        batch = train_batch(rank, 2, micro)  # fp32, which the engine casts
        loss = mean_square(engine, batch)
        engine.backward(loss * (float("inf") if micro == 1 and rank == last else 1))
        engine.step()
    assert not engine.was_step_applied() and engine.skipped_steps == 1
    assert engine.get_lr() == pytest.approx([0.05 / 4]) and engine.loss_scale() == 512
    for name, value in values_of(engine.module).items():
        assert_bits(value, before[name], name)
    train(engine, rank, [3])
    assert engine.was_step_applied() and engine.get_lr() == pytest.approx([0.05 / 2])
    assert engine.global_steps == 4


def test_the_user_may_say_where_an_accumulation_ends(anywhere, rank):
    engine = initialized(anywhere, MLP(13), 1)
    counted = initialized(anywhere, MLP(13), 1)
    train(counted, rank, [0])
    engine.set_gradient_accumulation_boundary(False)
    for micro in range(MICROS):
        if micro == MICROS - 1:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(mean_square(engine, train_batch(rank, 0, micro)))
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    for p, q in zip(engine.parameters(), counted.parameters(), strict=True):
        assert_bits(p, q)


def test_none_goes_back_to_counting(anywhere, rank):
    engine = initialized(anywhere, MLP(13), 1)
    engine.set_gradient_accumulation_boundary(True)
    engine.set_gradient_accumulation_boundary(None)
    train(engine, rank, range(2))
    assert engine.global_steps == 2


def assert_one_update(engine, other, atol=1e-5) -> None:
    assert engine.global_steps == 1
    others = values_of(other.module)
    for name, value in values_of(engine.module).items():
        torch.testing.assert_close(value, others[name], rtol=1e-6, atol=atol)


def failing(loss):
    def fail(gradient):
        raise ZeroDivisionError

    loss = loss * 1
    loss.register_hook(fail)
    return loss


@STAGES
def test_plain_backwards_are_averaged_as_well(anywhere, rank, stage):
    """A user's own backward, with and without the engine's no_sync, mixed with the engine's."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
    for precision, dtype in (({}, torch.float32), (fp16, torch.float16)):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}  # Adam's first step hides a scale
        engine, divided = (
            initialized(anywhere, MLP(13), stage, sgd, **precision) for _ in range(2)
        )

        def loss(micro, engine=engine, dtype=dtype):
            return mean_square(engine, train_batch(rank, 0, micro, dtype))

        with engine.no_sync():
            engine.scale(loss(0)).backward()
        engine.step()
        with pytest.raises(ZeroDivisionError):
            engine.backward(failing(loss(1)))
        engine.backward(loss(1))
        engine.step()
        with engine.coalesce_grad_reduction():
            engine.scale(loss(2) / 2).backward()
            engine.scale(loss(2)).backward(torch.tensor(0.5))
        engine.step()
        train(divided, rank, [0])
        assert_one_update(engine, divided, atol=1e-6 if dtype == torch.float32 else 2e-4)


def test_several_losses_of_one_micro_batch(anywhere, rank):
    engine, one = initialized(anywhere, MLP(13)), initialized(anywhere, MLP(13))
    for micro in range(MICROS):
        halves = [mean_square(engine, train_batch(rank, 0, micro)) / 2 for _ in range(3)]
        first, second = engine.scale(halves[0]), engine.scale(halves[1] / 2)
        engine.backward(halves[2] / 2)
        first.backward()
        second.backward()
        engine.step()
    train(one, rank, [0])
    assert_one_update(engine, one)


def test_a_step_inside_no_sync_is_refused(anywhere, rank):
    engine = initialized(anywhere, MLP(13), 1, gradient_accumulation_steps=1)
    with engine.no_sync():
        engine.backward(mean_square(engine, train_batch(rank)))
        with pytest.raises(RuntimeError, match=r"step\(\) inside no_sync\(\)"):
            engine.step()
    assert engine.micro_steps == 0
    engine.backward(mean_square(engine, train_batch(rank, micro=1)))
    engine.step()
    assert engine.global_steps == 1


# Optimizers and schedules that the user has made


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam]
)
def test_torchs_optimizer_and_its_schedule_are_taken_over(anywhere, rank, kind):
    def make(model):
        weights = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
        optimizer = kind(groups, lr=0.04)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    model = MLP(13)
    optimizer, schedule = make(model)
    engine = initialized(anywhere, model, 2, optimizer, schedule)
    assert isinstance(engine.optimizer, zero_ext.optim.sharded.Sharded)
    other = MLP(13)
    torchs, its_schedule = make(other)
    plain = OneProcess(anywhere, other, torchs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            train(engine, rank, [step])
            plain.train([step])
            its_schedule.step()
            assert engine.get_lr() == its_schedule.get_last_lr()
    assert engine.get_lr() == pytest.approx([0.01, 0.0025])
    assert_close(engine, plain)


def test_functions_that_make_them(anywhere, rank):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)

    engine = initialized(anywhere, MLP(13), 2, optimizer, schedule)
    model = MLP(13)
    plain = OneProcess(anywhere, model, optimizer(model.parameters()))
    for step, lr in enumerate([0.05, 0.05, 0.1]):
        assert engine.get_lr() == pytest.approx([lr])
        plain.optimizer.param_groups[0]["lr"] = lr
        train(engine, rank, [step])
        plain.train([step])
    assert_close(engine, plain)
    assert isinstance(engine.optimizer, zero_ext.optim.SGD)


def test_only_some_parameters(anywhere, rank):
    model = MLP(13)
    first = [model.layers[0].weight, model.layers[0].bias]
    engine, optimizer, loader, schedule = zero_ext.initialize(
        model=model, model_parameters=first, config=CONFIG, mesh=anywhere
    )
    assert loader is None and schedule is None and optimizer is engine.optimizer
    train(engine, rank, range(2))
    values, before = values_of(model), dict(MLP(13).named_parameters())
    changed = {name for name, value in values.items() if not torch.equal(value, before[name])}
    assert changed == {"layers.0.weight", "layers.0.bias"}


def test_groups_as_torch_takes_them(anywhere, rank):
    sizes = []
    for optimizer in (None, lambda groups: torch.optim.AdamW(groups, lr=0.05)):
        model = MLP(13)
        groups = [
            {"params": model.layers[0].parameters(), "lr": 0.01},
            {"params": (p for p in model.layers[1].parameters())},
            {"params": model.layers[2].weight},
        ]
        engine, ours, *_ = zero_ext.initialize(
            model=model, optimizer=optimizer, model_parameters=groups, config=CONFIG, mesh=anywhere
        )
        sizes.append([len(group["params"]) for group in ours.param_groups])
        assert engine.get_lr() == [0.01, 0.05, 0.05]
        train(engine, rank, [0])
        changed = {
            name
            for name, value in values_of(engine.module).items()
            if not torch.equal(value, MLP(13).get_parameter(name))
        }
        assert changed == {name for name, _ in model.named_parameters()} - {"layers.2.bias"}
    assert sizes == [[2, 2, 1]] * 2


def test_what_torchs_optimizer_has_made_already_is_taken_over(anywhere, rank):
    """Adagrad has a state from the start; hooks may be on any."""
    model, other, calls = MLP(13), MLP(13), []
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    engine = initialized(anywhere, model, 2, optimizer)
    plain = OneProcess(anywhere, other, torch.optim.Adagrad(other.parameters(), lr=0.05))
    train(engine, rank, range(3))
    plain.train(range(3))
    assert_close(engine, plain)
    assert calls == ["before", "after"] * 3 and engine.optimizer is optimizer


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 0.1}}, (zero_ext.optim.AdamW, True, 0.0)),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.2}},
            (zero_ext.optim.Adam, False, 0.2),
        ),
        ({"type": "adamw", "params": {"torch_adam": True}}, (zero_ext.optim.AdamW, True, 0.01)),
        ({"type": "Adam", "torch_adam": True}, (zero_ext.optim.AdamW, True, 0.0)),
    ],
    ids=["Adam is AdamW", "Adam", "torch's", "ignored beside params"],
)
def test_adam_is_what_it_is_for_deepspeed(optimizer, expected):
    engine, *_ = zero_ext.initialize(model=MLP(), config={**CONFIG, "optimizer": optimizer})
    group = engine.optimizer.param_groups[0]
    kind, *settings = expected
    assert isinstance(engine.optimizer, kind)
    assert [group["decoupled_weight_decay"], group["weight_decay"]] == settings


class FusedAdam(torch.optim.Adam):
    """DeepSpeed's class has this name, this attribute and such groups."""

    def __init__(self, params, adam_w_mode, **arguments):
        super().__init__(params, **arguments)
        self.adam_w_mode = 1 if adam_w_mode else 0
        for group in self.param_groups:
            del group["foreach"], group["capturable"]
            group["bias_correction"] = True


@pytest.mark.parametrize("decoupled", [True, False])
def test_deepspeeds_own_adam_is_torchs(anywhere, rank, decoupled):
    model, settings = MLP(13), {"lr": 0.05, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    given = FusedAdam(model.parameters(), decoupled, **settings)
    engine = initialized(anywhere, model, optimizer=given)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    plain = OneProcess(anywhere, MLP(13), None)
    plain.optimizer = kind(plain.model.parameters(), **settings)
    train(engine, rank, range(3))
    plain.train(range(3))
    assert_close(engine, plain)


OPTIMIZERS = [  # made, and torch's of the same kind
    (lambda p: adam.FusedAdam(p, lr=0.05, weight_decay=0.3), torch.optim.AdamW, 0.3),
    (lambda p: adam.FusedAdam(p, 0.05), torch.optim.AdamW, 0.0),
    (
        lambda p: adam.FusedAdam(p, lr=0.05, adam_w_mode=False, weight_decay=0.3),
        torch.optim.Adam,
        0.3,
    ),
    (lambda p: adam.DeepSpeedCPUAdam(p, lr=0.05, weight_decay=0.3), torch.optim.AdamW, 0.3),
    (
        lambda p: adam.DeepSpeedCPUAdam(p, 0.05, adamw_mode=False, weight_decay=0.3),
        torch.optim.Adam,
        0.3,
    ),
]


@pytest.mark.parametrize(("make", "kind", "decay"), OPTIMIZERS)
def test_optimizers_that_a_script_makes_by_deepspeeds_names(anywhere, rank, make, kind, decay):
    model = MLP(13)
    engine = initialized(anywhere, model, 3, make(model.parameters()))
    plain = OneProcess(anywhere, MLP(13), None)
    plain.optimizer = kind(plain.model.parameters(), lr=0.05, weight_decay=decay)
    train(engine, rank, range(3))
    plain.train(range(3))
    assert_close(engine, plain)
    assert isinstance(engine.optimizer, getattr(zero_ext.optim, kind.__name__))


def test_what_these_optimizers_do_not_have():
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="FusedAdam corrects biases"):
        adam.FusedAdam([weight], bias_correction=False)
    with pytest.raises(ValueError, match="DeepSpeedCPUAdam has fp32 states"):
        adam.DeepSpeedCPUAdam([weight], fp32_optimizer_states=False)
    made = lion.FusedLion([weight])
    assert made.defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    assert deepspeed.ops.lion.DeepSpeedCPULion is lion.FusedLion
    schedule = lr_schedules.WarmupLR(made, warmup_num_steps=4)
    assert isinstance(schedule, deepspeed.runtime.lr_schedules.WarmupLR)


@STAGES
def test_lion(anywhere, rank, stage):
    """Algorithm 2 of the paper, in float64."""
    config = {"type": "Lion", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1}}
    model = MLP(13)
    engine = initialized(anywhere, MLP(13), stage, optimizer=config)
    masters = {name: p.detach().double() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in masters.items()}
    plain = OneProcess(anywhere, model, torch.optim.SGD(model.parameters(), lr=0))
    for step in range(3):
        plain.train([step])
        train(engine, rank, [step])
        for name, p in model.named_parameters():
            gradient, m = p.grad.double(), momenta[name]
            direction = (0.8 * m + 0.2 * gradient).sign()
            masters[name] -= 0.01 * (direction + 0.1 * masters[name])
            momenta[name] = 0.9 * m + 0.1 * gradient
            p.data.copy_(masters[name])
    assert_close(engine, plain)


@pytest.mark.parametrize("clip", ["absent", 0, 0.3])
def test_without_a_word_gradients_are_clipped_to_1(anywhere, rank, caplog, clip):
    config = {**CONFIG, "gradient_clipping": clip}
    if clip == "absent":
        del config["gradient_clipping"]
    engine, *_ = zero_ext.initialize(model=MLP(13), config=config, mesh=anywhere)
    assert engine.gradient_clipping() == (1.0 if clip == "absent" else clip)
    told = [r.getMessage() for r in caplog.records if "'gradient_clipping'" in r.getMessage()]
    assert len(told) == (1 if clip == "absent" and rank == 0 else 0)


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_only_parameters_are_cast(anywhere, mode):
    def with_buffers():
        model = MLP(13)
        model.register_buffer("angles", torch.linspace(0, 1, 7))
        model.register_buffer("count", torch.tensor(3))
        return model

    dtype = torch.float16 if mode == "fp16" else torch.bfloat16
    engine = initialized(anywhere, with_buffers(), **{mode: {"enabled": True}})
    assert {p.dtype for p in engine.parameters()} == {dtype}
    assert torch.equal(engine.angles, torch.linspace(0, 1, 7)) and engine.count.dtype == torch.int64
    types = {"buffer_dtype": "fp16"}
    engine = initialized(anywhere, with_buffers(), data_types=types, **{mode: {"enabled": True}})
    assert engine.angles.dtype == torch.float16 and engine.count.dtype == torch.int64


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_may_be_summed_over_the_ranks(anywhere, rank, world, stage):
    sgd = {"type": "SGD", "params": {"lr": 0.01 / world}}
    summed = initialized(
        anywhere, MLP(13), stage, gradient_allreduce_op="sum", **{"optimizer": sgd}
    )
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    averaged = initialized(anywhere, MLP(13), stage, optimizer=sgd)
    train(summed, rank, range(2))
    train(averaged, rank, range(2))
    for p, q in zip(summed.module.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


# Checkpoints


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_a_checkpoint(anywhere, rank, path, stage):
    more = {
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    engine = initialized(anywhere, MLP(13), stage, **more)
    train(engine, rank, range(2))
    assert engine.save_checkpoint(path / "run", client_state={"epoch": 7})
    assert engine.save_checkpoint(path / "run", tag="other", save_latest=False)
    train(engine, rank, range(2, 4))

    again = initialized(anywhere, MLP(13), 5 - stage, **more)  # other stage, same sums
    train(again, rank, range(8, 9))
    found, client_state = again.load_checkpoint(path / "run")
    assert found == str(path / "run" / "global_step2") and client_state == {"epoch": 7}
    assert (again.global_steps, again.micro_steps) == (2, 2 * MICROS)
    train(again, rank, range(2, 4))
    assert again.global_samples == engine.global_samples and again.get_lr() == engine.get_lr()
    for p, q in zip(engine.module.parameters(), again.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(q), zero_ext.full_tensor(p))

    alone = initialized(anywhere, MLP(13), stage, **more)
    assert alone.load_checkpoint(path / "run", "other", load_module_only=True)[1] == {}
    assert alone.global_steps == 0 and alone.get_lr() == [0.0]
    with pytest.warns(UserWarning, match="nothing was loaded"):
        assert alone.load_checkpoint(path / "nowhere") == (None, {})


def test_gradients_of_before_a_checkpoint_was_loaded_are_dropped(anywhere, rank, path):
    engine = initialized(anywhere, MLP(13))
    engine.save_checkpoint(path)
    train(engine, rank, [0])
    again = initialized(anywhere, MLP(13))
    train(again, rank, [5], micros=MICROS - 1)
    again.load_checkpoint(path)
    train(again, rank, [0])
    for p, q in zip(engine.parameters(), again.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(q), zero_ext.full_tensor(p))


@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0_writes_the_model_whole(anywhere, rank, path, stage):
    model = Tied().bfloat16()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = initialized(anywhere, model, stage)
    assert engine.save_16bit_model(path, "model.bin")
    saved = torch.load(path / "model.bin", map_location="cpu")
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert_bits(saved[name], value, name)


# The rest of an engine


def test_every_rank_has_its_own_samples(anywhere, rank, world):
    number = 24 if world < 4 else 12 * world  # of which each rank has full batches
    data = [torch.full((5,), float(k), device="cpu") for k in range(number)]
    engine, _, loader, _ = zero_ext.initialize(
        model=MLP(), training_data=data, config=CONFIG, mesh=anywhere
    )
    with torch.device("cpu"):  # where torch's samplers draw
        batches = list(loader)
    mine = [int(sample[0]) for batch in batches for sample in batch]
    assert all(len(batch) == 4 for batch in batches) and loader is engine.training_dataloader
    every = [mine] if anywhere is None else gather_objects(mine, anywhere.get_group())
    assert sorted(k for samples in every for k in samples) == list(range(number))
    with torch.device("cpu"):
        ordered = [
            int(sample[0]) for batch in engine.deepspeed_io(data, 3, "eval") for sample in batch
        ]
    step = anywhere.size() if anywhere else 1
    assert ordered == list(range(rank if anywhere else 0, number, step))


def test_it_has_what_the_module_has(anywhere, rank, caplog):
    engine = initialized(anywhere, MLP(13), 2, steps_per_print=2)
    assert engine.layers is engine.module.layers and engine.stats()["bytes_held"] > 0
    assert {name.removeprefix("module.") for name, _ in engine.named_parameters()} == {
        name for name, _ in MLP(13).named_parameters()
    }
    engine.eval()
    assert not engine.module.training
    with pytest.raises(AttributeError, match=r"engine has no 'nonsense', and the module \(MLP\)"):
        _ = engine.nonsense
    assert not hasattr(engine, "nonsense")
    with caplog.at_level(logging.INFO, "zero_ext"):
        train(engine, rank, range(4))
    told = [record.getMessage() for record in caplog.records if record.name == "zero_ext"]
    steps = ["step=2, skipped=0, lr=[0.05]", "step=4, skipped=0, lr=[0.05]"]
    assert told == (steps if engine.global_rank == 0 else [])


def test_without_an_optimizer_it_evaluates(anywhere, rank):
    engine, optimizer, _, _ = zero_ext.initialize(
        model=MLP(13),
        config={"train_batch_size": 12, "zero_optimization": {"stage": 3}},
        mesh=anywhere,
    )
    assert optimizer is None
    assert_bits(engine(train_batch(rank)), MLP(13)(train_batch(rank)))
    with pytest.raises(RuntimeError, match=r"step\(\) needs an optimizer"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"backward\(\) needs an optimizer"):
        engine.backward(mean_square(engine, train_batch(rank)))
    with pytest.raises(RuntimeError, match=r"get_lr\(\) needs an optimizer"):
        engine.get_lr()


HALF = {**CONFIG, "bf16": {"enabled": True}}


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    mean_square(model, train_batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "needs a model"),
        ({"model": "gpt2"}, "needs a model, not str"),
        ({"config": None}, "needs config="),
        ({"mpu": object()}, "leave mpu out"),
        ({"optimizer": lambda m: torch.optim.SGD(MLP(9).parameters())}, "not one of the model's"),
        ({"optimizer": stepped}, "the SGD has a state already"),
        ({"optimizer": lambda m: zero_ext.optim.SGD(MLP(9).parameters())}, "place of this SGD"),
        ({"optimizer": lambda m: 3}, "optimizer is 3, not an optimizer"),
        ({"optimizer": lambda m: lambda parameters: None}, "optimizer is None, not an optimizer"),
        ({"lr_scheduler": 3}, "lr_scheduler is 3, not a schedule"),
        ({"bucket": 3}, "has no argument 'bucket'"),
        ({"stage": 3}, "has no argument 'stage'"),
        (
            {
                "config": {**CONFIG, "communication_data_type": "bf16"},
                "mp_policy": MixedPrecisionPolicy(),
            },
            "'communication_data_type' and mp_policy= both",
        ),
        (
            {"config": {**CONFIG, "fp16": {"enabled": True, "hysteresis": 0}}},
            "'fp16.hysteresis' is 0",
        ),
        (
            {"config": {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 1e9}}},
            "'fp16.initial_scale_power' is 1000000000.0",
        ),
        (
            {"config": {**HALF, "scheduler": {"type": "WarmupLR", "params": {"steps": 3}}}},
            "'scheduler.params.steps' is 3: WarmupLR has no such argument",
        ),
        (
            {"config": {**HALF, "optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}},
            "'optimizer.params.lr' is '1e-3'",
        ),
        (
            {"config": {**HALF, "optimizer": {"type": "Adam", "params": {"adam_w_mode": "no"}}}},
            "'optimizer.params.adam_w_mode' is 'no'",
        ),
        ({"config": {**CONFIG, "optimizer": {"type": "MuSGD"}}}, "'optimizer.type' is 'MuSGD'"),
        (
            {"config": {**CONFIG, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}},
            "use 'gradient_clipping'",
        ),
        (
            {"config": {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": -1}}}},
            "Invalid learning rate",
        ),
        ({"config": {**CONFIG, "scheduler": {"type": "TwoCycles"}}}, "'scheduler.type' is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said_before_anything_is_changed(arguments, message):
    model = MLP()
    arguments = {"model": model, "config": CONFIG, **arguments}
    if "optimizer" in arguments:
        arguments["optimizer"] = arguments["optimizer"](model)
    with pytest.raises(ValueError, match=message):
        zero_ext.initialize(**arguments)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    zero_ext.initialize(model=model, config=CONFIG)


@pytest.mark.parametrize("of", ["model", "engine.module", "engine"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_initialize_changes_nothing(anywhere, rank, stage, of):
    model, untouched = MLP(13), initialized(anywhere, MLP(13), stage)
    engine = initialized(anywhere, model, stage)
    before = engine.optimizer, {**vars(engine.optimizer)}, [*map(id, engine.parameters())]
    given = {"model": model, "engine.module": engine.module, "engine": engine}[of]
    with pytest.raises(ValueError, match=r"the model is sharded already\. Pass the plain one\."):
        initialized(anywhere, given, 1, torch.optim.SGD, bf16={"enabled": True})
    assert (engine.optimizer, vars(engine.optimizer), [*map(id, engine.parameters())]) == before
    for each in (engine, untouched):
        train(each, rank, range(2))
    for p, q in zip(engine.parameters(), untouched.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


@pytest.mark.parametrize(
    "make",
    [
        {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
        {"config": {**CONFIG, "optimizer": {"type": "LBFGS"}}},
    ],
    ids=["made", "named"],
)
def test_an_optimizer_that_cannot_be_sharded_is_refused_before(make):
    model = MLP()
    arguments = {"model": model, "config": CONFIG, **make}
    if "optimizer" in arguments:
        arguments["optimizer"] = arguments["optimizer"](model)
    with pytest.raises(TypeError, match="LBFGS"):
        zero_ext.initialize(**arguments)
    zero_ext.initialize(model=model, config=CONFIG)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_what_one_rank_refuses_all_refuse(mesh, rank):
    model = MLP(13)
    bad = {"gradient_clipping": "a lot"} if rank == 1 else {}
    error = ValueError if rank == 1 else RuntimeError
    with pytest.raises(error, match="'gradient_clipping' is 'a lot'"):
        initialized(mesh, model, **bad)
    with pytest.raises(ValueError, match=r"the configurations differ .* 'max_grad_norm=1.5'"):
        initialized(mesh, model, gradient_clipping=1.5 if rank == 1 else 2.5)
    with pytest.raises((ValueError, RuntimeError), match="needs a model, not NoneType"):
        initialized(mesh, None if rank == 1 else model)
    engine = initialized(mesh, model)
    train(engine, rank, [0])
    assert engine.was_step_applied()


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_checkpoint_that_one_rank_does_not_see_is_told(mesh, rank, shared_path, tmp_path):
    engine = initialized(mesh, MLP(13))
    engine.save_checkpoint(shared_path)
    with pytest.raises(ValueError, match="what to load differ between ranks"):
        engine.load_checkpoint(shared_path if rank == 0 else tmp_path / "nothing")
    assert engine.load_checkpoint(shared_path)[0] is not None


def test_arguments_of_the_command_line_name_the_configuration(tmp_path):
    class Args:
        deepspeed_config = str(tmp_path / "config.json")

    (tmp_path / "config.json").write_text('{"train_batch_size": 5}')
    engine, *_ = zero_ext.initialize(Args(), MLP(), torch.optim.SGD, dist_init_required=False)
    assert engine.train_batch_size() == 5 and isinstance(engine.optimizer, zero_ext.optim.SGD)
    assert not dist.is_initialized()
