"""Ranks that run different numbers of backwards in one step."""

import contextlib
import itertools
import random
import warnings

import pytest
import torch
from harness import OWN_BACKEND, assert_bits, gather_objects, rank_data
from reference import OneProcess as ReferenceProcess
from reference import gradients_of, shown_master, whole
from setups import everything, one_process, values_of
from torch import nn
from torch.nn import functional
from uneven_steps import DIVIDE_BY, WIDTH, OneProcess, PlannedError, Step, Towers, fail, loss_of

import zero_ext
from zero_ext.engine.registry import find

pytestmark = [
    pytest.mark.dist,
    pytest.mark.world(min=2),
    pytest.mark.skipif(OWN_BACKEND, reason="every rank enters every collective"),
]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(autouse=True)
def one_host(monkeypatch):
    """Unless a test says otherwise."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "1")


def run_programs(
    seeds, mesh, rank: int, world: int, stage: int, branches: bool = True, throws: bool = True
):
    options = {"lr": 0.25, "momentum": 0.5, "nonfinite": "skip"}
    model = zero_ext.shard(Towers(), stage, mesh=mesh, bucket_mb=200 / 2**20)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), **options)
    one = OneProcess(**options)
    for seed in seeds:
        step = Step(seed, world, branches, throws)
        step.of_rank(rank, model, optimizer)
        step.of_all(one)
        norms = []
        # torch's waits for no rank in stage 0, and serves none where a device waits.
        with_torch = seed % 2 and not find(model.stem.weight)[0].replicated
        for trained, each in ((model, optimizer), (one.model, one.optimizer)):
            if step.clips and with_torch and mesh.device_type == "cpu":
                norms.append(nn.utils.clip_grad_norm_(trained.parameters(), 0.05))
            elif step.clips:
                norms.append(each.clip_grad_norm_(0.05))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # skipped steps
                each.step()
        where = f"seed {seed}, stage {stage}, counts {step.counts}"
        if norms:
            assert_bits(norms[0], norms[1], where)
        assert_bits(gradients_of(model), gradients_of(one.model), where)
        assert_bits(values_of(model), values_of(one.model), where)
        optimizer.zero_grad()
        one.optimizer.zero_grad()
    assert optimizer.skipped_steps == one.optimizer.skipped_steps
    assert_bits(everything(model, optimizer), everything(one.model, one.optimizer))


@STAGES
def test_random_programs(mesh, rank, world, stage):
    run_programs(range(12), mesh, rank, world, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_random_programs_on_replicas(replicas_of, rank, world, stage):
    """Replicas of two ranks where they can be; else of one rank each."""
    shards = 2 if world % 4 == 0 else 1
    run_programs(range(30, 36), replicas_of(shards), rank, world, stage)


@pytest.mark.slow
@STAGES
def test_many_random_programs(mesh, rank, world, stage):
    run_programs(range(100 + 75 * stage, 175 + 75 * stage), mesh, rank, world, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_random_programs_between_hosts(mesh, rank, world, stage, monkeypatch):
    """All messages go by the process group. Nothing throws: others would wait until the timeout."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    run_programs(range(20, 28), mesh, rank, world, stage, branches=False, throws=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_many_random_programs_between_hosts(mesh, rank, world, stage, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    run_programs(range(400, 440), mesh, rank, world, stage, branches=False, throws=False)


@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
@pytest.mark.parametrize("stage", [1, 2])
def test_collective_reductions(mesh, rank, world, stage, own_messages, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model = zero_ext.shard(Towers(), stage, mesh=mesh, reduction="collective")
    expected = Towers()
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(expected.parameters(), lr=0.5)
    for step in range(3):
        for k in range((rank + step) % world * 2):
            loss_of(model, (rank_data((2, WIDTH), rank, step, k), (0, 1, 2), 1.0)).backward()
        for r in range(world):
            for k in range((r + step) % world * 2):
                batch = (rank_data((2, WIDTH), r, step, k), (0, 1, 2), 1 / world)
                loss_of(expected, batch).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for name, value in values_of(model).items():
        expected_value = expected.get_parameter(name)
        torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-6, msg=name)


