"""EMA: averages of masters, the module that computes with them, and their checkpoints."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import MLP, Odd, Tied, assert_bits, mean_square, rank_data
from setups import SMALL_BUCKET_MB, full, gathered, values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_ext

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LONG_STAGES = pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3]
)
BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16)


class Setting(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    optimizer: Callable
    decay: float
    dtype: torch.dtype = torch.float32  # of the input
    shape: tuple[int, ...] = (4, 5)
    policy: MixedPrecisionPolicy | None = None

    def sharded(self, stage, mesh, seed: int = 0):
        model = self.make()
        if seed:
            for p in model.parameters():
                p.data.add_(seed)
        zero_ext.shard(model, stage, mesh=mesh, bucket_mb=SMALL_BUCKET_MB, mp_policy=self.policy)
        return model, self.optimizer(model.parameters())

    def batch(self, rank: int, step: int = 0) -> torch.Tensor:
        if self.name == "tied":
            return (torch.arange(6).view(2, 3) + rank + step) % 13
        return rank_data(self.shape, rank, step, dtype=self.dtype)

    def step(self, model, optimizer, rank: int, step: int = 0) -> None:
        mean_square(model, self.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


class WithBuffer(nn.Module):
    """Its first bias is frozen; its buffer changes in every forward."""

    def __init__(self):
        super().__init__()
        self.mlp = MLP(13)
        self.mlp.layers[0].bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.mlp(x) * (1 + self.calls)


def adamw(parameters):
    return zero_ext.optim.AdamW(parameters, lr=0.05)


def sgd(parameters):
    return zero_ext.optim.SGD(parameters, lr=0.3, momentum=0.9)


def rmsprop(parameters):
    return zero_ext.optim.wrap(torch.optim.RMSprop, parameters, lr=0.01)


SETTINGS = [
    Setting("fp32", lambda: MLP(13), adamw, 0.9),
    Setting("bf16 parameters", lambda: MLP(13, dtype=BF16), sgd, 0.25, BF16),
    Setting("bf16 policy", lambda: MLP(7), rmsprop, 0.999, BF16, policy=POLICY),
    Setting("frozen, buffer", WithBuffer, adamw, 0.5),
    Setting("odd", lambda: Odd(BF16), adamw, 0.75, BF16, (2, 3, 4, 4)),
    Setting("tied", lambda: Tied(13), sgd, 0.0),
]


def averages_of(ema) -> dict[str, torch.Tensor]:
    return {name: full(value).clone() for name, value in ema.state_dict()["averages"].items()}


def copy_masters(model, into: nn.Module) -> None:
    """Into a plain fp32 model."""
    for parameter, plain in zip(model.parameters(), into.parameters(), strict=True):
        plain.data.copy_(zero_ext.full_tensor(parameter))


@STAGES
def test_the_averages_are_those_of_one_process(anywhere, rank, stage):
    """Bit for bit with one rounding per operation; torch's lerp may fuse two of them."""
    for setting in SETTINGS:
        model, optimizer = setting.sharded(stage, anywhere)
        plain = setting.make().float()
        copy_masters(model, plain)
        d = setting.decay

        def one(a, p, _, d=d):
            return a + (p - a) * (1 - d) if d > 0.5 else p + (a - p) * d

        exact = AveragedModel(plain, avg_fn=one)
        fused = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(d))
        ema = zero_ext.EMA(model, d)
        if rank == 0:  # which other ranks do not take part in
            zero_ext.EMA(model, 0.5).update()
        for step in range(4):
            setting.step(model, optimizer, rank, step)
            copy_masters(model, plain)
            exact.update_parameters(plain)
            fused.update_parameters(plain)
            before = gathered(model)
            with torch.inference_mode(step % 2 == 1):
                ema.update()
            assert gathered(model) == before
        averages = averages_of(ema)
        trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert averages.keys() == trained, setting.name
        for name, average in averages.items():
            where = f"{setting.name}: {name}"
            assert_bits(average, exact.module.get_parameter(name), where)
            theirs = fused.module.get_parameter(name).detach()
            torch.testing.assert_close(average, theirs, rtol=1e-6, atol=1e-7, msg=where)


