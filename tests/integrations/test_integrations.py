"""zero_ext.integrations: the loops of accelerate and transformers train as they do with DDP."""

import copy
import json
import pickle
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import MLP, assert_bits, gather_objects, mean_square, rank_data
from setups import values_of
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import zero_ext
from zero_ext import plan
from zero_ext.engine.registry import find
from zero_ext.optim.whole import Whole

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
)

from zero_ext.integrations.accelerate import Accelerator  # noqa: E402
from zero_ext.integrations.transformers import ShardedTrainerMixin, Trainer  # noqa: E402

pytestmark = pytest.mark.host  # accelerate chooses its own device
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CHANCE = 1e-5  # DDP adds in another order, and ten steps amplify that little


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps one state per process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Classifier(nn.Sequential):
    def __init__(self):
        torch.manual_seed(4)
        super().__init__(nn.Linear(13, 33), nn.Tanh(), nn.Linear(33, 7))


def accelerator(mesh, stage: int | None, micros: int = 1, **kwargs) -> accelerate.Accelerator:
    """Without a stage: accelerate's own."""
    kwargs = {"cpu": True, "gradient_accumulation_steps": micros, **kwargs}
    if stage is None:
        return accelerate.Accelerator(**kwargs)
    sharding = {"mesh": mesh, "bucket_mb": 200 / 2**20}  # parameters straddle units and ranks
    return Accelerator(stage=stage, sharding=sharding, **kwargs)


def prepared(own, model=None, make_optimizer=None):
    """The schedule was made on torch's optimizer, which comes before its model."""
    model = Classifier() if model is None else model
    make_optimizer = make_optimizer or (lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1))
    optimizer = make_optimizer(model.parameters())
    warmup = LinearLR(optimizer, 0.5, 1.0, total_iters=4)
    schedule = SequentialLR(optimizer, [warmup, LinearLR(optimizer, 1.0, 0.1, 9)], milestones=[4])
    targets = torch.arange(26) % 7
    loader = DataLoader(TensorDataset(rank_data((26, 13), 0), targets), batch_size=3)
    return own.prepare(optimizer, loader, model, schedule)


def epoch(own, optimizer, loader, model, schedule) -> list[tuple[float, ...]]:
    seen = []
    for x, y in loader:
        with own.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            own.backward(loss)
            norm = 0.0
            if own.sync_gradients:
                norm = float(own.clip_grad_norm_(model.parameters(), 0.7))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append((own.gather(loss.detach()).mean().item(), norm, *schedule.get_last_lr()))
    return seen


@STAGES
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
def test_an_accelerate_script_trains_as_with_ddp(anywhere, stage, micros):
    runs = {}
    for kind in (None, stage):
        own = accelerator(anywhere, kind, micros)
        objects = prepared(own)
        runs[kind] = epoch(own, *objects) + epoch(own, *objects)
        if kind is not None:
            assert isinstance(objects[2], Classifier), "wrapped"
            assert type(objects[0].optimizer) is zero_ext.optim.AdamW
            assert find(objects[2][0].weight) is not None
    for one, other in zip(runs[None], runs[stage], strict=True):
        assert other == pytest.approx(one, abs=CHANCE, rel=CHANCE)
    assert len({norm for _, norm, _ in runs[stage]}) > 3


def test_an_optimizer_that_needs_whole_parameters_is_taken_over(anywhere):
    def adafactor(parameters):
        given.append(torch.optim.Adafactor(parameters, lr=0.02, foreach=False))
        return given[-1]

    runs, given = {}, []
    for stage in (None, 1, 3):
        own = accelerator(anywhere, stage)
        objects = prepared(own, make_optimizer=adafactor)
        runs[stage] = epoch(own, *objects)
        if stage is not None:
            assert isinstance(objects[0].optimizer.zero_core.states, Whole)
            (schedule,) = (each for each in objects if hasattr(each, "scheduler"))
            assert objects[0].optimizer is schedule.scheduler.optimizer is given[-1]
            for one, other in zip(runs[None], runs[stage], strict=True):
                assert other == pytest.approx(one, abs=CHANCE, rel=CHANCE)


