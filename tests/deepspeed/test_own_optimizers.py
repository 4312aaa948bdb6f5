"""Lamb and Muon of a DeepSpeed configuration: their formulas, and one process's bits."""

import copy
import functools

import pytest
import torch
from harness import rank_data
from matrices import Matrices, OneProcess, assert_same_parameters, train
from torch import nn

import zero_ext
from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.lamb import Lamb
from zero_ext.deepspeed.muon import Muon, muon_and_adam, orthogonalised
from zero_ext.deepspeed.ops.lamb import FusedLamb
from zero_ext.optim.whole import Whole

METHODS = pytest.mark.parametrize("method", ["gram", "standard"])
KINDS = {
    "Lamb": {"lr": 0.01, "weight_decay": 0.1, "max_coeff": 0.5},
    "FusedLamb": {"bias_correction": False, "eps_inside_sqrt": True},
    "Muon": {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9]},
    "muon": {"lr": 0.02, "ns_method": "standard", "adam_w_mode": False, "weight_decay": 0.1},
}


class Mixed(Matrices):
    """With a vector, a matrix that is called an embedding, one that is tagged, and a filter."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.embedding = nn.Parameter(torch.randn(13, 7) / 3)
        self.bias = nn.Parameter(torch.randn(7) / 3)
        self.filters = nn.Parameter(torch.randn(7, 2, 3, 1) / 3)
        self.layers[2].weight.use_muon = False

    def forward(self, x):
        scale = self.filters.flatten(1).sum(1)
        return super().forward(x) * scale + torch.tanh(x @ self.embedding + self.bias)


def config_of(kind: str, params: dict, stage: int = 2) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
    }


def made_plain(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """The very class, on one process's parameters, in groups that are written down here."""
    if "amb" in kind:
        return Lamb(model.parameters(), **KINDS[kind])
    muons = [*(layer.weight for layer in model.layers[:2]), model.transposed, model.last]
    muons.append(model.filters)
    adams = [model.layers[2].weight, model.embedding, model.bias]
    groups = [{"params": muons, "use_muon": True}, {"params": adams, "use_muon": False}]
    return Muon(groups, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_have_the_bits_of_one_process(anywhere, rank, world, stage, kind):
    config = config_of(kind, KINDS[kind], stage)
    engine, optimizer, *_ = zero_ext.initialize(
        model=Mixed(), config=config, mesh=anywhere, bucket_mb=400 / 2**20
    )
    assert isinstance(optimizer.zero_core.states, Whole)
    plain = OneProcess(1 if anywhere is None else world, lambda p: torch.optim.SGD(p, lr=0), Mixed)
    plain.optimizer = made_plain(kind, plain.model)
    train(engine.module, optimizer, rank, range(4))
    plain.train(range(4))
    assert_same_parameters(engine.module, plain.model)


def lamb_in_float64(p, gradients, first, second, eps, decay, lr, least, most, inside, corrects):
    """You et al. 2020, Algorithm 2, with the bounds and the size of the step of DeepSpeed."""
    p, m, v, ratios = p.double(), 0.0, 0.0, []
    for step, g in enumerate(map(torch.Tensor.double, gradients), 1):
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g**2
        update = m / ((v + eps) ** 0.5 if inside else v**0.5 + eps) + decay * p
        weight, length = (p**2).sum().item() ** 0.5, (update**2).sum().item() ** 0.5
        ratio = 1.0 if 0 in (weight, length) else min(most, max(least, weight / length))
        size = lr * (1 - second**step) ** 0.5 / (1 - first**step) if corrects else lr
        p = p - size * ratio * update
        ratios.append(ratio)
    return p, ratios


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(
    ("weight", "gradient", "expected"),
    [(1.0, 1.0, None), (100.0, 1.0, 2.0), (1e-4, 1.0, 0.2), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0)],
)
def test_lamb_is_deepspeeds_formula(weight, gradient, expected, inside, corrects):
    """The ratio within its bounds, beyond each, and 1 where a length is 0."""
    p = nn.Parameter(weight * rank_data((7, 13), 0).cpu())
    gradients = [gradient * rank_data((7, 13), 1, step).cpu() for step in range(4)]
    decay = 0.0 if gradient == 0 else 0.01
    bounds = {"min_coeff": 0.2, "max_coeff": 2.0}
    more = {"eps_inside_sqrt": inside, "bias_correction": corrects, "weight_decay": decay}
    optimizer = Lamb([p], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, **bounds, **more)
    wanted, ratios = lamb_in_float64(
        p.detach(), gradients, 0.8, 0.9, 1e-3, decay, 1e-2, 0.2, 2.0, inside, corrects
    )
    for each in gradients:
        p.grad = each
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-6 * (weight or 1))
    assert expected is None or ratios[0] == expected
    assert expected is not None or all(0.2 < ratio < 2 for ratio in ratios)