def token_loss(model, tokens) -> torch.Tensor:
    """A sum over tokens, not an average."""
    return functional.mse_loss(model(tokens), torch.ones(len(tokens), 3), reduction="sum")


@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@STAGES
def test_divide_by_tokens(mesh, rank, world, stage, clips):
    """Ranks have 0 to 3 micro-batches of 1 to 5 tokens; each token of all ranks counts the same."""
    options = {"lr": 0.1, "momentum": 0.9}
    model = zero_ext.shard(Towers(), stage, mesh=mesh)
    clipping = {"max_grad_norm": 0.05} if clips else {}
    optimizer = zero_ext.optim.SGD(model.parameters(), **options, **clipping)
    expected = Towers()
    reference = torch.optim.SGD(expected.parameters(), **options)
    draw = random.Random(stage)
    for step in range(4):
        budgets = [[draw.randint(1, 5) for _ in range(draw.randint(0, 3))] for _ in range(world)]
        budgets[step % world] = [3]
        micro_batches = [
            [rank_data((tokens, WIDTH), r, step, k) for k, tokens in enumerate(counts)]
            for r, counts in enumerate(budgets)
        ]
        for tokens in micro_batches[rank]:
            token_loss(model, tokens).backward()
        optimizer.step(divide_by=sum(budgets[rank]))
        together = torch.cat([tokens for each in micro_batches for tokens in each])
        (token_loss(expected, together) / len(together)).backward()
        if clips:
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        reference.step()
        for each in (optimizer, reference):
            each.zero_grad()
    for name, value in values_of(model).items():  # rounded as often as gradients are added
        expected_value = expected.get_parameter(name)
        torch.testing.assert_close(value, expected_value, rtol=1e-5, atol=1e-6, msg=name)