@pytest.mark.parametrize("before, after", [(1, 1), (3, 3), (2, 3), (3, 1)])
def test_a_state_that_was_saved_goes_on_with_any_stage(anywhere, path, before, after):
    own = accelerator(anywhere, before)
    objects = prepared(own)
    epoch(own, *objects)
    own.save_state(path / "saved")
    expected = epoch(own, *objects)
    values = values_of(objects[2])

    own = accelerator(anywhere, after)
    objects = prepared(own)
    own.load_state(path / "saved")
    seen = epoch(own, *objects)
    if after == before:  # clip_grad_norm_ adds what each rank holds, which is another part of it
        assert seen == expected
        for name, value in values_of(objects[2]).items():
            assert_bits(value, values[name], name)
    for one, other in zip(expected, seen, strict=True):
        assert other == pytest.approx(one, abs=CHANCE, rel=CHANCE)


class Tied(nn.Module):
    """Its first and last layers have one weight, and it reads a child by the name ``module``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.module = nn.Linear(13, 7)
        self.last = nn.Linear(13, 7, bias=False)
        self.last.weight = self.module.weight

    def forward(self, x):
        return self.module(x) + self.last(x).tanh()


def two_models(own):
    """A teacher is prepared between them: accelerate counts all models and optimizers."""
    models = [Classifier(), MLP(9).requires_grad_(False), Tied()]
    head = nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9)]
    optimizers.append(torch.optim.Adam([head], 0.1))  # stays torch's own
    optimizers.append(torch.optim.AdamW(models[2].parameters(), 0.02))
    models[0], optimizers[0] = own.prepare(models[0], optimizers[0])
    models[1] = own.prepare_model(models[1], evaluation_mode=True)
    models[2], *optimizers[1:] = own.prepare(models[2], *optimizers[1:])
    return models, optimizers, head


def run_two_models(own, made, steps) -> list[float]:
    (first, _, tied), optimizers, head = made
    seen = []
    for step in steps:
        x = rank_data((3, 13), own.process_index, step)
        loss = (first(x) - tied(x)).square().mean() + head.square().sum()
        own.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(own.gather(loss.detach()).mean().item())
    return seen


@pytest.mark.parametrize("stage, safe", [(1, True), (2, False), (3, True)])
def test_a_state_of_accelerates_own_is_gone_on_from(anywhere, path, stage, safe):
    own = accelerator(anywhere, None)
    made = two_models(own)
    run_two_models(own, made, range(3))
    teacher = made[0][1]
    for value in teacher.parameters():
        value.data.fill_(3.0)
    own.save_state(path / "stock", safe_serialization=safe)
    own.wait_for_everyone()
    head = made[2].detach().clone()  # in no model
    expected = run_two_models(own, made, range(3, 6))

    own = accelerator(anywhere, stage)
    made = two_models(own)
    own.load_state(path / "stock")
    made[2].data.copy_(head)
    assert all(torch.all(value == 3.0) for value in made[0][1].parameters())
    assert run_two_models(own, made, range(3, 6)) == pytest.approx(expected, rel=CHANCE)
    assert len(own._optimizers) == 3 and len(own._models) == 3


def test_what_cannot_be_loaded_of_accelerates_own_is_named(anywhere, rank, path):
    own = accelerator(anywhere, None)
    objects = prepared(own)
    epoch(own, *objects)
    own.save_state(path / "stock")
    own.wait_for_everyone()
    own = accelerator(anywhere, 3)
    two_models(own)
    with pytest.raises((ValueError, RuntimeError), match=r"no 'model_1.safetensors' for model 1"):
        own.load_state(path / "stock", strict=False)

    own = accelerator(anywhere, 3)
    objects = prepared(own, make_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"no state 'exp_avg'"):
        own.load_state(path / "stock")
    own = accelerator(anywhere, 3)
    objects = prepared(own)
    if rank == 0:
        (path / "stock" / "optimizer.bin").rename(path / "optimizer.bin")
        (path / "empty").mkdir()
    own.wait_for_everyone()
    with pytest.raises((ValueError, RuntimeError), match=r"no 'optimizer.bin' for optimizer 0"):
        own.load_state(path / "stock")
    with pytest.raises((ValueError, RuntimeError), match=r"neither 'zero_ext_0' of this Accel"):
        own.load_state(path / "empty")
    own.wait_for_everyone()
    if rank == 0:
        (path / "optimizer.bin").rename(path / "stock" / "optimizer.bin")
    own.wait_for_everyone()
    own.load_state(path / "stock")  # usable after the errors
    epoch(own, *objects)


def test_a_stock_loop_does_not_go_on_by_half(anywhere, path):
    own = accelerator(anywhere, 2)
    epoch(own, *prepared(own))
    own.save_state(path / "ours")
    own = accelerator(anywhere, None)
    prepared(own)
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        own.load_state(path / "ours")

    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(anywhere, 3, path, max_steps=2, **saving).train()
    stock = trainer(anywhere, None, path, max_steps=3)
    if anywhere is not None:
        dist.barrier()
    with pytest.raises(pickle.UnpicklingError, match="optimizer_is_in_the_folder_zero_ext"):
        stock.train(resume_from_checkpoint=str(path / "checkpoint-2"))


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("comm_hook fp16", {"comm_hook": DDPCommunicationHookType.FP16}),
        (
            "comm_hook power_sgd",
            {
                "comm_hook": DDPCommunicationHookType.POWER_SGD,
                "comm_wrapper": DDPCommunicationHookType.BF16,
                "comm_state_option": {"matrix_approximation_rank": 2},
            },
        ),
        (None, {"find_unused_parameters": True, "static_graph": True, "bucket_cap_mb": 3}),
    ],
)
def test_arguments_of_ddp_that_change_values_are_rejected(anywhere, name, arguments):
    handler = DistributedDataParallelKwargs(**arguments)
    expected = nullcontext()
    if name is not None:
        expected = pytest.raises(ValueError, match=f"configured for the {name} of DDP")
    with expected:
        accelerator(anywhere, 2, kwargs_handlers=[handler])


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM"])
def test_plugins_that_accelerate_ignores_on_the_cpu_are_rejected(anywhere, monkeypatch, kind):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    monkeypatch.setattr(accelerate.Accelerator, "__init__", lambda self, **_: None)
    monkeypatch.setattr(Accelerator, "distributed_type", accelerate.DistributedType.MULTI_CPU)
    for name in ("parallelism_config", "mixed_precision", "ddp_handler"):
        monkeypatch.setattr(Accelerator, name, None, raising=False)
    with pytest.raises(ValueError, match=f"configured for {kind}"):
        Accelerator(cpu=True)


def test_plain_models_beside_sharded_ones_are_saved_as_ever(anywhere, path, rank):
    seen = []
    for run in range(2):
        own = accelerator(anywhere, 3)
        teacher = MLP(9).requires_grad_(False)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, teacher = own.prepare(model, optimizer, teacher)
        own.register_save_state_pre_hook(lambda models, weights, _: seen.append(weights))
        own.register_load_state_pre_hook(lambda models, _: seen.append(models))
        if run == 0:
            teacher.layers[0].weight.fill_(3.0)
            values = copy.deepcopy(values_of(model))
            own.save_state(path)
        else:
            with torch.no_grad(), model.summon_full_params(writeback=True):
                model[0].weight.zero_()
            own.load_state(path)
            assert_bits(values_of(model)["0.weight"], values["0.weight"])
            assert torch.all(teacher.layers[0].weight == 3.0)
    weights, models = seen
    assert [sorted(w) for w in weights] == [sorted(teacher.state_dict())]  # ours is gone by now
    assert models == [teacher]


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_that_take_entries_out_see_one_for_each_model(anywhere, rank, path, stage):
    """As those of diffusers' scripts, which save and load the models by themselves."""
    counts = []

    def save_hook(models, weights, folder):
        counts.append((len(models), len(weights)))
        for _ in models if rank == 0 else []:
            weights.pop()

    def load_hook(models, folder):
        counts.append((len(models), len(models)))
        while models:
            models.pop()

    for run in range(2):
        own = accelerator(anywhere, stage)
        teacher = own.prepare(MLP(9).requires_grad_(False))
        objects = prepared(own)
        own.register_save_state_pre_hook(save_hook)
        own.register_load_state_pre_hook(load_hook)
        if run == 0:
            epoch(own, *objects)
            own.save_state(path)
            expected = values_of(objects[2])
        else:
            own.load_state(path)
            for name, value in values_of(objects[2]).items():
                assert_bits(value, expected[name], name)
    assert counts == [(2, 2), (2, 2)] and teacher is not None


