"""iter_full_params: whole parameters one after the other, on all ranks, on rank 0, on one alone."""

import math

import pytest
import torch
from harness import (
    MLP,
    Odd,
    Tied,
    assert_bits,
    gather_objects,
    mean_square,
    needs_own_gathers,
    rank_data,
)
from setups import SMALL_BUCKET_MB, everything, values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BF16, FP16 = torch.bfloat16, torch.float16
POLICY = MixedPrecisionPolicy(param_dtype=BF16)


class Quantised(MLP):
    """With a weight that nobody trains in int8, a frozen bias, and one that is not sharded."""

    def __init__(self):
        super().__init__(13, layers=3)
        quantised = torch.arange(91, dtype=torch.int8).view(7, 13)
        self.quantised = nn.Parameter(quantised, requires_grad=False)
        self.layers[0].bias.requires_grad_(False)
        self.ignored = nn.Parameter(torch.linspace(-1, 1, 1083))


def batch_of(model, rank: int) -> torch.Tensor:
    if isinstance(model, Tied):
        return (torch.arange(6).view(2, 3) + rank) % 13
    shape = (2, 3, 4, 4) if isinstance(model, Odd) else (4, 5)
    return rank_data(shape, rank, dtype=list(model.parameters())[-1].dtype)


def trained(model, stage: int, mesh, rank: int, policy=None, bucket_mb=SMALL_BUCKET_MB):
    """Sharded, and after a step, so that masters are not their parameters' values."""
    ignored = [model.ignored] if isinstance(model, Quantised) else []
    zero_ext.shard(
        model, stage, mesh=mesh, bucket_mb=bucket_mb, mp_policy=policy, ignored_params=ignored
    )
    sharded = [
        p for p in model.parameters() if p.requires_grad and all(p is not i for i in ignored)
    ]
    optimizer = zero_ext.optim.AdamW(sharded, lr=0.01)
    step(model, optimizer, rank)
    return model, optimizer