class Integers(nn.Module):
    """Gradients are whole numbers at first, and multiples of powers of two later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(WIDTH, 13)
        self.head = nn.Linear(13, 3)
        for p in self.parameters():
            p.data = torch.randint(-2, 3, p.shape).float()

    def forward(self, tokens):
        return self.head(self.stem(tokens).relu())


@pytest.mark.parametrize("seed", range(3))
@STAGES
def test_tokens_count_the_same_however_they_are_split(mesh, rank, world, stage, seed):
    """Over ranks and micro-batches. All sums are exact, so the bits are those of one batch."""
    model = zero_ext.shard(Integers(), stage, mesh=mesh, bucket_mb=200 / 2**20)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=2**-4)
    expected = Integers()
    reference = torch.optim.SGD(expected.parameters(), lr=2**-4)
    draw = random.Random(seed)

    def loss(model, tokens):
        weights = torch.arange(-1, 2, device=tokens.device) * tokens[:, :3]
        return (model(tokens) * weights).sum()

    for step in range(2):
        tokens = torch.tensor([[draw.randint(-2, 2) for _ in range(WIDTH)] for _ in range(16)])
        places = [(draw.randrange(world), draw.randrange(3)) for _ in tokens]  # (rank, micro-batch)
        for k in range(3):
            mine = tokens[[place == (rank, k) for place in places]].float()
            if len(mine):
                loss(model, mine.to(model.stem.weight.device)).backward()
        optimizer.step(divide_by=sum(r == rank for r, _ in places))
        optimizer.zero_grad()
        (loss(expected, tokens.float()) / len(tokens)).backward()
        reference.step()
        reference.zero_grad()
        assert_bits(values_of(model), values_of(expected), f"step {step}, {places}")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_without_data_clips_with_a_loss_scaler(mesh, rank, world, stage):
    """The scale is a power of two, so it changes no bits."""
    model = zero_ext.shard(Towers(), stage, mesh=mesh)
    model.set_gradient_divide_factor(DIVIDE_BY)
    scaler = zero_ext.LossScaler("dynamic", init_scale=2.0**10)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, loss_scaler=scaler)
    one = OneProcess(lr=0.5)
    for step in range(2):
        for r in range(1, world):
            for k in range(r):
                batch = (rank_data((2, WIDTH), r, step, k), (0, 1, 2), 1.0)
                if r == rank:
                    scaler.scale(loss_of(model, batch)).backward()
        for k in range(world):
            for r in range(max(k + 1, 1), world):
                one.backward((rank_data((2, WIDTH), r, step, k), (0, 1, 2), 1.0))
        norms = [each.clip_grad_norm_(0.05) for each in (optimizer, one.optimizer)]
        assert_bits(norms[0], norms[1])
        for each in (optimizer, one.optimizer):
            each.step()
            each.zero_grad()
    assert_bits(values_of(model), values_of(one.model))


def clip_with_torch(model, optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model, optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def halve(model, optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def unscale(model, optimizer) -> None:
    scaler = torch.amp.GradScaler(model.stem.weight.device.type, init_scale=2.0)
    scaler.scale(torch.ones((), device=model.stem.weight.device))
    scaler.unscale_(optimizer)


CHANGED_EARLY = (
    r"\(\) on gradients that rank \d changed, .* before later backwards of other ranks",
    r"a step was skipped: .* Or a rank changed p.grad, .* before later backwards of other ranks",
)


@pytest.mark.parametrize(
    ("stage", "fewest", "change"),
    [
        (0, 0, clip_with_torch),
        (0, 1, clip_with_torch),
        (0, 1, clip_values),
        (0, 1, unscale),
        (0, 1, halve),
        (2, 1, halve),
    ],
)
@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
def test_gradients_changed_before_backwards_of_other_ranks_raise(
    mesh, rank, world, stage, fewest, change, own_messages, monkeypatch
):
    """On every rank: the update would differ between ranks, or be of half a gradient."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model = zero_ext.shard(Towers(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)

    def backwards(step: int) -> None:
        for k in range(2 if rank == world - 1 else fewest):
            loss_of(model, (rank_data((2, WIDTH), rank, step, k), (0, 1, 2), 1.0)).backward()

    before = values_of(model)
    for clips in (False, True):
        backwards(0)
        change(model, optimizer)
        with pytest.raises(RuntimeError, match=CHANGED_EARLY[mesh.device_type != "cpu"]):
            if clips:
                optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.stats()  # a device tells it late
        assert_bits(values_of(model), before)
        optimizer.zero_grad()
    backwards(1)
    norm = optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    optimizer.zero_grad()
    assert len({float(n) for n in gather_objects(norm)}) == 1
    values = gather_objects({name: v.cpu() for name, v in values_of(model).items()})
    for other in values[1:]:
        assert_bits(other, values[0])


@pytest.mark.host  # a device sends messages in every step
def test_a_step_without_messages_raises_on_the_rank_that_clipped_nothing(mesh, rank, world):
    model = zero_ext.shard(Towers(), 0, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, nonfinite="step")
    if rank == world - 1:
        loss_of(model, (rank_data((2, WIDTH), rank), (0, 1, 2), 1.0)).backward()
    clip_with_torch(model, optimizer)
    if rank == world - 1:
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=rf"gradients that rank {rank} changed, as torch's"):
            optimizer.step()