@pytest.mark.parametrize(
    "read",
    [
        lambda weights: weights[-1]["0.weight"],
        lambda weights: dict(weights[-1].items()),
        lambda weights: torch.save(weights[-1], "/dev/null"),
    ],
    ids=["entry", "items", "save"],
)
def test_a_hook_that_fails_on_one_rank_fails_on_all(anywhere, rank, path, read):
    own = accelerator(anywhere, 2)
    objects = prepared(own)
    hook = own.register_save_state_pre_hook(lambda _, weights, __: rank == 0 and read(weights))
    with pytest.raises(RuntimeError, match=r"get_state_dict\(model\) on every rank"):
        own.save_state(path)
    hook.remove()
    own.save_state(path)
    assert len(own._optimizers) == 1 and len(own.get_state_dict(objects[2])) in (0, 4)


class Averaging(torch.optim.SGD):
    """Is evaluated at the middle between its parameters and their first values."""

    @torch.no_grad()
    def _move(self, mode, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if group.get("mode", "train") != mode:
                    first = self.state[p].setdefault("first", torch.full_like(p, 0.5))
                    p.add_((p - first) * weight)
            group["mode"] = mode

    def train(self):
        self._move("train", 1.0)

    def eval(self):
        self._move("eval", -0.5)


@STAGES
def test_a_prepared_optimizer_is_switched_to_evaluation(anywhere, stage):
    own, expected = accelerator(anywhere, stage, cpu=True), nn.Linear(7, 3)
    model = nn.Linear(7, 3)
    for parameter in (*model.parameters(), *expected.parameters()):
        nn.init.constant_(parameter, 0.5)
    plain = Averaging(expected.parameters(), lr=0.25)
    model, optimizer = own.prepare(model, Averaging(model.parameters(), lr=0.25))
    for _ in range(2):
        own.backward(model(torch.ones(2, 7)).sum())
        expected(torch.ones(2, 7)).sum().backward()
        for each in (optimizer, plain):
            each.train()
            each.step()
            each.zero_grad()
        for mode in ("eval", "eval", "train"):
            for each in (optimizer, plain):
                getattr(each, mode)()
            torch.testing.assert_close(model(torch.ones(2, 7)), expected(torch.ones(2, 7)))


def test_local_sgd_is_rejected_by_name(anywhere):
    from accelerate.local_sgd import LocalSGD

    for stage in (1, 2, 3):
        own = accelerator(anywhere, stage)
        model = prepared(own)[2]
        several = own.num_processes > 1  # else it does nothing
        with pytest.raises(ValueError, match="LocalSGD") if several else nullcontext():
            LocalSGD(own, model, local_sgd_steps=2)
        LocalSGD(own, model, 2, enabled=False)
    frozen = own.prepare(MLP(9).requires_grad_(False))
    LocalSGD(own, frozen, 2)


@STAGES
def test_the_whole_state_dict_is_rank_0s(anywhere, rank, path, stage):
    own = accelerator(anywhere, stage)
    objects = prepared(own)
    epoch(own, *objects)
    whole = own.get_state_dict(objects[2])
    values = values_of(objects[2])
    assert list(whole) == (list(values) if rank == 0 else [])
    for name, value in whole.items():
        assert_bits(value, values[name], name)
    own.save_model(objects[2], path)
    if rank == 0:
        from safetensors.torch import load_file

        written = load_file(path / "model.safetensors")
        for name, value in values.items():
            assert_bits(written[name], value, name)


def test_mixed_precision_is_accelerates(anywhere):
    losses = []
    for stage in (None, 2):
        own = accelerator(anywhere, stage, mixed_precision="bf16")
        objects = prepared(own)
        assert objects[2](torch.ones(1, 13)).dtype == torch.float32
        losses.append([seen[0] for seen in epoch(own, *objects)])
        AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    assert losses[1] != pytest.approx(run_in_fp32(anywhere), abs=1e-6)


def run_in_fp32(mesh) -> list[float]:
    own = accelerator(mesh, 2)
    return [seen[0] for seen in epoch(own, *prepared(own))]


def test_a_model_on_the_meta_device_is_prepared_with_its_optimizer(anywhere):
    own = accelerator(anywhere, 3)
    with torch.device("meta"):
        model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, model = own.prepare(optimizer, model)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]
    before = values_of(model)
    own.backward(model(rank_data((3, 13), 0)).square().mean())
    optimizer.step()
    assert any(not torch.equal(v, before[name]) for name, v in values_of(model).items())


