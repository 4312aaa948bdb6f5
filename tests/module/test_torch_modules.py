"""torch's own modules, of which many read parameters in other ways than their own forward."""

import pytest
import torch
from harness import assert_bits, mean_square, rank_batches, rank_data
from reference import OneProcess, gradients_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zero_ext

pytestmark = pytest.mark.dist

WIDTH = 8
SHAPE = (5, 6, WIDTH)
LR = 0.125


class Attention(nn.Module):
    """The output's weights belong to a child whose forward nobody calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(
            WIDTH, 2, batch_first=True, kdim=WIDTH, add_bias_kv=True
        )

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x, x, x)
        return self.second(y, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Keeps a list of its own with the parameters."""

    def __init__(self, kind: type[nn.RNNBase], **kwargs):
        super().__init__()
        self.layers = kind(WIDTH, 7, num_layers=2, batch_first=True, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class Normed(nn.Module):
    """The weights are computed from other parameters whenever they are read."""

    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.eval()  # spectral_norm changes a buffer with every forward in training

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(6, 5, 3, padding=1), nn.BatchNorm1d(5), nn.PReLU(5), nn.Conv1d(5, 6, 3)
        )
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Embedding(11, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, WIDTH, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        tokens = (3 * x[..., 0].abs()).long().clamp(max=10)
        return self.one(tokens) + self.bag(tokens).unsqueeze(1)


class Containers(nn.Module):
    """Parameters of containers that have no forward, and of a module called as a function."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.shifts = nn.ParameterDict({"all": nn.Parameter(torch.zeros(WIDTH))})
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.pair = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)) * gain
        return self.pair(x, x + self.shifts["all"])


def transformer() -> nn.Module:
    """Has a way of its own through frozen parameters in evaluation."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "transformer": transformer,
    "attention": Attention,
    "LSTM": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "LSTM with projections": lambda: Recurrent(nn.LSTM, proj_size=3),
    "GRU": lambda: Recurrent(nn.GRU),
    "weight norm": lambda: Normed(parametrizations.weight_norm),
    "spectral norm": lambda: Normed(parametrizations.spectral_norm),
    "orthogonal": lambda: Normed(parametrizations.orthogonal),
    "convolutions": Convolutions,
    "tables": Tables,
    "containers": Containers,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_and_steps_are_those_of_one_process(mesh, rank, world, stage, name):
    torch.manual_seed(0)
    plain = MODELS[name]()
    torch.manual_seed(0)
    model = zero_ext.shard(MODELS[name](), stage, mesh=mesh, bucket_mb=1e-4)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=LR)
    reference = OneProcess(plain, lambda masters: torch.optim.SGD(masters, lr=LR))
    exact = world & (world - 1) == 0

    def assert_same(actual, expected, what):
        if exact:
            assert_bits(actual, expected, what)
        else:  # a third is no power of two: each product is rounded
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=what)

    for step in range(2):
        mean_square(model, rank_data(SHAPE, rank, step)).backward()
        expected = reference.train(rank_batches(SHAPE, world, step))
        found = gradients_of(model)
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            assert_same(found[parameter], gradient, f"gradient of {parameter}, step {step}")
        optimizer.step()
        optimizer.zero_grad()
    for (parameter, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(zero_ext.full_tensor(p), q, parameter)
    for m in (model, plain):
        m.eval()
    # Running statistics are each rank's own, and were gathered in another order by the reference.
    plain.load_state_dict(dict(model.named_buffers()), strict=False)
    with torch.no_grad():
        x = rank_data(SHAPE, 0, 9)
        assert_same(model(x), plain(x), "output in evaluation")
