"""Replay: gradients that another rank computes otherwise are named before the update."""

import random

import pytest
import torch
from elastic_training import Training
from harness import assert_bits
from torch.utils.data import DataLoader

import zero_ext
from zero_ext.data import GlobalBatches

STEPS = 4  # the last one has 6 micro-batches: on 4 ranks unevenly many


def flipping(place: int):
    """A hook that flips a bit of one element."""

    def flip(gradient):
        flipped = gradient.contiguous().clone()
        flipped.view(-1).view(torch.uint8)[place % flipped.nbytes] ^= 8
        return flipped

    return flip


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replays_change_no_bit(stage, mesh, rank, world):
    plain, replayed = (Training(stage, rank, world, mesh=mesh) for _ in range(2))
    for _ in range(STEPS):
        plain.step()
        replayed.step(replay_every=2)
    assert plain.fingerprint() == replayed.fingerprint()
    assert plain.batches.state_dict() == replayed.batches.state_dict()


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_flipped_bit_is_named_before_the_update(stage, mesh, rank, world):
    for seed in range(5):
        draw = random.Random(10 * stage + seed)
        training = Training(stage, rank, world, mesh=mesh)
        trained = [(n, p) for n, p in training.model.named_parameters() if p.requires_grad]
        faulty, every = draw.randrange(world), draw.randint(1, 2)
        name, parameter = draw.choice(trained)
        place = draw.randrange(100)
        training.step(replay_every=every)
        if rank == faulty:
            parameter.register_hook(flipping(place))
        other = (faulty + 1) % world
        with pytest.raises(RuntimeError) as error:
            for _ in range(every):
                before = training.fingerprint()
                training.step(replay_every=every)
        assert f"the gradient of '{name}' in micro-batch" in str(error.value)
        assert f"between rank {faulty} and rank {other}" in str(error.value)
        assert training.fingerprint() == before


class Running(torch.nn.Module):
    """It counts its forwards in a buffer, and computes with the mean of what it has seen, which it
    writes to a new tensor, and with all that it has seen of one element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.jit.script(torch.nn.BatchNorm1d(7))
        self.first = torch.nn.Linear(7, 3)
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("seen", None)

    def forward(self, x):
        self.forwards += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        seen = [] if self.seen is None else [self.seen]
        self.seen = torch.cat([*seen, x[:, 0]])
        self.mean[0] = self.seen.mean()
        return self.first(self.norm(x) - self.mean)


class Augmented(torch.utils.data.Dataset):
    """Samples with noise, drawn as they are read."""

    def __init__(self, length: int):
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randn(length, 7, device="cpu", generator=generator)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i] + torch.rand(7, device="cpu")


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_replay_begins_as_the_micro_batch_and_leaves_no_trace(mesh, rank, world, broadcast):
    def train(**replay) -> list[torch.Tensor]:
        model = zero_ext.shard(
            Running(), 2, mesh=mesh, reduction="exchange", broadcast_buffers=broadcast
        )
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
        samples = Augmented(12 * world)
        batches = GlobalBatches(samples, 3, 2 * world, num_replicas=world, rank=rank)
        loader = DataLoader(samples, batch_sampler=batches)

        def loss_of(x):
            return model(x.to(torch.get_default_device())).square().mean()

        if replay:
            replay["loss_of"] = loss_of
        mean = model.mean
        for step in batches.steps(loader, model, **replay):
            for x in step:
                loss_of(x).backward()
                mean = model.mean
            assert model.mean is mean
            optimizer.step(divide_by=len(step))
            optimizer.zero_grad()
        assert_bits(model.forwards, torch.tensor(4.0))
        parameters = [zero_ext.full_tensor(p) for p in model.parameters()]
        buffers = [model.mean, model.seen, model.norm.running_mean]
        return [*parameters, *buffers, torch.rand(3)]

    torch.manual_seed(1)
    expected = train()
    torch.manual_seed(1)
    for actual, plain in zip(train(replay_every=1), expected, strict=True):
        assert_bits(actual, plain)


def test_arguments_without_sense_are_named():
    training = Training(1, 0, 1, mesh="alone")
    loader = training._loader
    with pytest.raises(ValueError, match="replay_every needs loss_of"):
        training.batches.steps(loader, training.model, replay_every=3)
    with pytest.raises(ValueError, match="replay_every must be at least 1"):
        training.batches.steps(loader, training.model, replay_every=0, loss_of=len)
    training.step(replay_every=1)  # one rank: there is no other one