def step(model, optimizer, rank: int) -> None:
    mean_square(model, batch_of(model, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


SETTINGS = {
    "fp32": (lambda: MLP(13), None),
    "bf16": (lambda: Odd(BF16), None),
    "policy": (lambda: MLP(7), POLICY),
    "tied": (lambda: Tied(13), None),
    "quantised": (Quantised, POLICY),
}


def expected_of(model, dtype) -> dict[str, torch.Tensor]:
    """Parameter by parameter. Collective."""
    result = values_of(model)
    for name, parameter in model.named_parameters() if dtype is not None else ():
        if parameter.dtype == torch.int8:
            continue
        if name == "ignored" or not parameter.requires_grad:
            result[name] = result[name].to(dtype)
        else:
            result[name] = zero_ext.full_tensor(parameter).to(dtype)
    return result


@STAGES
def test_all_ranks_get_all_parameters_in_any_dtype(anywhere, rank, stage):
    for name, (make, policy) in SETTINGS.items():
        model, _ = trained(make(), stage, anywhere, rank, policy)
        for dtype in (None, torch.float32, BF16, FP16):
            expected = expected_of(model, dtype)
            before = model.stats()["bytes_held"]
            for bucket_mb in (1e-6, SMALL_BUCKET_MB, 1.0):
                arguments = {"dtype": dtype, "bucket_mb": bucket_mb}
                kept = dict(zero_ext.iter_full_params(model, **arguments))
                assert list(kept) == [n for n, _ in model.named_parameters()]
                for n, value in kept.items():
                    assert not value.requires_grad
                    assert_bits(value, expected[n], f"{name} {dtype} {bucket_mb} {n}")
            assert model.stats()["bytes_held"] == before


@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
@STAGES
def test_ranks_may_leave_early_and_only_rank_0_may_want_them(
    own_messages, anywhere, rank, stage, monkeypatch
):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model, optimizer = trained(MLP(13), stage, anywhere, rank, POLICY)
    twin, its_optimizer = trained(MLP(13), stage, anywhere, rank, POLICY)
    for dtype in (None, torch.float32):
        expected = expected_of(model, dtype)

        def iterate(dtype=dtype, **arguments):
            arguments = {"bucket_mb": 1e-6, "dtype": dtype, **arguments}
            return zero_ext.iter_full_params(model, **arguments)

        def compare(values, expected=expected):
            for name, value in values:
                assert_bits(value, expected[name], name)

        compare(iterate(rank0_only=True))
        assert len(list(iterate(rank0_only=True))) == (0 if rank else 6)
        for name, value in iterate():  # all leave
            assert_bits(value, expected[name])
            break
        for k, (name, value) in enumerate(iterate()):  # each rank elsewhere
            assert_bits(value, expected[name])
            if k == rank:
                break
        if rank == 0:  # an error on one rank, while others go on
            with pytest.raises(KeyError):
                for _ in iterate():
                    raise KeyError
        else:
            compare(iterate())
        unfinished = iterate(rank0_only=True)
        if rank == 0:
            next(unfinished)
            unfinished.close()
        else:
            assert list(unfinished) == []
        never_begun = iterate()
        del never_begun
        with torch.inference_mode():
            compare(iterate())
    step(model, optimizer, rank)
    step(twin, its_optimizer, rank)
    pairs = zip(everything(model, optimizer), everything(twin, its_optimizer), strict=True)
    for k, (a, e) in enumerate(pairs):
        assert_bits(a, e, str(k))


@pytest.mark.host
@pytest.mark.dist
def test_one_rank_alone_reads_the_others(mesh, group, rank, world):
    needs_own_gathers(3)
    for make, policy in SETTINGS.values():
        model, optimizer = trained(make(), 3, mesh, rank, policy)
        if model.stats()["neighbors"] < world - 1:
            pytest.skip("some process cannot read another one's memory")
        expected = values_of(model)
        if rank == world - 1:
            for bucket_mb in (1e-6, 1.0):
                for name, value in zero_ext.iter_full_params(model, bucket_mb=bucket_mb):
                    assert_bits(value, expected[name], name)
                for name, value in zero_ext.iter_full_params(model):
                    assert_bits(value, expected[name], name)
                    break
        gather_objects(rank, group)
        model.unshard()
        if rank == 0:
            for name, value in zero_ext.iter_full_params(model):
                assert_bits(value, expected[name], name)
        model.reshard()
        step(model, optimizer, rank)


class Wide(nn.Module):
    """Of 24 equal layers, a bucket of 0.25 MiB holds three."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(139, 139, bias=False) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.host
@pytest.mark.parametrize("stage", [2, 3])
def test_two_buckets_are_the_most_that_is_held(anywhere, stage):
    """Counted by the allocator; and the engine holds nothing more."""
    model = zero_ext.shard(Wide(), stage, mesh=anywhere, bucket_mb=0.25, mp_policy=POLICY)
    model(torch.ones(2, 139, dtype=BF16)).float().sum().backward()
    model.zero_grad()
    for dtype, itemsize in ((None, 2), (torch.float32, 4), (FP16, 2)):
        bucket_mb = itemsize / 8
        arguments = {"bucket_mb": bucket_mb, "dtype": dtype}
        before = model.stats()
        with torch.profiler.profile(profile_memory=True) as profile:
            for _, value in zero_ext.iter_full_params(model, **arguments):
                assert value.shape == (139, 139)
            del value
        changes = profile.profiler.kineto_results.events()
        changes = [e for e in changes if e.name() == "[memory]" and e.nbytes() != 0]
        held = peak = 0
        for each in sorted(changes, key=lambda e: e.start_ns()):
            held += each.nbytes()
            peak = max(peak, held)
        own = 4 * 139**2  # a copy of this rank's part of one master, and agreements
        assert peak <= 2 * bucket_mb * 2**20 + 2 * own, (stage, dtype)
        assert held == 0
        after = model.stats()
        assert after["bytes_held"] == before["bytes_held"]
        assert after["bytes_peak"] == before["bytes_peak"]


@STAGES
def test_mistakes_are_named_and_change_nothing(anywhere, rank, stage):
    model, optimizer = trained(MLP(13), stage, anywhere, rank, POLICY)
    for error, bad, message in [
        (ValueError, {"dtype": torch.int8}, "dtype must be None or one of"),
        (ValueError, {"dtype": "bf16"}, "dtype must be None or one of"),
        (ValueError, {"bucket_mb": 0}, "bucket_mb must be positive"),
        (ValueError, {"bucket_mb": math.inf}, "bucket_mb must be positive"),
        (TypeError, {"bucket_mb": "25"}, "bucket_mb must be a number"),
    ]:
        with pytest.raises(error, match=message):
            zero_ext.iter_full_params(model, **bad)
    with pytest.raises(TypeError, match="takes a module, not a list"):
        zero_ext.iter_full_params([model])
    plain = MLP(13)
    for (name, value), (n, p) in zip(
        zero_ext.iter_full_params(plain, dtype=BF16), plain.named_parameters(), strict=True
    ):
        assert name == n
        assert_bits(value, p.detach().to(BF16))
    gathers = stage > 0 and anywhere is not None and anywhere.size() > 1
    if gathers:  # ranks that ask for different masters
        different = torch.float32 if rank == 0 else FP16
        with pytest.raises(RuntimeError, match="Pass every rank the same bucket_mb and dtype"):
            list(zero_ext.iter_full_params(model, dtype=different))

        def read(_):
            with pytest.raises(RuntimeError, match="inside a backward"):
                list(zero_ext.iter_full_params(model, dtype=torch.float32))

        handle = model.layers[1].weight.register_post_accumulate_grad_hook(read)
        mean_square(model, batch_of(model, rank)).backward()
        handle.remove()
        optimizer.zero_grad()
    expected = expected_of(model, torch.float32)
    for name, value in zero_ext.iter_full_params(model, dtype=torch.float32):
        assert_bits(value, expected[name], name)
