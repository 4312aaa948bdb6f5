"""Seven small models, and wrappers that change how a module inside one computes."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 7  # of every model's input: [batch, 7]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.second = nn.Linear(13, 13)
        self.third = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.first(x))
        x = functional.gelu(self.second(x))
        return self.last(x + torch.tanh(self.third(x)))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv1d(1, 5, 3, padding=1)
        self.norm = nn.BatchNorm1d(5)
        self.narrow = nn.Conv1d(5, 2, 3)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.wide(x.unsqueeze(1))))
        return self.last(torch.tanh(self.narrow(x)).flatten(1))


class Tokens(nn.Module):
    """The weight of the embedding is also that of the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach() * 3).long().abs() % 11
        return self.head(self.norm(torch.tanh(self.middle(self.embedding(tokens)))))


class Recurrent(nn.Module):
    """One cell that runs three times."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, 5)
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for step in range(3):
            state = self.cell(x * (step + 1), state)
        return self.last(torch.tanh(self.middle(state)))


class Gains(nn.Module):
    """Parameters of the root itself, of 0 dimensions, and in a list."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + n)) for n in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.inner, self.gains, strict=True):
            x = x + gain * torch.tanh(layer(x)) + self.shift
        return self.last(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x.unsqueeze(-1)))
        return self.last(torch.tanh(self.middle(x))).mean(1)


class Experts(nn.Module):
    """The data choose one of three experts, so ranks use different ones."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 13) for _ in range(3))
        self.middle = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = int(weights.detach().sum(0).argmax()) if len(x) else 0
        x = weights[:, chosen : chosen + 1] * torch.tanh(self.experts[chosen](x))
        return self.last(torch.tanh(self.middle(x)))


MODELS = (Layers, Convolutions, Tokens, Recurrent, Gains, Attention, Experts)


class Wrapper(nn.Module):
    """Around a module that takes and gives one tensor."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Cast(Wrapper):
    """The module in another dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype):
        super().__init__(inner.to(dtype))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Twice(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x * 0.5)


class WithAndWithoutGraph(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.inner(x)
        return self.inner(x) + 0.25 * target


class DetachedFirst(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x).detach()


class Checkpointed(Wrapper):
    def __init__(self, inner: nn.Module, reentrant: bool, times: int = 1):
        super().__init__(inner)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        def call(x: Tensor, left: int) -> Tensor:
            if left == 0:
                return self.inner(x)
            return checkpoint(call, x, left - 1, use_reentrant=self.reentrant)

        return call(x, self.times)


class InDict(Wrapper):
    """Its output is in a dictionary until the wrapper's parent has it."""

    class Body(Wrapper):
        def forward(self, x: Tensor) -> dict:
            return {"other": [None, 3], "out": (self.inner(x),)}

    def __init__(self, inner: nn.Module):
        super().__init__(self.Body(inner))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)["out"][0]


class InPlace(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mul_(1.5)


class Through(torch.autograd.Function):
    """The identity, written by hand."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x + weight.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (weight,) = ctx.saved_tensors
        return gradient, gradient.sum() * torch.ones_like(weight)


class OwnFunction(Wrapper):
    """A custom function reads a parameter that the wrapper holds."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(self.inner(x), self.weight)


class OddSizes(Wrapper):
    """Parameters of no element, of no dimension, of one and of 1,083 elements."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.one = nn.Parameter(torch.tensor([[0.5]]))
        self.many = nn.Parameter(torch.linspace(-1, 1, 1083))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x * self.scale)
        return x + self.one.sum() * self.many.mean() + self.nothing.sum()


class LowRank(Wrapper):
    """Two trained factors beside a frozen linear layer."""

    def __init__(self, inner: nn.Linear):
        super().__init__(inner.requires_grad_(False))
        self.down = nn.Parameter(torch.randn(2, inner.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(inner.out_features, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


class ReadFromOutside(Wrapper):
    """The wrapper computes with the linear layer's parameters, whose forward never runs."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.weight, self.inner.bias)


class UsedDetached(Wrapper):
    """The linear layer's weight is also read outside of the graph, after its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * functional.linear(x, self.inner.weight.detach())


class Quantised(Wrapper):
    """A frozen weight of integers beside the module."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.codes = nn.Parameter(torch.arange(-3, 4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("offsets", torch.arange(5, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.codes.float().sum() / 100) + self.offsets.sum() / 1000