@LONG_STAGES
def test_inside_swap_the_module_has_the_averages_and_afterwards_its_own_bits(anywhere, rank, stage):
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad] * 2
    for mode, setting in zip(modes, SETTINGS, strict=True):
        model, optimizer = setting.sharded(stage, anywhere)
        twin, its_optimizer = setting.sharded(stage, anywhere)
        ema = zero_ext.EMA(model, setting.decay)
        for step in range(4):
            setting.step(model, optimizer, rank, step)
            setting.step(twin, its_optimizer, rank, step)
            ema.update()
            expected = setting.make()
            if setting.policy is not None:
                expected.to(BF16)
            averages = averages_of(ema)
            for name, value in averages.items():
                expected.get_parameter(name).data.copy_(value)
            for buffer, value in zip(expected.buffers(), model.buffers(), strict=True):
                buffer.copy_(value)
            if step == 1:
                model.unshard()
            x = setting.batch(rank, 99)
            with mode():
                with ema.swap():
                    output = model(x)
                    masters = [zero_ext.full_tensor(p) for p in by_parameter(model, ema)]
                assert_bits(output, expected(x), setting.name)
            compare(masters, [full(v) for v in by_parameter(model, ema).values()], setting.name)
            for buffer, value in zip(twin.buffers(), model.buffers(), strict=True):
                buffer.copy_(value)
            del output
            with pytest.raises(KeyError), ema.swap():  # and where the evaluation fails
                raise KeyError
            compare(everything(model, optimizer), everything(twin, its_optimizer), setting.name)


def by_parameter(model, ema) -> dict:
    averages = ema.state_dict()["averages"]
    return {model.get_parameter(name): value for name, value in averages.items()}


def everything(model, optimizer) -> list[torch.Tensor]:
    """Masters, parameters and states, whole. Collective."""
    masters = [zero_ext.full_tensor(p) for p in model.parameters()]
    states = [full(v) for p in model.parameters() for v in optimizer.state[p].values()]
    return [*masters, *values_of(model).values(), *states]


def compare(actual: list, expected: list, name: str) -> None:
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bits(a, e, f"{name} {k}")


@LONG_STAGES
def test_another_stage_loads_the_averages_and_goes_on(anywhere, rank, stage, path):
    for k, setting in enumerate(SETTINGS):
        model, optimizer = setting.sharded(stage, anywhere)
        ema = zero_ext.EMA(model, setting.decay)
        for step in range(2):
            setting.step(model, optimizer, rank, step)
            ema.update()
        arguments = {"checkpoint_id": path / str(k), "no_dist": anywhere is None}
        dcp.save({"ema": ema.state_dict()}, **arguments)
        ours = path / f"ours{k}"
        zero_ext.checkpoint.save(ours, model, extra={"all": [7, ema.state_dict()]})
        whole = {"averages": averages_of(ema), "n_averaged": 2}
        other, _ = setting.sharded((stage + 1) % 4, anywhere, seed=1)
        loaded, handed, kept = (zero_ext.EMA(other, setting.decay) for _ in range(3))
        state = {"ema": loaded.state_dict()}
        dcp.load(state, **arguments)
        loaded.load_state_dict(state["ema"])
        handed.load_state_dict(copy.deepcopy(whole))
        number, averages = zero_ext.checkpoint.load(ours, other)["all"]
        kept.load_state_dict(averages)
        _, extra = zero_ext.checkpoint.read_whole(ours)
        assert number == 7 and extra["all"][1]["averages"].keys() == whole["averages"].keys()
        for name, value in whole["averages"].items():
            assert_bits(extra["all"][1]["averages"][name], value, name)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            zero_ext.set_full_param(q, zero_ext.full_tensor(p).add_(0.125))
            zero_ext.set_full_param(p, zero_ext.full_tensor(p).add_(0.125))
        for each in (ema, loaded, handed, kept):
            each.update()
        after = averages_of(ema)
        for each in (loaded, handed, kept):
            assert each.state_dict()["n_averaged"] == 3
            assert averages_of(each).keys() == after.keys()
            for name, value in averages_of(each).items():
                assert_bits(value, after[name], f"{setting.name}: {name}")
        if setting.decay:
            assert any(not torch.equal(after[n], whole["averages"][n]) for n in after)


