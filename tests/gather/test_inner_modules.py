"""Stage 3: modules inside a unit's that forwards enter from outside of it gather as well."""

import copy
import threading

import pytest
import torch
from harness import ResidualBlock, assert_bits, mean_square, rank_data
from setups import gathered
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero_ext

WIDTH = 7
SHAPE = (4, WIDTH)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.ff = nn.Linear(WIDTH, WIDTH), ResidualBlock(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(x + self.emb(x).sin())


class Stack(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def train_loss(self, x: Tensor) -> Tensor:
        return mean_square(self, x)


class OutputLayers(Stack):
    """As in diffusion transformers: the last layers call a layer of the first block."""

    def forward(self, x):
        return self.out(super().forward(x) + self.blocks[0].emb(input=x.detach()))


class Reversible(Stack):
    """No block is entered itself, only two modules of each."""

    def forward(self, x):
        y = x.cos()
        for block in self.blocks:
            x, y = y, x + block.ff(y + block.emb(y))
        return x * y


class Checkpointed(Reversible):
    def forward(self, x):
        for n, block in enumerate(self.blocks):
            x = checkpoint(block.ff, x + block.emb(x), use_reentrant=n == 1)
        return self.out(x)


class Borrowing(Stack):
    """A block calls a layer of the next one, which stays inside of its own call."""

    def forward(self, x):
        for block, other in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            x = block(x) * other.ff(block.emb(x))
        return x


class Frozen(OutputLayers):
    def __init__(self):
        super().__init__()
        self.blocks[0].emb.requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + self.blocks[1].ff(x)


class Reader(nn.Module):
    """Has no parameter of its own, and reads one of a module in it."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, again=True):
        x = functional.linear(x, self.inside.weight)
        return self(x, again=False) if again else x


class ReaderBlock(Block):
    def __init__(self):
        super().__init__()
        self.ff = Reader()


class Readers(Reversible):
    block = ReaderBlock


class Sharing(Reversible):
    """A module that two blocks share belongs to the root, which is not entered in a method."""

    def __init__(self):
        super().__init__()
        self.blocks[2].emb = self.blocks[0].emb

    def train_loss(self, x):
        return self.out(self.forward(x)).square().mean()


class TwoGraphs(OutputLayers):
    """A layer under no_grad, then with a gradient; one graph is kept for a second backward."""

    def train_loss(self, x):
        with torch.no_grad():
            x = x + self.blocks[1].emb(x)
        loss = mean_square(self, x)
        loss.backward(retain_graph=True)
        return loss * 2


MODELS = [OutputLayers, Reversible, Checkpointed, Borrowing, Frozen, Readers, Sharing, TwoGraphs]


@pytest.mark.dist
@pytest.mark.parametrize("model_fn", MODELS)
def test_gradients_and_steps_are_those_of_stage_1(model_fn, mesh, rank):
    for arguments in ({}, {"prefetch_mb": 1, "reshard_after_forward": False}):
        sides = []
        for stage in (1, 3):
            units = {"units": Block, "bucket_mb": 1e-4, **arguments} if stage == 3 else {}
            model = zero_ext.shard(model_fn(), stage, mesh=mesh, **units)
            optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05)
            found = []
            for step in range(3):
                loss = model.train_loss(rank_data(SHAPE, rank, step))
                loss.backward()
                gradients = [zero_ext.full_grad(p) for p in model.parameters() if p.requires_grad]
                found += [loss.detach(), *(g for g in gradients if g is not None)]
                optimizer.step()
                optimizer.zero_grad()
            if stage == 3:
                assert model.stats()["bytes_full"] == 0 or gathered(model) == []
            sides.append([*found, *(zero_ext.full_tensor(p) for p in model.parameters())])
        for n, (expected, actual) in enumerate(zip(*sides, strict=True)):
            assert_bits(actual, expected, f"value {n}")


@pytest.mark.dist
def test_alone_on_another_thread_after_an_error_and_in_a_copy(mesh, rank, world):
    plain = Stack()
    expected = plain.blocks[0].emb(torch.ones(SHAPE))
    model = zero_ext.shard(Stack(), 3, mesh=mesh, bucket_mb=1e-4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.blocks[0].emb(torch.ones(4, 3))
    found, ones = [], torch.ones(SHAPE)  # a thread has a default device of its own
    run = threading.Thread(target=lambda: found.append(model.blocks[0].emb(ones)))
    run.start()
    run.join()
    assert_bits(found[0].detach(), expected.detach())
    with model.summon_full_params():
        twin = copy.deepcopy(model)
    mean_square(twin, torch.ones(SHAPE)).backward()
    assert_bits(twin.blocks[0].emb(torch.ones(SHAPE)).detach(), expected.detach())
    with torch.no_grad():
        assert_bits(model.blocks[0].emb(torch.ones(SHAPE)), expected.detach())


def test_torch_compile_sees_whole_graphs():
    model = zero_ext.shard(Stack(), 3)
    inner = model.blocks[0].ff
    compiled = torch.compile(inner, backend="eager", fullgraph=True)
    with model.summon_full_params():
        assert_bits(compiled(torch.ones(SHAPE)).detach(), inner(torch.ones(SHAPE)).detach())
