"""iter_changed_params and apply_changes: a copy elsewhere that follows the model, bit by bit."""

import random
import runpy
import sys

import pytest
import torch
from edited_models import ACTIONS, BF16, OPTIMIZERS, POLICY, Edits, sharded, step
from harness import MLP, Odd, Tied, assert_bits, mean_square, rank_data
from setups import SMALL_BUCKET_MB, values_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import zero_ext
from zero_ext.state import receiving
from zero_ext.state.model_state import handles_of
from zero_ext.state.receiving import digest_of

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def on_device() -> bool:
    """There nothing is marked, and all of a changed parameter is sent."""
    return torch.get_default_device().type != "cpu"


class Copy:
    """Of a model, in another process: plain tensors that only changes reach."""

    def __init__(self, model):
        self.values = {n: torch.empty_like(p) for n, p in values_of(model).items()}
        self.token = None

    def follow(self, model, **arguments) -> dict:
        """Returns the changes, by name."""
        token = zero_ext.change_token(model)
        changes = {
            c.name: c for c in zero_ext.iter_changed_params(model, since=self.token, **arguments)
        }
        zero_ext.apply_changes(self.values, changes.values())
        self.token = token
        return changes

    def check(self, model, what: str = "") -> None:
        for name, value in values_of(model).items():
            assert_bits(self.values[name], value, f"{what} {name}")


@STAGES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_gets_what_has_changed_and_nothing_else(anywhere, rank, stage, optimizer):
    model, stepper = sharded(lambda: MLP(57, layers=3), stage, anywhere, optimizer)
    copied = Copy(model)
    assert all(each.indices is None for each in copied.follow(model).values())
    copied.check(model)
    some = 0
    for turn in range(4):
        before = values_of(model)
        step(model, stepper, rank)
        changes = copied.follow(model)
        copied.check(model, f"{turn}")
        for name, value in values_of(model).items():
            differing = (before[name].view(torch.int16) != value.view(torch.int16)).view(-1)
            expected = differing.nonzero().view(-1)
            if name not in changes:
                assert len(expected) == 0
            elif changes[name].indices is None:
                assert on_device() or 6 * len(expected) >= 2 * value.numel()
            else:
                assert changes[name].indices.tolist() == expected.tolist()
                some += 1
    assert (some > 0) != on_device()


@STAGES
def test_tokens_may_be_several_steps_apart_and_overlap(anywhere, rank, stage):
    model, optimizer = sharded(lambda: MLP(57), stage, anywhere)
    often, seldom = Copy(model), Copy(model)
    for turn in range(9):
        often.follow(model, bucket_mb=1e-6)
        if turn % 4 == 0:
            seldom.follow(model)
        step(model, optimizer, rank)
    for each in (often, seldom):
        each.follow(model)
        each.check(model)
    assert often.follow(model) == {} == seldom.follow(model)


@STAGES
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_between_the_tokens(anywhere, rank, stage, seed, path):
    generator = random.Random(f"{stage} {seed}")
    make = generator.choice([lambda: MLP(57, layers=3), lambda: Odd(BF16), lambda: Tied(13)])
    optimizer = generator.choice([*OPTIMIZERS])
    model, stepper = sharded(make, stage, anywhere, optimizer)
    edits = Edits(model, stepper, rank, generator, path)
    copies = [Copy(model), Copy(model)]
    for turn in range(12):
        action = generator.choice(ACTIONS)
        edits.run(action)
        if generator.random() < 0.4:
            each = generator.choice(copies)
            each.follow(model)
            each.check(model, f"{optimizer} {turn} {action}")
    for each in copies:
        each.follow(model)
        each.check(model, f"{optimizer} at the end")


class Adapted(MLP):
    """Frozen but for two small matrices, as with LoRA; and a parameter that is not sharded."""

    def __init__(self):
        super().__init__(57, layers=3)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.beside = nn.Parameter(torch.linspace(-1, 1, 1083))

    def forward(self, x):
        return super().forward(x + self.up(self.down(x)))


