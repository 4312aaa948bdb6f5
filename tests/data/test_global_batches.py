"""Global batches: the samples of each step, and the bits of a training on any number of ranks."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from harness import GATHERS_TOGETHER
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import zero_ext
from zero_ext.data import GlobalBatches, seeded

SAMPLES, BATCH_SIZE, MICRO_BATCHES = 83, 2, 12  # the last step has 6, the last of which has one


class Tokens(Dataset):
    """[7] numbers below 13, other ones for each index."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        generator = torch.Generator("cpu").manual_seed(i)
        return torch.randint(0, 13, (7,), generator=generator, device="cpu")


class Indices(Dataset):
    def __init__(self, samples: int = SAMPLES):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return i


class Model(nn.Module):
    """With dropout, a head that is tied to the embedding, a frozen part and matrices for Muon."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + functional.dropout(functional.gelu(block(x)), 0.3, self.training)
        return self.head(self.norm(x))


class Training:
    """One model with two optimizers and a schedule of each, on ``num_replicas`` ranks."""

    def __init__(self, mesh, stage: int, rank: int, world: int, num_workers: int = 0):
        self.model = zero_ext.shard(
            Model().bfloat16(), stage, mesh=mesh, bucket_mb=1e-4, reduction="exchange"
        )
        matrices = [b.weight for b in self.model.blocks if b.weight.requires_grad]
        others = [p for p in self.model.parameters() if all(p is not m for m in matrices)]
        self.optimizers = [
            zero_ext.optim.Muon(matrices, lr=0.02, max_grad_norm=0.5),
            zero_ext.optim.AdamW(others, lr=0.01, max_grad_norm=0.3),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))
            for o in self.optimizers
        ]
        self.batches = GlobalBatches(
            Tokens(), BATCH_SIZE, MICRO_BATCHES, num_replicas=world, rank=rank, seed=3
        )
        self.loader = DataLoader(Tokens(), batch_sampler=self.batches, num_workers=num_workers)

    def run(self, steps: int) -> list[dict[str, torch.Tensor]]:
        """The parameters after each of so many steps."""
        found = []
        device = torch.get_default_device()
        while steps > 0:
            for step in itertools.islice(self.batches.steps(self.loader, self.model), steps):
                for tokens in step:
                    logits = self.model(tokens.to(device)).float()
                    functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().to(device)
                    ).backward()
                for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                    optimizer.step(divide_by=len(step))
                    optimizer.zero_grad()
                    schedule.step()
                steps -= 1
                found.append(values_of(self.model))
        return found

    def save(self, path) -> None:
        extra = {"batches": self.batches.state_dict()}
        extra |= {f"schedule{k}": s.state_dict() for k, s in enumerate(self.schedules)}
        for schedule in (extra["schedule0"], extra["schedule1"]):
            schedule.pop("lr_lambdas")
        zero_ext.checkpoint.save(path, self.model, self.optimizers, extra=extra)

    def load(self, path) -> "Training":
        extra = zero_ext.checkpoint.load(path, self.model, self.optimizers)
        self.batches.load_state_dict(extra["batches"])
        for k, schedule in enumerate(self.schedules):
            schedule.load_state_dict({**extra[f"schedule{k}"], "lr_lambdas": [None]})
        return self


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: zero_ext.full_tensor(p).cpu() for n, p in model.named_parameters()}


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), f"{name} after step {step}"


@functools.cache
def one_process() -> list[dict[str, torch.Tensor]]:
    """Its parameters after each of six steps, in whose middle an epoch ends."""
    return Training("alone", 1, 0, 1).run(6)


uneven = pytest.mark.skipif(GATHERS_TOGETHER, reason="every rank enters every gather")


@pytest.mark.dist
@uneven
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_number_of_ranks_trains_with_the_bits_of_one(mesh, rank, world, stage):
    assert_same(Training(mesh, stage, rank, world).run(6), one_process())


@pytest.mark.dist
@uneven
def test_the_number_of_ranks_may_change_in_mid_epoch(mesh, rank, world, shared_path):
    several = Training(mesh, 2, rank, world)
    found = several.run(1)
    several.save(shared_path / "several")
    one = Training("alone", 3, 0, 1).load(shared_path / "several")
    found += one.run(2)
    if rank == 0:
        one.save(shared_path / "one")
    dist.barrier()
    found += Training(mesh, 3, rank, world).load(shared_path / "one").run(3)
    assert_same(found, one_process())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_where_it_was_saved_although_workers_read_ahead(tmp_path, num_workers):
    first = Training("alone", 1, 0, 1, num_workers)
    found = first.run(2)
    assert first.batches.state_dict()["step"] == 2
    first.save(tmp_path / "saved")
    found += Training("alone", 1, 0, 1, num_workers).load(tmp_path / "saved").run(2)
    assert_same(found, one_process()[:4])


def samples_of(world: int, samples: int, epoch: int, first: int = 0, **settings):
    """Of each step, of each micro-batch, as ranks read them with plain DataLoaders."""
    steps: dict[int, dict[int, list[int]]] = {}
    for rank in range(world):
        batches = GlobalBatches(Indices(samples), 3, 5, num_replicas=world, rank=rank, **settings)
        batches.set_epoch(epoch)
        batches.load_state_dict({**batches.state_dict(), "step": first})
        loader = DataLoader(Indices(samples), batch_sampler=batches)
        assert len(loader) == len(list(loader))
        read = iter(loader)
        for step in range(first, batches.steps_per_epoch):
            for k in batches.numbers(step):
                assert k % world == rank
                steps.setdefault(step, {})[k] = next(read).tolist()
    return {step: [steps[step][k] for k in sorted(steps[step])] for step in sorted(steps)}


@pytest.mark.parametrize("samples", [1, 3, 46, 83])
def test_nothing_is_dropped_or_repeated_whatever_the_number_of_ranks(samples):
    expected = samples_of(1, samples, 4, seed=9)
    every = list(itertools.chain(*itertools.chain(*expected.values())))
    assert sorted(every) == list(range(samples))
    assert [len(step) for step in expected.values()][:-1] == [5] * (len(expected) - 1)
    for world in (2, 3, 7):
        assert samples_of(world, samples, 4, seed=9) == expected
        some = samples_of(world, samples, 4, first=len(expected) - 1, seed=9)
        assert some == {len(expected) - 1: expected[len(expected) - 1]}


def test_seed_and_epoch_shuffle():
    orders = [str(samples_of(1, 46, epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)]
    assert len(set(orders)) == 4
    plain = samples_of(2, 46, 1, shuffle=False)
    assert list(itertools.chain(*itertools.chain(*plain.values()))) == list(range(46))


def test_a_position_of_other_batches_is_an_error():
    saved = GlobalBatches(Indices(), 2, 12, seed=1).state_dict()
    for settings, text in (
        ((Indices(82), 2, 12), "samples=83.*samples=82"),
        ((Indices(), 3, 12), "batch_size=2.*batch_size=3"),
        ((Indices(), 2, 11), "micro_batches=12.*micro_batches=11"),
        ((Indices(), 2, 12, 5), "seed=1.*seed=5"),
    ):
        batches = GlobalBatches(*settings[:3], seed=(*settings, 1)[3])
        before = batches.state_dict()
        with pytest.raises(ValueError, match=text):
            batches.load_state_dict(saved)
        assert batches.state_dict() == before


def test_wrong_combinations_are_errors():
    training = Training("alone", 1, 0, 1)
    model, batches, loader = training.model, training.batches, training.loader
    with pytest.raises(ValueError, match="no divide_by"):
        for step in batches.steps(loader, model):
            for tokens in step:
                model(tokens.to(torch.get_default_device())).float().sum().backward()
            training.optimizers[0].step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="was left before micro-batch 1"):
        for step in batches.steps(loader, model):
            next(iter(step))
    with pytest.raises(ValueError, match="batch_sampler=batches"):
        batches.steps(DataLoader(Tokens()), model)
    with pytest.raises(ValueError, match="num_replicas=2"):
        others = GlobalBatches(Tokens(), 2, 12, num_replicas=2, rank=0)
        others.steps(DataLoader(Tokens(), batch_sampler=others), model)
    with pytest.raises(ValueError, match="is not sharded"):
        batches.steps(loader, Model())
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        GlobalBatches(Tokens(), 2, 12, num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="micro_batches must be at least 1, not 0"):
        GlobalBatches(Tokens(), 2, 0)


@pytest.mark.dist
@pytest.mark.world(min=2)
@uneven
def test_a_sum_of_one_rank_alone_is_an_error(mesh, rank, world):
    training = Training(mesh, 1, rank, world)
    with pytest.raises(RuntimeError, match=f"micro-batch {rank} of step 0 is summed on this rank"):
        for step in training.batches.steps(training.loader, training.model):
            for tokens in step:
                with training.model.no_sync():
                    loss = training.model(tokens.to(torch.get_default_device())).float().sum()
                    loss.backward()


def test_gradients_are_averaged_again_outside_of_a_step():
    training = Training("alone", 1, 0, 1)
    steps = training.batches.steps(training.loader, training.model)
    engines = {h.engine for h in [zero_ext.engine.registry.find(training.model.norm.weight)[0]]}
    next(steps)
    assert {engine.divide_factor for engine in engines} == {1}
    steps.close()
    training.model.set_gradient_divide_factor(4.0)
    steps = training.batches.steps(training.loader, training.model)
    next(steps)
    assert {engine.divide_factor for engine in engines} == {1}
    steps.close()
    assert {engine.divide_factor for engine in engines} == {4}


def test_seeded_depends_on_its_numbers_alone_and_restores_the_generators():
    device = torch.get_default_device()

    def draw(*numbers):
        with seeded(*numbers, device=device):
            return torch.rand(5).tolist(), torch.rand(5, device="cpu").tolist()

    torch.manual_seed(1)
    expected = torch.rand(3).tolist(), torch.rand(3, device="cpu").tolist()
    torch.manual_seed(1)
    drawn = [draw(*numbers) for numbers in itertools.product((0, 1), repeat=3)]
    assert (torch.rand(3).tolist(), torch.rand(3, device="cpu").tolist()) == expected
    for which in (0, 1):
        assert len({str(values[which]) for values in drawn}) == 8
    torch.manual_seed(2)
    assert draw(0, 0, 0) == drawn[0]
