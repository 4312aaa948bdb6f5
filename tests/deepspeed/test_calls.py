"""What DeepSpeed's engine and package have beside training: names, settings, values."""

import argparse
import re
import warnings

import pytest
import torch
from harness import MLP, assert_bits, gather_objects, mean_square
from setups import train_batch
from test_initialize import initialized, train

import zero_ext
import zero_ext.deepspeed as deepspeed
from zero_ext.deepspeed import reports


def test_a_script_with_the_import_changed(anywhere, rank, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # there is one, or one rank
    model = MLP(13)
    engine, *_ = deepspeed.initialize(
        args=args, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh=anywhere
    )
    assert args.deepspeed and isinstance(engine, deepspeed.DeepSpeedEngine)
    train(engine, rank, [0], micros=1)
    assert engine.global_steps == 1
    with pytest.raises(AttributeError, match=r"has no 'Pipeline'\. It has DeepSpeedEngine"):
        _ = deepspeed.Pipeline


@pytest.mark.parametrize("stage", [0, 3])
def test_values_by_deepspeeds_names(anywhere, rank, stage):
    engine = initialized(anywhere, MLP(13), stage, bf16={"enabled": True})
    train(engine, rank, [0])
    train(engine, rank, [1], micros=2)
    weight = engine.module.layers[0].weight
    utils = deepspeed.utils
    assert_bits(utils.safe_get_full_fp32_param(weight), zero_ext.full_tensor(weight))
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert_bits(moment, zero_ext.full_state(engine.optimizer, weight, "exp_avg"))
    utils.safe_set_full_optimizer_state(weight, torch.ones_like(moment), "exp_avg")
    assert_bits(zero_ext.full_state(engine.optimizer, weight, "exp_avg"), torch.ones_like(moment))
    utils.safe_set_full_fp32_param(weight, torch.full_like(moment, 0.3))
    assert_bits(zero_ext.full_tensor(weight), torch.full_like(moment, 0.3))
    gradient = torch.full_like(moment, 0.25)
    utils.safe_set_full_grad(weight, gradient)
    utils.safe_update_full_grad_vectorized(engine.parameters(), lambda g, p: g * 2)
    assert_bits(utils.safe_get_full_grad(weight), 2 * gradient)
    plain = torch.nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"no optimizer steps the parameter of shape \(3, 5\)"):
        utils.safe_get_full_optimizer_state(plain, "exp_avg")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_local_values_are_this_rank_s_part_of_the_whole(anywhere, rank, stage):
    engine = initialized(anywhere, MLP(13), stage, bf16={"enabled": True})
    train(engine, rank, [0])
    train(engine, rank, [1], micros=2)
    utils, weight = deepspeed.utils, engine.module.layers[0].weight
    gradient = torch.arange(weight.shape.numel(), dtype=torch.float32).view(weight.shape)
    zero_ext.set_full_grad(weight, gradient)
    kinds = {
        "fp32_param": (zero_ext.full_tensor, ()),
        "grad": (zero_ext.full_grad, ()),
        "optimizer_state": (
            lambda p: zero_ext.full_state(engine.optimizer, p, "exp_avg"),
            ("exp_avg",),
        ),
    }
    for kind, (whole, key) in kinds.items():
        parts = [getattr(utils, f"safe_get_local_{kind}")(weight, *key)]
        if anywhere is not None:
            parts = gather_objects(parts[0], anywhere.get_group())
        expected = whole(weight)
        if stage > 0:
            assert_bits(torch.cat(parts), expected.flatten(), kind)
        own = getattr(utils, f"safe_get_local_{kind}")(weight, *key)
        getattr(utils, f"safe_set_local_{kind}")(weight, 2 * own, *key)
        assert_bits(whole(weight), 2 * expected, kind)
    with pytest.raises(ValueError, match=r"elements of parameter 'layers.0.weight', and the value"):
        utils.safe_set_local_fp32_param(weight, torch.zeros(1083))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_are_whole_inside_the_context(anywhere, rank, world, stage):
    model, zero = MLP(13), deepspeed.zero
    model.layers[0].bias.requires_grad_(False)
    expected = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    engine = initialized(anywhere, model, stage, bf16={"enabled": True})
    first, last = engine.layers[0], engine.layers[-1]
    masters = {name: zero_ext.full_tensor(p) for name, p in engine.module.named_parameters()}
    # Only what is asked for; tied and repeated parameters once.
    with zero.GatheredParameters([first.weight, first.bias, first.weight], modifier_rank=None):
        assert_bits(first.weight, expected["layers.0.weight"])
        assert_bits(first.bias, expected["layers.0.bias"])
        if stage == 3 and anywhere is not None:
            with pytest.raises(RuntimeError):
                last.weight.sum().item()
    # The last rank changes one of two: every rank gets it, the other keeps its fp32 bits.
    source = 0 if anywhere is None else world - 1
    both = iter([last.weight, last.bias])
    with zero.GatheredParameters(both, modifier_rank=source), torch.no_grad():
        last.weight.fill_(0.5 if rank == source else rank + 7)
    assert_bits(zero_ext.full_tensor(last.weight), torch.full_like(masters["layers.2.weight"], 0.5))
    assert_bits(zero_ext.full_tensor(last.bias), masters["layers.2.bias"])
    with zero.GatheredParameters(first.bias, modifier_rank=0), torch.no_grad():
        first.bias.zero_()  # a frozen one
    with (
        pytest.raises(KeyError if rank == source else RuntimeError),
        zero.GatheredParameters(first.weight, modifier_rank=0),
    ):
        if rank == source:
            raise KeyError
    with pytest.raises(ValueError, match="modifier_rank=-1"):
        zero.GatheredParameters(first.weight, modifier_rank=-1).__enter__()
    train(engine, rank, [0])  # and it trains as one whose parameters had these values at once
    again = initialized(anywhere, _with_values(MLP(13)), stage, bf16={"enabled": True})
    train(again, rank, [0])
    for p, q in zip(engine.module.parameters(), again.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


def _with_values(model):
    with torch.no_grad():
        model.layers[0].bias.zero_().requires_grad_(False)
        model.layers[-1].weight.fill_(0.5)
    return model


def test_batch_sizes_may_change_between_steps(anywhere, rank, world):
    world = 1 if anywhere is None else world
    engine = initialized(anywhere, MLP(13))
    assert engine.get_batch_info() == (12 * world, 4, 3)
    train(engine, rank, [0])
    engine.set_train_batch_size(8 * world)
    assert engine.get_batch_info() == (8 * world, 4, 2)
    train(engine, rank, [1], micros=1)
    with pytest.raises(RuntimeError, match="in the middle of an accumulation"):
        engine.set_train_batch_size(4 * world)
    train(engine, rank, [1], micros=1)
    assert engine.global_steps == 2 and engine.global_samples == 20 * world
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10 * world, 5, 2)
    for wrong in (5 * world + 1, 0):
        with pytest.raises(ValueError, match=f"give a multiple of the {5 * world} samples"):
            engine.set_train_batch_size(wrong)
    # The losses are divided by the new number: two steps of another engine have the same bits.
    other = initialized(anywhere, MLP(13), gradient_accumulation_steps=2)
    again = initialized(anywhere, MLP(13))
    again.set_train_batch_size(8 * world)
    train(other, rank, range(2), micros=2)
    train(again, rank, range(2), micros=2)
    for p, q in zip(other.parameters(), again.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))