@pytest.mark.host  # a device sends messages in every step
@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
@pytest.mark.parametrize("where", ["before its first gradient", "after its last", "zeroed"])
def test_steps_without_messages_that_lack_a_backward_are_known_in_the_next(
    mesh, rank, world, where, own_messages, monkeypatch
):
    """One rank lacks a backward of the step, and all ranks update; then every rank raises."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model = zero_ext.shard(Towers(), 0, mesh=mesh, bucket_mb=200 / 2**20)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5, nonfinite="step")
    lacking = rank == world - 1

    def backward(step: int, k: int, fails: str = "") -> None:
        x = rank_data((2, WIDTH), rank, step, k).requires_grad_()
        loss = loss_of(model, (x * 1, (0, 1, 2), 1.0))
        failing = {"before its first gradient": loss, "after its last": x}.get(fails)
        if failing is not None:
            failing.register_hook(fail)
        with pytest.raises(PlannedError) if failing is not None else contextlib.nullcontext():
            loss.backward()

    def step_of(step: int, fails: str = "") -> None:
        backward(step, 0, fails if lacking else "")
        if fails == "zeroed" and lacking:
            optimizer.zero_grad()
        backward(step, 1)
        optimizer.step()
        optimizer.zero_grad()

    step_of(0)
    told = rf"\[rank {rank}, unit .*\]: rank \d has made steps with other backwards than this rank"
    with pytest.raises(RuntimeError, match=told):
        step_of(1, where)
        step_of(2)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_may_be_changed_where_counts_are_equal(mesh, rank, world, stage):
    """And before the zero_grad() that discards them, on a rank without data in the next step."""
    model = zero_ext.shard(Towers(), stage, mesh=mesh)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    one = OneProcess(lr=0.5)
    for k in range(4):
        counts = [1] * world if k < 3 else [2 * (r == world - 1) for r in range(world)]
        for r, count in enumerate(counts):
            for j in range(count):
                batch = (rank_data((2, WIDTH), r, k, j), (0, 1, 2), 1.0)
                if r == rank:
                    loss_of(model, batch).backward()
                one.backward(batch)
        for m, each in ((model, optimizer), (one.model, one.optimizer)):
            if k < 3:
                clip_with_torch(m, each)
            if k != 1:  # a step that is given up
                each.step()
            if k < 2:
                each.zero_grad()
            for p in m.parameters():
                if k == 2:
                    p.grad.zero_()
    assert_bits(values_of(model), values_of(one.model))


@pytest.mark.host
def test_divide_by_is_checked(mesh, rank, world):
    model = zero_ext.shard(Towers(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    before = values_of(model)
    token_loss(model, rank_data((2, WIDTH), rank)).backward()
    for wrong, error in (("3", TypeError), (-1, ValueError), (float("inf"), ValueError)):
        with pytest.raises(error, match="divide_by"):
            optimizer.step(divide_by=wrong)
    with pytest.raises(RuntimeError, match="divide_by is 0 on all ranks together"):
        optimizer.step(divide_by=0)
    with pytest.raises(ValueError, match="step\\(\\) has divide_by=True"):
        optimizer.step(**({"divide_by": 3} if rank == 0 else {}))
    assert_bits(values_of(model), before)
    optimizer.step(divide_by=2)
    assert model.stats()["steps"] == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_local_sums_are_reduced_by_the_last_backward_of_any_rank(mesh, rank, world, stage):
    """Rank r runs r micro-batches inside ``no_sync()``; only the last rank runs one outside."""
    model = zero_ext.shard(Towers(), stage, mesh=mesh)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    one = Towers()
    reference = torch.optim.SGD(one.parameters(), lr=0.5)
    for step in range(2):
        with model.no_sync():
            for k in range(rank):
                loss_of(model, (rank_data((2, WIDTH), rank, step, k), (0, 1, 2), 1.0)).backward()
        if rank == world - 1:
            loss_of(model, (rank_data((2, WIDTH), rank, step, 99), (0, 2), 1.0)).backward()
        for r in range(world):
            for k in range(r):
                batch = (rank_data((2, WIDTH), r, step, k), (0, 1, 2), 1 / DIVIDE_BY)
                loss_of(one, batch).backward()
        last = rank_data((2, WIDTH), world - 1, step, 99)
        loss_of(one, (last, (0, 2), 1 / DIVIDE_BY)).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, one.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)


def local_gradients(model, batches) -> dict[str, torch.Tensor | None]:
    """Of one rank: bf16 gradients, added up in fp32 in the order of its backwards."""
    sums: dict[str, torch.Tensor | None] = dict.fromkeys(dict(model.named_parameters()))
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = p.grad.float() + (0.0 if sums[name] is None else sums[name])
    return sums


def contributions(model, batches, local: bool) -> list[dict[str, torch.Tensor | None]]:
    """Of one rank to each reduction of a step; its backwards are local but for the last one."""
    if local:
        return [local_gradients(model, batches)] if batches else []
    return [local_gradients(model, [batch]) for batch in batches]


@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
@pytest.mark.parametrize("entering", ["all", "some"])
@pytest.mark.parametrize("stage", [0, 1])
def test_local_sums_of_bf16_gradients_have_the_bits_of_one_process(
    mesh, rank, world, stage, entering, own_messages, monkeypatch
):
    """Ranks run 0 to 4 micro-batches before the last one, inside ``no_sync()`` where they enter it.

    Those that do send fp32 sums, the others bf16 gradients. On one host some ranks run no last one.
    """
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model = zero_ext.shard(Towers().bfloat16(), stage, mesh=mesh, bucket_mb=200 / 2**20)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    one = ReferenceProcess(Towers().bfloat16(), lambda p: torch.optim.SGD(p, lr=0.5))
    on_one_host = own_messages == "1" and model.stem.weight.device.type == "cpu"
    draw = random.Random(stage)
    for step in range(6):
        counts = [draw.choice((0, 1, 2, 4)) for _ in range(world)]
        last = {draw.randrange(world), draw.randrange(world)} if on_one_host else set(range(world))
        enters = [entering == "all" or (r + step) % 2 == 0 or step == 5 for r in range(world)]
        batches = [
            [
                (rank_data((2, WIDTH), r, step, k).bfloat16(), draw.sample(range(3), k=2), 1.0)
                for k in range(counts[r] + (r in last))
            ]
            for r in range(world)
        ]
        with model.no_sync() if enters[rank] else contextlib.nullcontext():
            for batch in batches[rank][: counts[rank]]:
                loss_of(model, batch).backward()
        for batch in batches[rank][counts[rank] :]:
            loss_of(model, batch).backward()
        reduced = [contributions(one.model, each, enters[r]) for r, each in enumerate(batches)]
        gradients: dict[str, torch.Tensor | None] = {}
        for k, r in itertools.product(range(max(map(len, reduced))), range(world)):
            for name, own in (reduced[r][k] if k < len(reduced[r]) else {}).items():
                if own is not None:
                    gradients[name] = own / DIVIDE_BY + gradients.get(name, 0.0)
        optimizer.step()
        optimizer.zero_grad()
        one.step(gradients)
        assert_bits(values_of(model), values_of(one.model), f"step {step}, counts {counts}")
    masters = {name: whole(shown_master(p)) for name, p in model.named_parameters()}
    assert_bits(masters, one.masters)


@pytest.mark.host
def test_local_sums_that_no_rank_reduces_raise_on_every_rank(mesh, rank, world):
    model = zero_ext.shard(Towers(), 1, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    batch = (rank_data((2, WIDTH), rank), (0, 1, 2), 1.0)
    with model.no_sync():
        if rank == 0:
            loss_of(model, batch).backward()
    own = r"1 backward\(s\) inside no_sync\(\) were never reduced"
    others = "after backwards of rank 0 that were not reduced"
    with pytest.raises(RuntimeError, match=own if rank == 0 else others):
        optimizer.step()
    if rank == world - 1:
        loss_of(model, batch).backward()
    optimizer.step()
    assert model.stats()["steps"] == 1


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_steps_that_one_rank_completes(mesh, rank, world, stage):
    model = zero_ext.shard(Towers(), stage, mesh=mesh, accumulation_steps=3)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    counts = [3 if r == world - 1 else r for r in range(world)]
    for step in range(2):
        for k in range(counts[rank]):
            loss_of(model, (rank_data((2, WIDTH), rank, step, k), (0, 1, 2), 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats()["steps"] == 2
    for k in range(min(counts[rank], 2)):
        loss_of(model, (rank_data((2, WIDTH), rank, 9, k), (0, 1, 2), 1.0)).backward()
    with pytest.raises(RuntimeError, match="accumulation_steps=3"):
        optimizer.step()


@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulation_steps", [None, 3])
def test_torchs_clipping_serves(mesh, rank, world, stage, accumulation_steps):
    """With frozen parameters in the optimizer, and micro-batches that another rank completes."""
    model, plain = Towers(), Towers().double()
    for each in (model, plain):
        each.stem.requires_grad_(False)
    zero_ext.shard(model, stage, mesh=mesh, accumulation_steps=accumulation_steps)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    for r in range(world):
        for k in range(3 if r == world - 1 else r % 3):
            batch = rank_data((2, WIDTH), r, k)
            if r == rank:
                loss_of(model, (batch, (0, 1, 2), 1.0)).backward()
            (loss_of(plain, (batch.double(), (0, 1, 2), 1.0)) / world).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    optimizer.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    for name, parameter in plain.named_parameters():
        found = zero_ext.full_tensor(model.get_parameter(name)).double()
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_stats_have_the_time_served_and_for_whom(mesh, rank, world):
    model = zero_ext.shard(Towers(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    for k in range(3 if rank == world - 1 else 0):
        loss_of(model, (rank_data((2, WIDTH), rank, 0, k), (0, 1, 2), 1.0)).backward()
    optimizer.step()
    stats = model.stats()
    assert stats["backwards"] == 3
    if rank < world - 1:
        assert stats["served_backwards"] == 3
        assert stats[f"served_us_rank_{world - 1}"] > 0
    else:
        assert stats["served_backwards"] == 0
    for _ in range(2):  # equal counts
        loss_of(model, (rank_data((2, WIDTH), rank), (0, 1, 2), 1.0)).backward()
        optimizer.step()
    assert model.stats()["reductions"] == 5 * stats["units"]


def test_a_rank_that_never_comes_is_named(mesh, rank, world, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "0.3")
    model = zero_ext.shard(Towers(), 2, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"step\(\) waited .*timed out.*it is in") as raised:
            optimizer.step()
        assert all(f"ank {r}" in str(raised.value) for r in range(1, world))
    gather_objects(rank)
    loss_of(model, (rank_data((2, WIDTH), rank), (0, 1, 2), 1.0)).backward()
    optimizer.step()
    assert model.stats()["steps"] == 1


@STAGES
def test_an_epoch_whose_last_batches_are_missing_on_some_ranks(mesh, rank, world, stage):
    """And a tower that is frozen, or that only some ranks enter."""
    model = Towers()
    model.towers[1].requires_grad_(False)
    model = zero_ext.shard(model, stage, mesh=mesh, bucket_mb=200 / 2**20)
    model.set_gradient_divide_factor(DIVIDE_BY)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    one = Towers()
    one.towers[1].requires_grad_(False)
    with one_process():
        reference = zero_ext.optim.SGD(one.parameters(), lr=0.5, stage=1, process_group=None)
    find(one.stem.weight)[0].engine.set_divide_factor(DIVIDE_BY)
    for step in range(3):
        batches = {
            r: (rank_data((2, WIDTH), r, step), (0, 1) if (r + step) % 2 else (2,), 1.0)
            for r in range(world)
            if step + r < world + 1
        }
        if rank in batches:
            loss_of(model, batches[rank]).backward()
        for r in sorted(batches):
            loss_of(one, batches[r]).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_bits(values_of(model), values_of(one))
