"""What accesses to released parameters raise: one remedy, chosen by what was called."""

import copy
import io
import pickle
import re

import pytest
import torch
from harness import mean_square, rank_data
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]


class Net(nn.Module):
    """Two units. ``encode`` is no forward, ``borrow`` reads the other unit's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.last = nn.Linear(13, 7)
        self.borrow = False

    def encode(self, x):
        return self.first(x)

    def tied(self, x):
        return functional.linear(x, self.first.weight)

    def forward(self, x):
        if self.borrow:
            return functional.linear(self.first(x), self.last.weight)
        return self.last(self.first(x))


@pytest.fixture
def model(mesh):
    return zero_ext.shard(Net(), 3, mesh=mesh, units=nn.Linear, bucket_mb=1e-6)


class EMAModel:
    """As diffusers has it."""

    def __init__(self, parameters):
        self.shadow_params = [p.clone().detach() for p in parameters]


class Momentum(nn.Module):
    """As MoCo has it: a copy of an encoder that follows it."""

    @torch.no_grad()
    def update_key_encoder_by_momentum(self, keys, queries):
        for k, q in zip(keys.parameters(), queries.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1


@torch.no_grad()
def blend(name, target, source):
    """An average in a function whose name says nothing."""
    {"lerp_": lambda: target.lerp_(source, 0.1), "copy_": lambda: target.copy_(source)}[name]()


def saving(model):
    return torch.save(list(model.parameters()), io.BytesIO())


def borrowing(model):
    model.borrow = True
    try:
        model(torch.ones(2, 7))
    finally:
        model.borrow = False


def weight(model):
    return model.first.weight


EMA = r"zero_ext\.EMA\(module, decay\)"
DEEPCOPY = r"inside `with module\.summon_full_params\(\):`"
READ = r"unit 'first.weight … first.bias'\]: .*zero_ext\.full_tensor\(parameter\)"
SAVE = r"zero_ext\.checkpoint\.save\("
MISTAKES = {
    "print": (repr, READ, weight),
    "norm": (torch.linalg.vector_norm, READ, weight),
    "tolist": (lambda p: p.detach().tolist(), READ, weight),
    "numpy": (lambda p: p.detach().numpy(), READ, weight),
    "cpu": (lambda p: p.to("cpu", torch.float64), READ, weight),
    "mean": (lambda p: p.detach().mean(), r"zero_ext\.full_tensor\(parameter\)", weight),
    "loss": (lambda p: 0.0 * p.sum(), r"Leave out a `0.0", weight),
    "penalty": (lambda p: (p * p).sum(), r"Compute a term of a loss in", weight),
    "normal_": (nn.init.normal_, r"'normal_' writes .*set_full_param", weight),
    "fill_": (lambda p: p.data.fill_(1), r"'fill_' writes .*set_full_param", weight),
    "adamw": (
        lambda m: torch.optim.AdamW(m.parameters()).step(),
        r"AdamW steps parameters .*zero_ext\.optim",
        None,
    ),
    "half": (lambda m: m.half(), r"half\(\) of a module .*before zero_ext\.shard\(\)", None),
    "to": (lambda m: m.last.to(torch.float64), r"\bto\(\) of a module .*before zero_ext", None),
    "deepcopy": (copy.deepcopy, DEEPCOPY, None),
    "deepcopy of a child": (lambda m: copy.deepcopy(m.last), DEEPCOPY, None),
    "deepcopy of a list": (lambda m: copy.deepcopy(list(m.parameters())), DEEPCOPY, None),
    "averaged": (AveragedModel, EMA, None),
    "shadows": (lambda m: EMAModel(m.parameters()), EMA, None),
    "moco": (lambda m: Momentum().update_key_encoder_by_momentum(Net(), m), EMA, None),
    "lerp_": (lambda p: blend("lerp_", torch.zeros(13, 7), p), EMA, weight),
    "copy_": (lambda p: blend("copy_", torch.zeros(13, 7), p.data), EMA, weight),
    "add_": (lambda p: torch.zeros(13, 7).add_(p.detach(), alpha=0.1), EMA, weight),
    "torch.save": (saving, SAVE, None),
    "pickle": (pickle.dumps, SAVE, None),
    "method": (lambda m: m.tied(torch.ones(2, 7)), r"register_forward_method\(.*'tied'\)", None),
    "forward": (borrowing, r"forward of Net .*shard\(units=", None),
}
# Of a device's tensors torch's numpy() raises its own error. The emulated device runs operators
# without grad mode, on which the text for a term of a loss depends.
OF_THE_HOST = ("numpy", "loss", "penalty")


def test_the_message_fits_what_was_called(model, rank, device):
    mean_square(model, rank_data((2, 7), rank)).backward()  # torch's optimizers need gradients
    wrong = []
    for name, (mistake, expected, of) in MISTAKES.items():
        if device.type != "cpu" and name in OF_THE_HOST:
            continue
        try:
            mistake(model if of is None else of(model))
            told = "nothing"
        except RuntimeError as error:
            told = str(error)
        begins = f"zero_ext [rank {rank}"
        if not told.startswith(begins) or not re.search(expected, told) or len(told) > 400:
            wrong.append(f"{name}: {told}")
    assert not wrong, "\n".join(wrong)
    # The module works as before.
    mean_square(model, rank_data((2, 7), rank)).backward()


class Box:
    """No container that zero_ext looks into."""

    def __init__(self, value):
        self.value = value


class Boxed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Box(torch.tanh(self.inner(x)))


class Unseen(nn.Module):
    """The outputs of its blocks are not seen, so a backward does not gather them again."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(map(Boxed, blocks))
        self.last = nn.Linear(7, 7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).value
        return self.last(x)


