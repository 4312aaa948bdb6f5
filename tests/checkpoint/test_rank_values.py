"""Values that differ between ranks by design: each rank gets its own back from a checkpoint."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import made
from harness import assert_bits
from torch import nn

import zero_ext
from zero_ext import checkpoint
from zero_ext.checkpoint.rank_values import digest_of

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Centred(nn.Module):
    """Its forward reads and writes buffers. Its extra state is no tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(7, 13), nn.BatchNorm1d(13)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("codes", torch.zeros(3, 5))
        self.register_buffer("same", torch.arange(5))
        self.seen: list[float] = []

    def forward(self, x):
        y = self.norm(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(x.mean(), 0.5)
            self.codes.add_(x[:3, :5])
        self.seen.append(float(x[0, 0]))
        return y - self.mean + self.codes.sum()

    def get_extra_state(self):
        return {"seen": list(self.seen)}

    def set_extra_state(self, state):
        self.seen = list(state["seen"])


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(4, 7, generator=generator, device="cpu")
    return values.to(torch.get_default_device())


def train(model, optimizer, rank, steps):
    for step in steps:
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model) -> list[torch.Tensor]:
    parameters = [zero_ext.full_tensor(p) for p in model.parameters()]
    return [*parameters, *(b.clone() for b in model.buffers()), torch.tensor(model.seen)]


@STAGES
@pytest.mark.parametrize("async_", [False, True], ids=["", "async"])
def test_a_resumed_run_is_the_uninterrupted_one(anywhere, rank, path, stage, async_):
    """Buffers, extra states and random states of each rank."""
    run = made(anywhere, stage, Centred())
    train(*run, rank, range(3))
    generator = torch.Generator().manual_seed(rank)
    extra = {"generator": generator.get_state(), "epoch": 3}
    saved = checkpoint.save(path, *run, extra=extra, async_=async_)
    if async_:
        saved.result()
    drawn = torch.rand(5, generator=generator, device="cpu")
    train(*run, rank, range(3, 5))

    again = made(anywhere, stage, Centred())
    extra = checkpoint.load(path, *again)
    assert extra["epoch"] == 3
    generator.set_state(extra["generator"])
    assert_bits(torch.rand(5, generator=generator, device="cpu"), drawn, "the next numbers")
    train(*again, rank, range(3, 5))
    for k, (actual, expected) in enumerate(zip(state(again[0]), state(run[0]), strict=True)):
        assert_bits(actual, expected, f"value {k}")


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_each_rank_trains_by_itself(anywhere, rank, path, stage):
    """ignored_params, with the state of their plain optimizer."""

    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1083))
        zero_ext.shard(model, stage, mesh=anywhere, ignored_params=[*model[0].parameters()])
        shared = zero_ext.optim.AdamW(model[1].parameters(), lr=0.1)
        return model, [shared, torch.optim.Adam(model[0].parameters(), lr=0.1)]

    def step(model, optimizers):
        model(batch(rank, 0)[:, :5]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    run, again = make(), make()
    step(*run)
    checkpoint.save(path, *run)
    checkpoint.load(path, *again)
    step(*run)
    step(*again)
    for mine, theirs in zip(again[0][0].parameters(), run[0][0].parameters(), strict=True):
        assert_bits(mine, theirs)


@STAGES
def test_another_number_of_ranks_gets_rank_0s_values(anywhere, on_one_rank, rank, path, stage):
    """One warning names what differed. Plain torch reads the file as well."""
    run = made(anywhere, stage, Centred())
    train(*run, rank, range(2))
    checkpoint.save(path, *run, extra={"rank": rank})
    several = anywhere is not None and anywhere.size() > 1

    alone = made(on_one_rank, 3 - stage, Centred())
    warns = pytest.warns(UserWarning) if several else contextlib.nullcontext([])
    with warns as warnings:
        extra = checkpoint.load(path, *alone)
    assert extra == {"rank": 0}
    if several:
        [message] = [str(each.message) for each in warnings]
        for name in ("model._extra_state", "model.codes", "model.mean", "running_mean", "extra"):
            assert name in message
        assert "same" not in message and "weight" not in message
    plain = Centred()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.0), 0, range(2))
    assert_bits(alone[0].codes, plain.codes)
    assert alone[0].seen == plain.seen

    codes = {"model": {"codes": torch.zeros(3, 5)}}
    dcp.load(codes, checkpoint_id=path, no_dist=True)
    assert_bits(codes["model"]["codes"], plain.codes)
    whole, extra = checkpoint.read_whole(path)
    assert_bits(whole["mean"], plain.mean.cpu())
    assert extra == {"rank": 0} and whole.keys() == plain.state_dict().keys()


def test_ranks_that_agree_write_nothing_of_their_own(anywhere, rank, path):
    """Sets have another order in each process; that is no difference."""
    run = made(anywhere, 2, Centred())
    train(*run, 0, range(1))  # the same batch on every rank
    checkpoint.save(path, *run, extra={"done": {"a", "bc", "def"}, "lr": 0.1, "none": None})
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert not [key for key in metadata.state_dict_metadata if "rank" in key]


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        ({"a": [1, torch.ones(2)]}, {"a": [1, torch.ones(2) * 2]}),
        ([1, 2], (1, 2)),
        (1, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.Size([1]), (1,)),
    ],
)
def test_values_that_differ_have_other_digests(one, other):
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.zeros(2, 3).t(), torch.zeros(3, 2)),
        (torch.ones(1).expand(4), torch.ones(4)),
        ({"a": {3, 5}}, {"a": {5, 3}}),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan)),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    ],
)
def test_equal_values_have_one_digest(one, other):
    assert digest_of(one) == digest_of(other)