@STAGES
def test_of_frozen_parameters_only_written_ones_are_sent(anywhere, rank, stage):
    torch.manual_seed(3)
    model = Adapted()
    zero_ext.shard(
        model,
        stage,
        mesh=anywhere,
        mp_policy=POLICY,
        bucket_mb=SMALL_BUCKET_MB,
        ignored_params=[model.beside],
    )
    trained = [model.down.weight, model.up.weight]
    optimizer = zero_ext.optim.AdamW(trained, lr=1e-3)
    copied = Copy(model)
    copied.follow(model)
    step(model, optimizer, rank)
    assert copied.follow(model).keys() == {"down.weight", "up.weight"}
    with zero_ext.summon_full_params(model), torch.no_grad():
        model.layers[1].weight[3, 5] = 7
        model.beside[2] = 5
    step(model, optimizer, rank)
    names = {"down.weight", "up.weight", "layers.1.weight", "beside"}
    assert copied.follow(model).keys() == names
    copied.check(model)
    # Unfrozen parameters move to another unit, which has no marks since the token.
    optimizer.add_param_group({"params": [model.layers[1].weight.requires_grad_()]})
    for _ in range(3):
        step(model, optimizer, rank)
        copied.follow(model)
        copied.check(model)


@STAGES
def test_a_model_in_fp32_is_sent_whole_or_not_at_all(anywhere, rank, stage):
    torch.manual_seed(3)
    model = zero_ext.shard(MLP(13), stage, mesh=anywhere, bucket_mb=SMALL_BUCKET_MB)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    copied = Copy(model)
    copied.follow(model)
    assert copied.follow(model) == {}
    mean_square(model, rank_data((4, 5), rank)).backward()
    optimizer.step()
    changes = copied.follow(model)
    assert len(changes) == 6 and all(each.indices is None for each in changes.values())
    copied.check(model)
    assert handles_of(model)[0].engine.change_bytes == 0


@STAGES
def test_masters_may_be_offloaded(anywhere, rank, stage):
    torch.manual_seed(3)
    model = MLP(57, layers=3)
    policies = {"mp_policy": POLICY, "offload_policy": CPUOffloadPolicy()}
    zero_ext.shard(model, stage, mesh=anywhere, bucket_mb=SMALL_BUCKET_MB, **policies)
    optimizer = OPTIMIZERS["AdamW"](model)
    copied = Copy(model)
    for _ in range(3):
        copied.follow(model)
        copied.check(model)
        step(model, optimizer, rank)
    copied.follow(model)
    assert copied.follow(model) == {}
    copied.check(model)


@STAGES
def test_averages_are_sent_as_what_was_written(anywhere, rank, stage):
    model, optimizer = sharded(lambda: MLP(57), stage, anywhere)
    average = zero_ext.EMA(model, decay=0.5)
    copied, of_average = Copy(model), Copy(model)
    for _ in range(3):
        step(model, optimizer, rank)
        average.update()
        copied.follow(model)
        with average.swap():
            of_average.follow(model)
            of_average.check(model)
        copied.check(model)