def test_a_model_without_anything_to_train_and_other_optimizers_stay_as_they_are(anywhere):
    own = accelerator(anywhere, 2)
    temperature = nn.Parameter(torch.ones(3))
    given = torch.optim.SGD([temperature], lr=0.1)
    frozen, optimizer = own.prepare(MLP(9).requires_grad_(False), given)
    assert optimizer.optimizer is given
    assert find(frozen.layers[0].weight) is None


def test_an_optimizer_that_shards_a_part_is_made_after_the_model_is_prepared(anywhere):
    own, model = accelerator(anywhere, 2), MLP(9)
    mesh = {"process_group": None if anywhere is None else anywhere.get_group()}
    early = zero_ext.optim.AdamW(model.layers[0].parameters(), **mesh)
    with pytest.raises(ValueError, match=r"make it after shard\(\) or prepare\(model\)"):
        own.prepare(model, early)
    early = zero_ext.optim.AdamW((model := MLP(9)).parameters(), **mesh)
    own.prepare(model, early)  # of all parameters
    model = own.prepare(MLP(9))
    late = own.prepare(zero_ext.optim.AdamW(model.layers[0].parameters()))
    mean_square(model, rank_data((3, 5), 0)).backward()
    late.step()
    assert find(model.layers[-1].weight).handle.options.stage == 2


