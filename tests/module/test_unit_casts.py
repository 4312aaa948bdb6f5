"""``mp_policy`` casts the inputs of every unit, as FSDP2 does, in each stage and size of units."""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import ONE_UNIT_EACH, assert_bits, mean_square, rank_data
from reference import gradients_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import zero_ext

BF16, F32 = torch.bfloat16, torch.float32
SHAPE, WIDTH = (3, 7), 7
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
WITH_OUTPUT = dataclasses.replace(POLICY, output_dtype=F32)


class Norm(nn.Module):
    """Computes and returns fp32, whatever it gets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (WIDTH,)) * self.scale.float()


class Rotated(nn.Module):
    """Multiplies fp32 angles with what a bf16 layer returns, in the dtype that arrives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], *, kept: dict[str, Tensor]):
        assert kept["where"].dtype == torch.int64 and kept["mask"].dtype == torch.bool
        y = self.linear(x) * angles[0] + angles[1]
        return y.masked_fill(kept["mask"], 0.25)


class Router(nn.Module):
    """Returns fp32 weights of its two outputs."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x).float().softmax(-1).max(-1, keepdim=True).values


class Model(nn.Module):
    """fp32 comes out of norms, routers and angles, and goes into bf16 layers."""

    def __init__(self, recompute: bool | None = None):
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute  # as checkpoint(use_reentrant=)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Norm(), Rotated(), Router(), Rotated(), Norm()])
        self.last = nn.Sequential(nn.Linear(WIDTH, 13), nn.LayerNorm(13), nn.Linear(13, 1))
        self.register_buffer("angles", torch.linspace(0.1, 2.3, WIDTH))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.first.weight.dtype
        angles = (self.angles.cos(), self.angles.sin())  # fp32
        kept = {"where": torch.arange(3), "mask": torch.arange(WIDTH) < 2}
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x, angles, kept) if isinstance(block, Rotated) else block(x)
            self.dtypes.append(x.dtype)
        return self.last(x)

    def call(self, block: nn.Module, x: Tensor, angles, kept) -> Tensor:
        if self.recompute is None:
            return block(x, angles, kept=kept)
        return checkpoint(
            lambda y, *a: block(y, a, kept=kept), x, *angles, use_reentrant=self.recompute
        )


class ByHand(Model):
    """The same in plain torch, with all casts written down."""

    def __init__(self):
        super().__init__()
        self.to(BF16)
        self.angles = torch.linspace(0.1, 2.3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        angles = (self.angles.cos().to(BF16), self.angles.sin().to(BF16))
        mask = torch.arange(WIDTH) < 2
        x = self.first(x.to(BF16))
        for block in self.blocks:
            x = x.to(BF16)
            if isinstance(block, Rotated):
                x = (block.linear(x) * angles[0] + angles[1]).masked_fill(mask, 0.25)
            else:
                x = block(x)
        x = self.last[0](x.to(BF16))
        return self.last[2](self.last[1](x)).float()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    mean_square(model, x).backward()
    return [g.float() for g in gradients_of(model).values()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_units_get_what_casts_by_hand_would_give_them(stage, anywhere, rank, world):
    plain, x = ByHand(), rank_data(SHAPE, rank)
    expected = plain(x)
    mean_square(plain, x).backward()
    for settings in (
        {},
        {"bucket_mb": ONE_UNIT_EACH},
        {"units": (Norm, Rotated, Router, nn.Linear)},
    ):
        model = zero_ext.shard(Model(), stage, mesh=anywhere, mp_policy=WITH_OUTPUT, **settings)
        found = model(x)
        assert_bits(found, expected)
        # What a unit returns stays as it is: output_dtype is the sharded module's alone.
        assert model.dtypes == [F32, BF16, F32, BF16, F32]
        found = gradients(model, x)
        if world == 1:
            for mine, parameter in zip(found, plain.parameters(), strict=True):
                assert_bits(mine, parameter.grad.float())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_casts_as_the_forward_does(stage, reentrant, anywhere, rank):
    x = rank_data(SHAPE, rank)
    sides = []
    for recompute in (None, reentrant):
        model = Model(recompute)
        zero_ext.shard(model, stage, mesh=anywhere, mp_policy=POLICY, bucket_mb=ONE_UNIT_EACH)
        sides.append(gradients(model, x))
    for kept, recomputed in zip(*sides, strict=True):
        assert_bits(recomputed, kept)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(2)
def test_outputs_and_gradients_are_those_of_fsdp2(no_stale_meshes, mesh, rank):
    """Two ranks: a sum of two numbers has one order."""
    theirs, x = Model(), rank_data(SHAPE, rank)
    for block in (*theirs.blocks, *theirs.last):
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(theirs, mesh=mesh, mp_policy=WITH_OUTPUT)
    expected = [theirs(x), *gradients(theirs, x)]
    for stage in (0, 2, 3):
        for settings in ({}, {"bucket_mb": ONE_UNIT_EACH}):
            model = zero_ext.shard(Model(), stage, mesh=mesh, mp_policy=WITH_OUTPUT, **settings)
            for mine, other in zip([model(x), *gradients(model, x)], expected, strict=True):
                assert_bits(mine, other)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclasses.dataclass(frozen=True)
class Fields:
    value: Tensor
    count: Tensor


class Shows(nn.Linear):
    """Remembers what it is called with."""

    def forward(self, *args, **kwargs) -> Tensor:
        self.seen = (args, kwargs)
        return super().forward(args[0])


def test_what_floats_is_cast_in_all_containers_and_nothing_else(anywhere):
    one, half = torch.ones(2), torch.ones(2, dtype=BF16)
    others = [torch.ones(2, dtype=d) for d in (torch.int32, torch.bool, torch.complex64)]
    fields, cache, untouched = Fields(one, others[0]), [half], [*others, "text", None, 3.5]
    for stage in (1, 3):
        model = nn.Sequential(nn.Linear(5, 5), Shows(5, 5))
        zero_ext.shard(model, stage, mesh=anywhere, mp_policy=POLICY, bucket_mb=ONE_UNIT_EACH)
        with model.summon_full_params():
            model[1](
                torch.ones(2, 5, dtype=torch.float64),
                Pair(one, others[0]),
                {"in": [(one, {"deep": one})]},
                cache,
                fields=fields,
                untouched=untouched,
                nothing=None,
            )
        (x, pair, nested, kept), kwargs = model[1].seen
        (outer, inner) = nested["in"][0]
        cast = (x, pair.a, outer, inner["deep"], kwargs["fields"].value)
        assert [value.dtype for value in cast] == [BF16] * 5
        assert type(pair) is Pair and pair.b is others[0] and kwargs["fields"].count is others[0]
        # A forward may write to what it gets, where nothing is to be cast in it.
        assert kept is cache and kwargs["untouched"] is untouched and kwargs["nothing"] is None
        assert fields.value is one and list(kwargs) == ["fields", "untouched", "nothing"]


def test_only_units_with_parameters_are_cast_and_only_on_request(anywhere):
    def hooks(stage: int, **kwargs) -> list[str]:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5)))
        model.append(nn.LayerNorm(5))
        kwargs.setdefault("ignored_params", list(model[3].parameters()))
        zero_ext.shard(model, stage, mesh=anywhere, **kwargs)
        named = model.named_modules()
        return [
            name
            for name, module in named
            if any(type(h).__name__ == "InputCast" for h in module._forward_pre_hooks.values())
        ]

    off = dataclasses.replace(POLICY, cast_forward_inputs=False)
    for stage in (0, 2, 3):
        assert hooks(stage, mp_policy=POLICY) == ["0", "2"]
        assert hooks(stage, mp_policy=POLICY, ignored_params=()) == ["0", "2", "3"]
        assert hooks(stage, mp_policy=POLICY, units=lambda name, _: name == "2.0") == ["2.0"]
        assert hooks(stage) == hooks(stage, mp_policy=off) == []
        with pytest.raises(ValueError, match="chooses no module of Sequential"):
            hooks(stage, units=nn.Conv2d)
    model = zero_ext.shard(nn.Sequential(nn.Linear(5, 5), Norm()), mp_policy=POLICY)
    assert not copy.deepcopy(model)[0]._forward_pre_hooks  # of a plain module