def test_what_it_tells_of_itself(anywhere):
    fp16 = {"enabled": True, "initial_scale_power": 4}
    engine = initialized(anywhere, MLP(13), 2, fp16=fp16, steps_per_print=10)
    assert engine.dynamic_loss_scale() and engine.cur_scale == 16 and engine.steps_per_print() == 10
    assert engine.get_mom() == [(0.8, 0.9)] and engine.config["stage"] == 2
    assert (engine.data_parallel_group is None) == (anywhere is None)
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125]
    static = initialized(anywhere, MLP(13), fp16={"enabled": True, "loss_scale": 8})
    assert not static.dynamic_loss_scale() and static.loss_scale() == 8


@pytest.mark.parametrize("own", [False, True], ids=["fused", "own code"])
@pytest.mark.parametrize(
    ("precision", "dynamic", "scales"),  # before an overflow, and after it
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}, True, [16, 8]),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, False, [8, 8]),
        ({"bf16": {"enabled": True}}, False, [1, 1]),
        ({}, False, [1, 1]),
    ],
    ids=["dynamic", "static", "bf16", "fp32"],
)
def test_what_its_optimizer_tells(anywhere, rank, own, precision, dynamic, scales):
    given = (lambda p: torch.optim.Rprop(p, lr=0.01)) if own else None
    engine = initialized(anywhere, MLP(13), 2, given, gradient_accumulation_steps=1, **precision)
    optimizer = engine.optimizer
    assert engine.basic_optimizer is optimizer and isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.dynamic_loss_scale is dynamic and optimizer.overflow is False
    dtype = next(engine.parameters()).dtype
    for factor, scale in ((1.0, scales[0]), (float("inf"), scales[1]), (1.0, scales[1])):
        engine.backward(mean_square(engine, train_batch(rank, 0, 0, dtype)) * factor)
        with warnings.catch_warnings(action="ignore"):  # steps are skipped
            engine.step()
        assert optimizer.overflow is (factor != 1)
        assert optimizer.cur_scale == optimizer.loss_scale == engine.cur_scale == scale
    assert type(optimizer.cur_scale) is float and "overflow" not in vars(optimizer)