UNSEEN = {
    "linear": lambda: nn.Linear(7, 7),
    "without bias": lambda: nn.Linear(7, 7, bias=False),
    "convolution": lambda: nn.Conv1d(2, 2, 3, padding=1),
    "norm": lambda: nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_backward_that_reads_a_released_unit_names_it(kind, mesh, rank):
    model = Unseen([UNSEEN[kind]() for _ in range(3)])
    zero_ext.shard(model, 3, mesh=mesh, units=Boxed, bucket_mb=1e-6)
    loss = model(rank_data((2, 7), rank)).square().mean()
    # The last block comes first in a backward.
    named = r"unit 'blocks\.2\.inner\.\S+.*'\]: a backward reads parameters that are released"
    with pytest.raises(RuntimeError, match=named):
        loss.backward()


class Ahead(nn.Module):
    """While one layer runs, the next one is gathered."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(7, 7) for _ in range(3))
        self.borrows = False

    def forward(self, x):
        x = self.first(x)
        if self.borrows:
            x = functional.linear(x, self.second.weight)
        return self.last(self.second(x))


@pytest.mark.parametrize("hosts", ["1", "0"], ids=["host", "hosts"])
def test_what_is_gathered_ahead_is_not_read_before_it_has_arrived(mesh, rank, hosts, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", hosts)
    sizes = {"bucket_mb": 1e-6, "prefetch_mb": 1.0}
    model = zero_ext.shard(Ahead(), 3, mesh=mesh, units=nn.Linear, **sizes)
    x = rank_data((2, 7), rank)
    for _ in range(2):
        mean_square(model, x).backward()
    model.borrows = True
    with pytest.raises(RuntimeError, match="the forward of Ahead reads parameters of another unit"):
        model(x)
    model.borrows = False
    mean_square(model, x).backward()


def test_other_errors_keep_their_text(model):
    with torch.device("cpu"):  # others raise some errors later
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.zeros(3).lerp_(torch.zeros(4), 0.5)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(IndexError, match="out of range"):
        model.first.weight.select(0, 1083)


@pytest.mark.parametrize("stacks", [True, False])
def test_a_profile_has_the_steps_of_a_training(model, rank, mesh, stacks):
    optimizer = zero_ext.optim.AdamW(model.parameters())
    for step in range(2):  # the optimizer has states, and parameters have gradients
        optimizer.step() if step else None
        mean_square(model, rank_data((2, 7), rank)).backward()
    with torch.profiler.profile(
        with_stack=stacks, with_modules=stacks, record_shapes=True, profile_memory=True
    ) as profile:
        for step in range(2):
            mean_square(model, rank_data((2, 7), rank, step)).backward()
            optimizer.step()
        other = zero_ext.shard(Net(), 3, mesh=mesh, units=nn.Linear, bucket_mb=1e-6)
        mean_square(other, rank_data((2, 7), rank)).backward()
        with model.summon_full_params():
            twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    names = [event.name for event in profile.events()]
    assert sum(name == "aten::linear" for name in names) == 6
    modules = {str(event.name) for event in tree_of(profile) if "nn.Module" in str(event.name)}
    assert any("Net" in name for name in modules) == stacks, modules
    for each in (model, other, *twins):
        assert all(isinstance(p, nn.Parameter) for p in each.parameters())
    for each in (model, other):
        assert {type(p) for p in each.parameters()} == {nn.Parameter}
    assert {type(p) for twin in twins for p in twin.parameters()} == {nn.Parameter}


def tree_of(profile):
    """All events, those of Python functions and modules too."""
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        yield event
        left += event.children