def stepped(model) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model, rank_data((3, 5), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    "make, message",
    [
        (stepped, "AdamW has a state already"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS"),
    ],
    ids=["stepped", "not shardable"],
)
def test_what_cannot_be_taken_over_is_said_before_anything_is_changed(anywhere, make, message):
    own = accelerator(anywhere, 2)
    model = MLP(13)
    with pytest.raises((ValueError, TypeError), match=message):
        own.prepare(model, make(model))
    assert find(model.layers[0].weight) is None
    own.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def test_an_optimizer_has_parameters_beside_the_model(anywhere):
    own, scale = accelerator(anywhere, 2), nn.Parameter(torch.ones(5))
    given = torch.optim.SGD([*(model := MLP(13)).parameters(), scale], lr=0.1)
    model, optimizer = own.prepare(model, given)
    own.backward((scale * model(rank_data((3, 5), 0))).square().mean())
    optimizer.step()
    assert find(scale) is not None and not torch.equal(scale, torch.ones(5))


def of_two_models(anywhere, stage: int, kept_in):
    """One optimizer for both."""
    own = accelerator(anywhere, stage)
    models = Classifier(), nn.Linear(7, 7)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    return own, models, *own.prepare(*kept_in(models), optimizer)


def test_one_optimizer_of_several_models_is_refused_before_anything_is_changed(anywhere):
    made = []
    with pytest.raises(ValueError, match=r"several models.*ModuleList"):
        of_two_models(anywhere, 2, lambda models: made.extend(models) or models)
    assert all(find(p) is None for model in made for p in model.parameters())


@STAGES
def test_models_in_one_module_have_one_optimizer(anywhere, rank, stage):
    def trained(stage):
        own, models, both, optimizer = of_two_models(
            anywhere, stage, lambda models: [nn.ModuleList(models)]
        )
        for step in range(3):
            with own.accumulate(both):
                own.backward(models[1](models[0](rank_data((3, 13), rank, step))).square().mean())
                own.clip_grad_norm_(both.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return values_of(both)

    expected = trained(0)
    for name, value in trained(stage).items():
        torch.testing.assert_close(value, expected[name], rtol=CHANCE, atol=CHANCE)


def test_other_kinds_of_parallelism_are_refused(monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", accelerate.DistributedType.FSDP)
    with pytest.raises(ValueError, match="configured for FSDP"):
        Accelerator(cpu=True)


def test_uneven_inputs_are_refused(anywhere):
    own = accelerator(anywhere, 2)
    model, _ = own.prepare(model := Classifier(), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"join_uneven_inputs\(\) is for DDP"):
        own.join_uneven_inputs([model]).__enter__()


@pytest.mark.dist
@pytest.mark.world(min=2)
@STAGES
@pytest.mark.parametrize("samples", [26, 31])
def test_the_last_batches_of_an_epoch_are_missing_on_some_ranks(mesh, rank, world, stage, samples):
    """26: on two ranks some have no batch for the last step. 31: some have one of two."""
    config = accelerate.DataLoaderConfiguration(even_batches=False)
    own = accelerator(mesh, stage, micros=2, dataloader_config=config)
    model, x, y = Classifier(), rank_data((samples, 13), 0), torch.arange(samples) % 7
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    model, optimizer, loader = own.prepare(model, torch.optim.SGD(model.parameters(), 0.5), loader)

    expected = Classifier()
    reference = torch.optim.SGD(expected.parameters(), 0.5)
    batches = list(zip(x.split(3), y.split(3), strict=True))
    steps = -(-len(batches) // (2 * world))
    norms = []
    for epoch in range(2):
        seen = 0
        for batch in loader:
            with own.accumulate(model):
                own.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
                if own.sync_gradients:
                    norms.append(own.clip_grad_norm_(model.parameters(), 0.3))
                    seen += 1
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(steps - seen):  # without data
            norms.append(own.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
        for k in range(steps):
            for batch in batches[2 * world * k : 2 * world * (k + 1)]:
                loss = nn.functional.cross_entropy(expected(batch[0]), batch[1])
                (loss / (2 * world)).backward()
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            torch.testing.assert_close(norms[epoch * steps + k], norm, rtol=CHANCE, atol=CHANCE)
            reference.step()
            reference.zero_grad()
    for name, value in values_of(model).items():
        wanted = expected.get_parameter(name)
        torch.testing.assert_close(value, wanted, rtol=CHANCE, atol=CHANCE, msg=name)


def test_a_model_with_two_optimizers_is_saved(anywhere, rank, path):
    def made(stage):
        own = accelerator(anywhere, stage)
        model = Classifier()
        kinds = torch.optim.Adam, torch.optim.RMSprop
        parts = [
            k(part.parameters(), 0.02) for k, part in zip(kinds, (model[0], model[2]), strict=True)
        ]
        return own, *own.prepare(model, *parts)

    def step(own, model, *optimizers):
        for number in range(3):
            own.backward(model(rank_data((3, 13), rank, number)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    own, *objects = made(2)
    step(own, *objects)
    own.save_state(path / "saved")
    step(own, *objects)
    expected = values_of(objects[0])
    own, *objects = made(2)
    own.load_state(path / "saved")
    step(own, *objects)
    for name, value in values_of(objects[0]).items():
        assert_bits(value, expected[name], name)


def llama():
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(mesh, stage: int | None, folder, kind=Trainer, **arguments):
    """Without a stage: transformers' own."""
    tokens = torch.randint(0, 97, (24, 11), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.7,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=3,
        **{"save_strategy": "no", **arguments},
    )
    both = {"model": llama(), "args": arguments, "train_dataset": data, "eval_dataset": data[:6]}
    if stage is None:
        return transformers.Trainer(**both)
    return kind(**both, stage=stage, sharding={"mesh": mesh, "bucket_mb": 20_000 / 2**20})


def history(made) -> list[list[float]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[float(e[n]) for n in names if n in e] for e in made.state.log_history[:-1]]


@STAGES
def test_a_trainer_trains_as_transformers_does(anywhere, rank, path, stage):
    plain, ours = trainer(anywhere, None, path / "plain"), trainer(anywhere, stage, path / "ours")
    for each in (plain, ours):
        each.train()
    assert len(history(plain)) >= 4
    for one, other in zip(history(plain), history(ours), strict=True):
        assert other == pytest.approx(one, rel=1e-3)  # what is logged has three or four digits
    assert ours.model_wrapped is ours.model and find(ours.model.lm_head.weight) is not None
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)

    ours.save_model(path / "model")
    if rank == 0:
        loaded = transformers.LlamaForCausalLM.from_pretrained(path / "model")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        for (name, value), expected in zip(
            loaded.named_parameters(), plain.model.parameters(), strict=True
        ):
            torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.dist
@pytest.mark.world(min=2, max=3)  # of four, one would have fewer steps
@STAGES
def test_a_trainer_whose_last_micro_batch_some_ranks_lack(mesh, rank, shared_path, stage):
    """Each token of all ranks counts the same, as in one process that has them all."""
    seen = {}

    class Recording(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.setdefault(self.state.global_step, []).append(inputs["input_ids"].clone())
            return super().compute_loss(model, inputs, *args, **kwargs)

    uneven = {"accelerator_config": {"even_batches": False}, "optim": "sgd"}
    ours = trainer(mesh, stage, shared_path / "ours", Recording, **uneven)
    ours.train_dataset = ours.train_dataset[:22]  # 11 batches, 2 of each rank in a step
    ours.train()
    plain = trainer(mesh, None, shared_path / "plain", optim="sgd")
    plain.create_optimizer_and_scheduler(ours.state.max_steps)
    ranks = gather_objects(seen)
    assert len({sum(map(len, each.values())) for each in ranks}) == 2
    for step in range(ours.state.max_steps):
        tokens = torch.cat([batch for each in ranks for batch in each[step]])
        plain.model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.7)
        plain.optimizer.step()
        plain.lr_scheduler.step()
        plain.optimizer.zero_grad()
    for name, value in values_of(ours.model).items():
        expected = plain.model.get_parameter(name)
        torch.testing.assert_close(value, expected, atol=CHANCE, rtol=CHANCE, msg=name)


def test_a_trainer_takes_over_an_optimizer_that_needs_whole_parameters(anywhere, path):
    plain, ours = (
        trainer(anywhere, stage, path / str(stage), optim="adafactor") for stage in (None, 3)
    )
    for each in (plain, ours):
        each.create_optimizer_and_scheduler(6)
        each._created_lr_scheduler = False  # as if they were passed to the trainer
    given = ours.optimizer
    for each in (plain, ours):
        each.train()
    optimizer = getattr(ours.optimizer, "optimizer", ours.optimizer)
    assert optimizer is ours.lr_scheduler.optimizer is given
    assert isinstance(optimizer.zero_core.states, Whole)
    for one, other in zip(history(plain), history(ours), strict=True):
        assert other == pytest.approx(one, rel=1e-3)


def test_a_trainer_resumes_with_another_stage(anywhere, path):
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    saving |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    first = trainer(anywhere, 2, path, **saving)
    first.train()
    resumed = trainer(anywhere, 3, path, **saving)
    resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))
    for one, other in zip(history(first), history(resumed), strict=True):
        assert other == pytest.approx(one, rel=1e-3)
    for name, value in values_of(resumed.model).items():
        torch.testing.assert_close(value, values_of(first.model)[name])


def test_a_trainer_may_evaluate_first(anywhere, rank, path):
    def run(stage):
        made = trainer(anywhere, stage, path, max_steps=3)
        if stage is not None:
            made.evaluate()
        made.train()
        return made

    plain, ours = run(None), run(3)
    assert find(ours.model.lm_head.weight) is not None
    for one, other in zip(history(plain)[:3], history(ours)[-3:], strict=True):
        assert other == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("stage, optimizer", [(2, "adamw_torch"), (3, "sgd"), (3, "adamw_torch")])
def test_a_trainer_goes_on_from_a_checkpoint_of_transformers(anywhere, path, stage, optimizer):
    chosen = {"optim": optimizer, "optim_args": "momentum=0.9" if optimizer == "sgd" else None}
    plain = trainer(anywhere, None, path, save_strategy="steps", save_steps=2, **chosen)
    plain.train()
    ours = trainer(anywhere, stage, path / "ours", **chosen)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="zero_ext")
        ours.train(resume_from_checkpoint=str(path / "checkpoint-2"))
    assert len(history(plain)) > 3
    for one, other in zip(history(plain), history(ours), strict=True):
        assert other == pytest.approx(one, rel=1e-3)
    for name, value in values_of(ours.model).items():
        expected = plain.accelerator.unwrap_model(plain.model).get_parameter(name)
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "gone, message",
    [
        (
            ["zero_ext", "optimizer.pt", "scheduler.pt"],
            r"no optimizer state \(optimizer.pt\) and no schedule",
        ),
        (["zero_ext", "optimizer.pt"], r"no optimizer state \(optimizer.pt\): what is missing"),
        (["scheduler.pt"], r"no schedule \(scheduler.pt\): what is missing begins anew"),
    ],
)
def test_a_trainer_names_what_it_cannot_resume(anywhere, rank, path, gone, message):
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(anywhere, 2, path, max_steps=2, **saving).train()
    folder = path / "checkpoint-2"
    if rank == 0:
        for name in gone:
            (folder / name).rename(folder / f"former_{name}")
    resumed = trainer(anywhere, 3, path, max_steps=3, **saving)
    if anywhere is not None:
        dist.barrier()
    with pytest.warns(UserWarning, match=message):
        resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 3


def test_a_damaged_checkpoint_of_transformers_is_an_error_on_every_rank(anywhere, rank, path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(anywhere, None, path, max_steps=2, **saving).train()
    if rank == 0:
        file = path / "checkpoint-2" / "optimizer.pt"
        file.write_bytes(file.read_bytes()[:1000])
    resumed = trainer(anywhere, 2, path, max_steps=3, **saving)
    with pytest.raises(RuntimeError, match=r"central directory|optimizer\.pt"):
        resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))


def test_an_encoder_and_decoder_generate(anywhere, rank, path):
    torch.manual_seed(4)
    config = transformers.T5Config(
        vocab_size=97, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    models = [transformers.T5ForConditionalGeneration(config).eval()]
    models.append(accelerator(anywhere, 3).prepare(copy.deepcopy(models[0])))
    tokens = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(rank))
    plain, ours = (each.generate(tokens, max_new_tokens=5, do_sample=False) for each in models)
    assert torch.equal(plain, ours) and plain.shape[1] > 1


def test_another_optimizer_follows_when_one_was_freed(anywhere, rank):
    own = accelerator(anywhere, 2)
    model = Classifier()
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = LinearLR(optimizer)
        model, optimizer, schedule = own.prepare(model, optimizer, schedule)
        own.backward(model(rank_data((3, 13), rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        optimizer, schedule = own.free_memory(optimizer, schedule)


def test_a_subclass_of_a_trainer_is_sharded_by_the_mixin(anywhere, world, path):
    losses = []

    class Counting(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            losses.append(super().compute_loss(*args, **kwargs))
            return losses[-1]

    class Sharded(ShardedTrainerMixin, Counting):
        pass

    made = trainer(anywhere, 3, path, Sharded, max_steps=2)
    made.train()
    a_rank_has = 24 // 2 // (1 if anywhere is None else world)  # micro-batches in an epoch
    assert len(losses) == min(2 * 2, a_rank_has) and find(made.model.lm_head.weight) is not None
    with pytest.raises(NotImplementedError, match="start a run for each"):
        made.hyperparameter_search()


def test_the_plan_takes_a_configuration(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    plain = llama()
    plain.config.architectures, plain.config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    plain.config.save_pretrained(tmp_path)
    module = plan.build(str(file))
    shapes = {name: p.shape for name, p in module.named_parameters()}
    assert shapes == {name: p.shape for name, p in plain.named_parameters()}
    assert {(p.dtype, p.is_meta) for p in module.parameters()} == {(torch.bfloat16, True)}
    assert module.lm_head.weight is module.model.embed_tokens.weight

    for given, message in (
        (
            {"model_type": "llama", "architectures": ["Mine"]},
            r"architectures=\['Mine'\], and transformers .* has no such model",
        ),
        ({"model_type": "llama"}, "architectures=None, and"),
        ({}, "Unrecognized model"),
    ):
        file.write_text(json.dumps(given))
        with pytest.raises(ValueError, match=message):
            plan.build(str(file))
    with pytest.raises(ValueError, match=r"missing\.json' cannot be read"):
        plan.build(str(tmp_path / "missing.json"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="a configuration of transformers, which is not installed"):
        plan.build(str(file))