class Overflowing(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.overflow = "its own"


def test_an_optimizer_keeps_its_own_attributes(anywhere, rank):
    engine = initialized(anywhere, MLP(13), optimizer=lambda p: Overflowing(p, 0.1))
    train(engine, rank, [0])
    assert engine.optimizer.overflow == "its own" and not hasattr(engine.optimizer, "cur_scale")


def test_monitors_and_breakdowns(anywhere, rank, path, caplog, monkeypatch):
    folder = path.parent
    written = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, samples):
            written.append((str(self.folder), name, samples))

        def flush(self):
            pass

    monkeypatch.setattr(reports, "_summary_writer", Writer)
    caplog.set_level("INFO", "zero_ext")
    engine = initialized(
        anywhere,
        MLP(13),
        csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "run"},
        tensorboard={"enabled": True, "output_path": str(folder)},
        fp16={"enabled": True, "initial_scale_power": 4},
        wall_clock_breakdown=True,
        memory_breakdown=True,
        dump_state=True,
    )
    losses = [mean_square(engine, train_batch(rank, 0, m, torch.float16)).item() for m in range(3)]
    train(engine, rank, range(2))
    told = " ".join(record.getMessage() for record in caplog.records)
    if rank != 0:
        assert not written and "milliseconds" not in told
        return
    each = engine.train_batch_size()
    rows = (folder / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert rows[0] == "step,train_loss" and rows[1].startswith(f"{each},") and len(rows) == 3
    assert float(rows[1].split(",")[1]) == pytest.approx(sum(losses) / 3, rel=1e-3)
    scales = (folder / "run" / "Train_Samples_loss_scale.csv").read_text().splitlines()
    assert scales == ["step,loss_scale", f"{each},16.0", f"{2 * each},16.0"]
    assert (str(folder / "DeepSpeed"), "Train/Samples/lr", 2 * each) in written
    assert re.search(r"milliseconds of a step: forward [\d.]+, backward [\d.]+, step [\d.]+", told)
    assert "'bytes_master'" in told and "settings: Config(" in told


@pytest.mark.parametrize("stage", [1, 3])
def test_states_and_weights(anywhere, rank, stage):
    model = MLP(13)
    model.layers[0].bias.requires_grad_(False)
    engine = initialized(anywhere, model, stage, bf16={"enabled": True})
    train(engine, rank, [0])
    engine.offload_states(include=["optim_states", "hp_params"])
    engine.reload_states(non_blocking=True)
    with pytest.raises(ValueError, match="choose 'cpu'"):
        engine.offload_states(device="nvme")
    with pytest.raises(ValueError, match="there is no state 'weights'"):
        engine.offload_states(include=["weights"])
    engine.empty_partition_cache()
    state = engine.module_state_dict()
    assert state.keys() == NAMES.keys()
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"layers.0.bias"}
    other = initialized(anywhere, MLP(13), stage, bf16={"enabled": True})
    other.load_module_state_dict({"module": state})
    for p, q in zip(engine.parameters(), other.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(q), zero_ext.full_tensor(p).bfloat16().float())


NAMES = MLP(13).state_dict()