@METHODS
@pytest.mark.parametrize("shape", [(13, 13), (7, 13), (83, 13), (5, 7, 13)])
def test_matrices_are_orthogonalised(method, shape):
    """The polynomial in float64, of the singular values. Five steps magnify bf16's 2**-9."""
    given = 50 * rank_data(shape, 0)
    left, values, right = torch.linalg.svd(given.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    wanted = left @ torch.diag_embed(values) @ right
    found = orthogonalised(given, method).double()
    error = (found - wanted).norm() / wanted.norm()
    exact = method == "gram" and given.device.type == "cpu"
    assert error < (1e-5 if exact else 0.1)


def test_muon_is_torchs_of_the_same_settings():
    """Without the ratio of its sides, which is 1 here, and with torch's iteration in bf16."""
    begin = rank_data((7, 13), 0).cpu()
    ours, torchs = nn.Parameter(begin.clone()), nn.Parameter(begin.clone())
    groups = [{"params": [ours], "use_muon": True}]
    one = Muon(groups, lr=0.02, weight_decay=0.1, ns_method="standard")
    other = torch.optim.Muon([torchs], lr=0.02, weight_decay=0.1)
    for step in range(4):
        for p, optimizer in ((ours, one), (torchs, other)):
            p.grad = rank_data((7, 13), 1, step).cpu()
            optimizer.step()
    assert (ours - torchs).norm() < 0.1 * (torchs - begin).norm()


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_adam_beside_muon_is_torchs(decoupled):
    ours = nn.Parameter(rank_data((7, 13), 0).cpu())
    torchs = nn.Parameter(ours.detach().clone())
    one = Muon([ours], adam_lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    other = kind([torchs], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for step in range(4):
        for p, optimizer in ((ours, one), (torchs, other)):
            p.grad = rank_data((7, 13), 1, step).cpu()
            optimizer.step()
    torch.testing.assert_close(ours, torchs)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.Embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.conv = nn.Conv2d(1, 3, 3, bias=False)
        self.body = nn.Linear(5, 5)
        self.lm_head = nn.Linear(5, 7, bias=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_which_parameter_gets_which(device):
    """As in DeepSpeed: by dimensions and names, for each group by itself. Tags are stronger."""

    def names_in(groups):
        names = {id(p): name for name, p in model.named_parameters()}
        return [(g["use_muon"], [names[id(p)] for p in g["params"]]) for g in groups]

    with torch.device(device):
        model = Named()
    parameters = list(model.parameters())
    adams = ["Embed.weight", "norm.weight", "norm.bias", "body.bias", "lm_head.weight"]
    expected = [(True, ["conv.weight", "body.weight"]), (False, adams)]
    assert names_in(muon_and_adam(model, parameters)) == expected
    halves = [{"params": parameters[:3], "lr": 0.5}, {"params": iter(parameters[3:])}]
    groups = muon_and_adam(model, halves)
    assert names_in(groups) == [(False, adams[:3]), expected[0], (False, adams[3:])]
    made = Muon(groups, muon_lr=0.1, weight_decay=0.2)
    assert [g["lr"] for g in made.param_groups] == [0.5, 0.1, 3e-4]
    model.body.weight.use_muon, model.lm_head.weight.use_muon = False, True
    assert names_in(muon_and_adam(model, parameters))[0][1] == ["conv.weight", "lm_head.weight"]
    model.body.bias.use_muon = True
    with pytest.raises(ValueError, match=r"shape \(5,\). Set its use_muon to False"):
        zero_ext.initialize(model=model, config=config_of("Muon", {}))


def test_defaults_are_deepspeeds():
    weight = nn.Parameter(torch.ones(3, 5))
    muon = Muon([{"params": [weight], "use_muon": True}]).param_groups[0]
    assert (muon["lr"], muon["momentum"], muon["ns_method"]) == (0.02, 0.95, "gram")
    adam = Muon([weight]).param_groups[0]
    assert (adam["lr"], adam["betas"], adam["eps"]) == (3e-4, (0.9, 0.95), 1e-10)
    assert muon["weight_decay"] == adam["weight_decay"] == 0 and adam["adam_w_mode"]
    assert Muon([weight], lr=0.1, adam_lr=0.2).param_groups[0]["lr"] == 0.2
    assert Muon([weight], lr=0.1, muon_lr=0.2).param_groups[0]["lr"] == 0.1


BAD = [
    ("Muon", {"per_head_muon": True}, "'optimizer.params.per_head_muon' is True"),
    ("Muon", {"ns_method": "svd"}, "ns_method' is 'svd': choose 'gram' or 'standard'"),
    ("Muon", {"fp32_optimizer_states": False}, "fp32_optimizer_states' is False"),
    ("Muon", {"adam_w_mode": "no"}, "adam_w_mode' is 'no'"),
    ("Muon", {"nesterov": True}, "Muon has no such argument"),
    ("Muon", {"muon_lr": -1}, "'optimizer.params': lr is -1: it must not be negative"),
    ("Muon", {"momentum": 1}, "momentum is 1: it must be from 0 to below 1"),
    ("Muon", {"betas": [0.9, 2]}, r"betas is \(0.9, 2\)"),
    ("Lamb", {"max_grad_norm": 1.0}, "max_grad_norm' is 1.0: use 'gradient_clipping'"),
    ("Lamb", {"amsgrad": True}, "Lamb has no amsgrad"),
    ("Lamb", {"eps": -1}, "eps is -1: it must not be negative"),
    ("Lamb", {"betas": [0.9, 1]}, r"betas are \(0.9, 1\)"),
    ("Lamb", {"min_coeff": 3, "max_coeff": 2}, "min_coeff is 3 and max_coeff 2: swap them"),
    ("Lamb", {"max_coef": 2}, "Did you mean 'max_coeff'"),
]


@pytest.mark.parametrize(("kind", "params", "message"), BAD)
def test_bad_arguments_are_named(kind, params, message):
    with pytest.raises(ValueError, match=message):
        Config.read(config_of(kind, params), 1)
    harmless = {"per_head_muon": False, "torch_adam": True, "fp32_optimizer_states": True}
    read = Config.read(config_of("Muon", {**harmless, "ns_method": "standard"}), 1)
    assert read.optimizer.kind is Muon


def test_several_bad_arguments_are_one_exception():
    config = config_of("Muon", {"per_head_muon": True, "ns_method": 3}, stage=4)
    with pytest.raises(ValueError, match="has 3 errors"):
        Config.read(config, 1)


def deepspeeds_lamb(model: nn.Module, **settings) -> torch.optim.Optimizer:
    """DeepSpeed's class has this name, this attribute and such groups."""

    class FusedLamb(torch.optim.Optimizer):
        eps_mode = 0

    ours = Lamb(model.parameters(), **settings)
    (group,) = ours.param_groups
    del group["eps_inside_sqrt"]
    made = FusedLamb([group], copy.deepcopy(ours.defaults))
    del made.param_groups[0]["eps_inside_sqrt"]
    return made


@pytest.mark.parametrize("whose", ["ours", "DeepSpeed's"])
def test_a_lamb_that_a_script_makes(anywhere, rank, world, whose):
    settings, model = {"lr": 0.01, "weight_decay": 0.1}, Matrices()
    make = functools.partial(Lamb, **settings, eps_inside_sqrt=True)
    if whose == "ours":
        given = FusedLamb(model.parameters(), **settings, eps_inside_sqrt=True)
    else:
        given = deepspeeds_lamb(model, **settings)
    config = config_of("Lamb", {})
    del config["optimizer"]
    engine, optimizer, *_ = zero_ext.initialize(
        model=model, optimizer=given, config=config, mesh=anywhere
    )
    plain = OneProcess(1 if anywhere is None else world, make)
    train(engine.module, optimizer, rank, range(2))
    plain.train(range(2))
    assert_same_parameters(engine.module, plain.model)