@pytest.mark.parametrize("own_messages", ["1", "0"], ids=["host", "hosts"])
@STAGES
def test_ranks_may_leave_early(anywhere, rank, stage, own_messages, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", own_messages)
    model, optimizer = sharded(lambda: MLP(57, layers=3), stage, anywhere)
    token = zero_ext.change_token(model)
    step(model, optimizer, rank)

    def changes(**arguments):
        return zero_ext.iter_changed_params(model, since=token, bucket_mb=1e-6, **arguments)

    everything = {change.name: change for change in changes()}
    kinds = {each.indices is None for each in everything.values()}
    assert kinds == ({True} if on_device() else {True, False})
    assert len([*changes(rank0_only=True)]) == (0 if rank else len(everything))
    for k, change in enumerate(changes()):  # each rank elsewhere
        assert torch.equal(change.values, everything[change.name].values)
        if k == 2 * rank:
            break
    if rank == 0:
        with pytest.raises(KeyError):
            for _ in changes():
                raise KeyError
    else:
        assert len([*changes()]) == len(everything)
    never_begun = changes()
    del never_begun
    with torch.inference_mode():
        assert [change.name for change in changes()] == [*everything]


@pytest.mark.host
@STAGES
def test_marks_take_a_bit_for_each_element_and_token(anywhere, rank, world, stage):
    model, optimizer = sharded(lambda: MLP(57, layers=3), stage, anywhere)
    engine = handles_of(model)[0].engine
    assert engine.change_bytes == 0
    first = zero_ext.change_token(model)
    bytes_of_one = engine.change_bytes
    ranges = 1 if stage == 0 or anywhere is None else world
    numel = sum(p.numel() for p in model.parameters())
    # Groups of 512 elements for each unit, and padding.
    assert numel / ranges <= 8 * bytes_of_one <= numel / ranges + 6 * (512 + 512)
    tokens = [zero_ext.change_token(model) for _ in range(3)]
    assert engine.change_bytes == 4 * bytes_of_one
    del first, tokens[0]
    optimizer.step()
    assert engine.change_bytes == 2 * bytes_of_one
    tokens.clear()
    optimizer.step()
    assert engine.change_bytes == 0


@pytest.mark.host
def test_a_stale_copy_is_noticed(anywhere, rank):
    model, optimizer = sharded(lambda: MLP(57, layers=3), 2, anywhere)
    copied = Copy(model)
    copied.follow(model)
    for _ in range(3):  # the second of these is lost
        lost = {n: v.clone() for n, v in copied.values.items()}
        step(model, optimizer, rank)
        copied.follow(model)
    step(model, optimizer, rank)
    copied.values = lost
    link = rf"lacks changes of the time before token {copied.token.number},.*since=None"
    with pytest.raises(RuntimeError, match=link):
        copied.follow(model)
    zero_ext.apply_changes(copied.values, zero_ext.iter_changed_params(model, since=None))
    copied.check(model)


@pytest.mark.host
def test_mistakes_are_named_and_nothing_is_written(anywhere, rank):
    model, optimizer = sharded(lambda: MLP(57), 1, anywhere)
    other, _ = sharded(lambda: MLP(57), 1, anywhere)
    token = zero_ext.change_token(model)
    for since in (3, "token"):
        with pytest.raises(TypeError, match="since must be a change_token"):
            zero_ext.iter_changed_params(model, since=since)
    with pytest.raises(ValueError, match="token of another module"):
        zero_ext.iter_changed_params(other, since=token)
    with pytest.raises(ValueError, match="bucket_mb"):
        zero_ext.iter_changed_params(model, since=token, bucket_mb=0)
    with pytest.raises(TypeError, match="change_token"):
        zero_ext.change_token([])
    step(model, optimizer, rank)
    [change, *_] = [
        c for c in zero_ext.iter_changed_params(model, since=token) if c.indices is not None
    ]
    whole = torch.zeros(model.get_parameter(change.name).shape, dtype=BF16)
    targets = {
        "no parameter": {},
        "torch.float32 here": {change.name: whole.float()},
        "do not lie in rows": {change.name: whole.t().contiguous().t()},
        "elements here": {change.name: whole.view(-1)[: int(change.indices[-1])].clone()},
    }
    for message, target in targets.items():
        with pytest.raises((KeyError, ValueError), match=message):
            zero_ext.apply_changes(target, [change])
        assert all(not t.any() for t in target.values())
    with pytest.raises(ValueError, match="shape"):
        zero_ext.apply_changes({change.name: whole}, [change._replace(indices=None)])


@pytest.mark.host
def test_a_second_iterator_ends_the_first_one(anywhere, rank):
    model, optimizer = sharded(lambda: MLP(57, layers=3), 2, anywhere)
    token = zero_ext.change_token(model)
    step(model, optimizer, rank)
    first = zero_ext.iter_changed_params(model, since=token, bucket_mb=1e-6)
    next(first)
    second = [*zero_ext.iter_changed_params(model, since=token)]
    with pytest.raises(RuntimeError, match=r"another iter_changed_params.* has begun. Finish"):
        next(first)
    assert [c.name for c in zero_ext.iter_changed_params(model, since=token)] == [
        c.name for c in second
    ]


@pytest.mark.dist
def test_ranks_with_other_tokens_get_an_error(mesh, rank):
    model, _ = sharded(lambda: MLP(57), 2, mesh)
    tokens = [zero_ext.change_token(model), zero_ext.change_token(model)]
    since = tokens[1 if rank == 0 else 0]
    with pytest.raises(RuntimeError, match="has another token than on rank"):
        [*zero_ext.iter_changed_params(model, since=since)]
    assert [*zero_ext.iter_changed_params(model, since=tokens[1])] == []


@pytest.mark.parametrize("numel", [1, 3, 4, 7, 13, 1083, 4096, 4099, 5 * 4096 + 9])
@pytest.mark.parametrize("torch_alone", [False, True])
def test_a_digest_is_the_sum_that_its_formula_says(numel, torch_alone, monkeypatch):
    if torch_alone:
        monkeypatch.setattr(receiving, "part_digest", None)
    torch.manual_seed(numel)
    values = torch.randn(numel).bfloat16()
    data = bytes(values.view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)

    def weight(k):
        z = (k + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    words = [w + (w >> 32) for w in words]
    expected = sum(w * weight(j % 1024) * weight(2**32 + j // 1024) for j, w in enumerate(words))
    assert digest_of(values) == expected % 2**64
    assert digest_of(torch.cat([values[:1], values])[1:]) == expected % 2**64
    assert digest_of(torch.stack([values, -values], dim=1)[:, 0]) == expected % 2**64


def test_a_copy_of_the_receiver_needs_torch_alone(monkeypatch):
    """Also where zero_ext is installed."""
    monkeypatch.setitem(sys.modules, "zero_ext._C", None)
    assert runpy.run_path(receiving.__file__, run_name="receiving")["part_digest"] is None


@pytest.mark.parametrize("torch_alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_digest_has_all_signs(dtype, torch_alone, monkeypatch):
    """Two of them change in the upper halves of words, or all of them do there."""
    if torch_alone:
        monkeypatch.setattr(receiving, "part_digest", None)
    values = torch.arange(1, 4097).to(dtype)
    per_word = 8 // values.itemsize
    for count in (2, 4, 1024):
        changed = values.clone()
        changed[per_word - 1 :: per_word][:count].neg_()
        assert digest_of(changed) != digest_of(values)


class Large(nn.Module):
    """Parameters that several threads update, each beginning in the middle of other marks."""

    def __init__(self):
        super().__init__()
        shapes = [(7,), (301, 517), (13,), (1083, 61), (1,), (511,)]
        self.each = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        return sum((p * p).sum(dtype=torch.float32) for p in self.each) * x


@pytest.mark.host
@pytest.mark.parametrize("optimizer", ["AdamW", "int8", "bf16", "SGD"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_marks_are_the_same_for_any_threads_and_instructions(
    instruction_set, threads, dtype, optimizer
):
    torch.manual_seed(5)
    model = Large().to(dtype)
    zero_ext.shard(model, 1)
    stepper = OPTIMIZERS[optimizer](model)
    # So that the third step changes some elements, and not most.
    stepper.param_groups[0]["lr"] = (
        1e-5 if optimizer != "SGD" else 2e-4 if dtype == BF16 else 2.5e-5
    )
    threads(3)
    for _ in range(3):
        before = values_of(model)
        token = zero_ext.change_token(model)
        model(torch.ones(())).backward()
        stepper.step()
        stepper.zero_grad()
        found = {c.name: c for c in zero_ext.iter_changed_params(model, since=token)}
        for name, value in values_of(model).items():
            differing = before[name].view(torch.int16) != value.view(torch.int16)
            expected = differing.view(-1).nonzero().view(-1)
            if name not in found:
                assert len(expected) == 0
            elif found[name].indices is None:
                assert 6 * len(expected) >= 2 * value.numel()
            else:
                assert torch.equal(found[name].indices.long(), expected), name
                assert torch.equal(found[name].values, value.view(-1)[expected])
    assert any(change.indices is not None for change in found.values())