@STAGES
def test_an_optimizer_alone_ignored_and_later_unfrozen_parameters(anywhere, rank, stage):
    model = MLP(13)
    first, second = model.layers[0].weight, model.layers[1].bias
    first.requires_grad_(False)
    if stage in (1, 2):
        group = None if anywhere is None else anywhere.get_group()
        others = [p for p in model.parameters() if p is not second]
        optimizer = zero_ext.optim.AdamW(others, stage=stage, process_group=group, lr=0.05)
    else:
        zero_ext.shard(model, stage, mesh=anywhere, ignored_params=[second])
        optimizer = adamw(p for p in model.parameters() if p is not second)
    ema = zero_ext.EMA(model, 0.5)
    names = set(ema.state_dict()["averages"])
    assert names == dict(model.named_parameters()).keys() - {"layers.0.weight"}
    old = second.detach().clone()
    for step in range(2):
        if step == 1:
            first.requires_grad_(True)
            second.data.add_(1.0)
        mean_square(model, rank_data((4, 5), rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    averages = averages_of(ema)
    assert_bits(averages["layers.0.weight"], zero_ext.full_tensor(first))
    assert_bits(averages["layers.1.bias"], second.detach() + (old - second.detach()) * 0.5)
    with ema.swap():
        assert_bits(second, averages["layers.1.bias"])
    assert_bits(second, old + 1.0)


@STAGES
def test_mistakes_are_named_and_change_nothing(anywhere, rank, stage):
    setting = SETTINGS[1]
    model, optimizer = setting.sharded(stage, anywhere)
    ema = zero_ext.EMA(model, 0.5)
    setting.step(model, optimizer, rank)
    ema.update()
    before, values = averages_of(ema), values_of(model)
    state = ema.state_dict()
    with ema.swap():
        with pytest.raises(RuntimeError, match=r"EMA\.swap\(\) inside EMA\.swap\(\)"), ema.swap():
            pass
        with pytest.raises(RuntimeError, match=r"EMA\.update\(\) inside EMA\.swap\(\)"):
            ema.update()
        with pytest.raises(RuntimeError, match=r"EMA\.load_state_dict\(\) inside EMA\.swap\(\)"):
            ema.load_state_dict(state)
    fewer = dict(list(before.items())[1:])
    reshaped = {**before, "layers.0.bias": torch.ones(14)}
    for bad, message in [
        (fewer, "the state has no average of 'layers.0.weight'"),
        ({**before, "head": torch.ones(3)}, "the module has no average of 'head'"),
        (reshaped, r"'layers.0.bias' has shape \[14\], not \[13\]"),
        ({**before, "layers.0.bias": 3}, "'layers.0.bias' is a int, no tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            ema.load_state_dict({"averages": bad, "n_averaged": 7})
    with pytest.raises(ValueError, match=r"the state has \['model'\], not 'averages'"):
        ema.load_state_dict({"model": before})
    if anywhere is not None and anywhere.size() > 1:  # one rank's mistake is every rank's
        wrong = {"averages": fewer if rank == 1 else before, "n_averaged": 7}
        with pytest.raises((RuntimeError, ValueError), match="has no average of"):
            ema.load_state_dict(wrong)
    if stage == 3:
        refused = pytest.raises(RuntimeError, match=r"EMA.swap\(\) inside\s+summon")
        with model.summon_full_params(writeback=False), refused, ema.swap():
            pass
    assert ema.state_dict()["n_averaged"] == 1
    compare(list(averages_of(ema).values()), list(before.values()), "averages")
    compare(list(values_of(model).values()), list(values.values()), "parameters")
    for decay in (-0.1, 1.5, "0.9", float("nan")):
        with pytest.raises(ValueError, match="a decay from 0 to 1, not"):
            zero_ext.EMA(model, decay)
    with pytest.raises(ValueError, match="this MLP is not sharded"):
        zero_ext.EMA(MLP(), 0.5)
    with pytest.raises(TypeError, match="list"):
        zero_ext.EMA([model], 0.5)
