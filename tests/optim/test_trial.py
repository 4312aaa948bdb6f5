"""The trial of ``wrap``: which optimizers it accepts, and the reason that it gives for others."""

import inspect

import numpy as np
import pytest
import torch
from own_optimizers import EachByItself
from torch import Tensor, nn

import zero_ext
from zero_ext.optim import elementwise
from zero_ext.optim.whole import Whole


class Own(EachByItself):
    """Subtracts ``change(parameter, state)`` times the rate."""

    def update(self, p, state, group):
        if p.numel():
            p.sub_(self.change(p, state) * group["lr"])


class EveryFourth(Own):
    """Sums gradients, and moves in every fourth step."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
        if state["step"] % 4:
            return torch.zeros_like(p)
        return state.pop("sum") / 4


class TensorRate(Own):
    """Takes no rate but a tensor."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        state["rate"] = self.param_groups[0]["lr"].clone()
        return p.grad * state["rate"]


class TwoModes(Own):
    """Steps in training mode only, as schedule-free optimizers do."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def change(self, p: Tensor, state: dict) -> Tensor:
        if not self.is_training:
            raise RuntimeError("call train() first")
        return p.grad.clone()


class BlockScales(Own):
    """Keeps a momentum of 8 bits, with a scale per block, of parameters of 4,096 elements on."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        if p.numel() < 4096:
            state["momentum"] = state.get("momentum", 0.0) * 0.9 + p.grad
            return state["momentum"]
        before = 0.0
        if "codes" in state:
            before = (state["codes"].float() * state["scales"][:, None]).flatten()[: p.numel()]
        moment = before * 0.9 + p.grad.flatten()
        blocks = nn.functional.pad(moment, (0, -len(moment) % 256)).view(-1, 256)
        state["scales"] = blocks.abs().amax(1) / 127
        state["codes"] = (blocks / state["scales"][:, None]).round().to(torch.int8)
        return moment.view_as(p)


class RoundedWhenLarge(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        kind = torch.bfloat16 if p.numel() >= 4096 else torch.float32
        state["momentum"] = (state.get("momentum", 0.0) * 0.9 + p.grad).to(kind)
        return state["momentum"].float()


class RateBySize(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad / p.numel() ** 0.5


class GlobalNorm(Own):
    """Divides by the norm of all gradients, which it keeps in its groups."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            group["norm"] = torch.stack([g.norm() for g in grads]).norm().item()
        super().step()

    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad / self.param_groups[0]["norm"]


class Estimate(Own):
    """Keeps a distance from the start, summed over all parameters, that grows from step to step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        total = sum(p.abs().sum() for group in self.param_groups for p in group["params"])
        self.state["distance"] = max(self.state.get("distance", 0.0), total.item())

    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad * (1 + self.state.get("distance", 0.0))


class LateEstimate(Own):
    """Sums all gradients in its groups, for its updates from step 100 on."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["numerator"] = group.get("numerator", 0.0) + sum(float(g.sum()) for g in grads)
        super().step()

    def change(self, p: Tensor, state: dict) -> Tensor:
        group = self.param_groups[0]
        return p.grad * (group["numerator"] if group["k"] >= 100 else 1.0)


class FirstParametersClip(Own):
    """Keeps in the state of the first parameter what it divides all others by."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        first = self.param_groups[0]["params"][0]
        if p is first:
            state["largest"] = p.grad.abs().max()
        return p.grad / self.state[first].get("largest", 1.0)


class Lamb(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad * (p.norm() / p.grad.norm())


class Centered(Own):
    """Its mean is over all dimensions: equal for each shape."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        state["mean"] = p.grad.mean()
        return p.grad - state["mean"]


class LargestOnly(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad * (p.grad.abs() >= p.grad.abs().median())


class Factored(Own):
    """Of matrices, it keeps the mean square of each row and column; of others, each square."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        square = p.grad.square()
        if p.dim() < 2:
            state["square"] = square
            return p.grad / square.sqrt()
        state["row"], state["column"] = square.mean(1), square.mean(0)
        return p.grad / torch.outer(state["row"], state["column"]).div(square.mean()).sqrt()


class RowNorms(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad / p.grad.norm(dim=-1, keepdim=True)


class MatricesOnly(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        if p.dim() != 2:
            raise ValueError("2-D only")
        return p.grad


class Noisy(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad + torch.randn_like(p)


class Alternating(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad * torch.linspace(1, 2, p.numel()).view_as(p)


class Sliced(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        change = p.grad.clone()
        change[0] = 0
        return change


class BranchesOnItsNorm(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad * 0.5 if p.grad.norm().item() > 1e6 else p.grad.clone()


class ReadsAList(Own):
    """No operation of torch reads the values."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad / max(map(abs, p.grad.flatten().tolist()))


class DecaysMatrices(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return p.grad + 0.1 * p if p.dim() > 1 else p.grad.clone()


class ReadsOtherMemory(Own):
    """NumPy's operations are not seen, nor are those of other libraries."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        return torch.from_numpy(np.sign(p.grad.numpy()))


class WritesOtherMemory(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        p.detach().numpy()[...] -= p.grad.numpy() * 0.1
        return torch.zeros_like(p)


@torch.library.custom_op("zero_ext_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


class OwnOperator(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        return doubled(p.grad)


class SeededNoise(Own):
    """The same for each parameter, whichever others there are."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        generator = torch.Generator().manual_seed(state["step"])
        return p.grad * torch.rand(p.shape, generator=generator)


class ComplexMoments(Own):
    """Elementwise: two moments in one complex state."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        both = state.setdefault("both", torch.zeros(p.shape, dtype=torch.complex64))
        both.mul_(0.9).add_(torch.complex(p.grad, p.grad.square()), alpha=0.1)
        return both.real / (both.imag.sqrt() + 1e-8)


class DropsSmallOnes(Own):
    """Elementwise: writes to a mask's elements, and counts steps in a tensor."""

    def change(self, p: Tensor, state: dict) -> Tensor:
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        change = p.grad / (1 - 0.9 ** state["step"])
        change[change.abs() < 0.1] = 0
        return change.view(-1).view_as(p)


SHAPES = [(7, 13), (1083,), (5,)]


def _trained(make, *, scale: float) -> list[Tensor]:
    """Gradients are ``scale`` times the number of the step."""
    parameters = [
        nn.Parameter(torch.linspace(-1, 1, 1183)[: torch.Size(s).numel()].view(s)) for s in SHAPES
    ]
    optimizer = make(parameters)
    for step in range(1, 10):
        optimizer.zero_grad()
        (scale * step * sum(p.sum() for p in parameters)).backward()
        optimizer.step()
    return parameters


def test_what_is_elementwise_in_longer_runs_or_with_tensors_is_accepted(team):
    mean_is_1 = 1 + team.rank - (team.world - 1) / 2
    for kind, rate in (
        (EveryFourth, lambda: 0.5),
        (TensorRate, lambda: torch.tensor(0.5)),
        (ComplexMoments, lambda: 0.01),
        (DropsSmallOnes, lambda: 0.5),
        (torch.optim.Adagrad, lambda: torch.tensor(0.5)),
        (torch.optim.RMSprop, lambda: torch.tensor(0.5)),
    ):
        given = rate()
        sharded = _trained(
            lambda p, kind=kind, lr=given: zero_ext.optim.wrap(
                kind, p, lr=lr, process_group=team.group, bucket_mb=1e-3
            ),
            scale=mean_is_1,
        )
        plain = _trained(lambda p, kind=kind, rate=rate: kind(p, lr=rate()), scale=1.0)
        assert given == rate()  # the trial has a rate of its own
        for ours, theirs in zip(sharded, plain, strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), msg=kind.__name__)


def test_groups_with_a_tensor_as_rate_are_tried_apart():
    class NumberOnly(Own):
        def change(self, p: Tensor, state: dict) -> Tensor:
            if isinstance(self.param_groups[-1]["lr"], Tensor):
                raise ValueError("not a number")
            return p.grad

    parameters = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(13))]
    optimizer = zero_ext.optim.wrap(NumberOnly, parameters[:1])
    with pytest.raises(TypeError, match=r"step\(\) .* raises ValueError: not a number"):
        optimizer.add_param_group({"params": parameters[1:], "lr": torch.tensor(0.1)})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.2})


def test_optimizers_with_a_training_mode_are_tried_in_it():
    elementwise.check(TwoModes, {}, {})
    parameter = nn.Parameter(torch.ones(7))
    optimizer = zero_ext.optim.wrap(TwoModes, [parameter])
    optimizer.train()
    parameter.sum().backward()
    optimizer.step()
    other = zero_ext.optim.wrap(TwoModes, [nn.Parameter(torch.ones(7))])
    other.load_state_dict(optimizer.state_dict())  # before it is in any mode


def test_differences_of_rounding_are_no_reason():
    """Fused kernels round what fills no vector register in another way."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        elementwise.check(kind, {"fused": True}, {})


ELEMENTWISE = {
    **{name: {} for name in ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam")},
    **{"RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "Adagrad": {"lr_decay": 0.1}},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable", None])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_elementwise_optimizers_of_torch_are_found(name, how):
    kind = getattr(torch.optim, name)
    ways = {} if how is None else {how: True}
    if how is None or how in inspect.signature(kind).parameters:
        elementwise.check(kind, {**ELEMENTWISE[name], "foreach": how == "foreach", **ways}, {})


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_other_optimizers_of_torch_are_named_with_an_operation(name):
    with pytest.raises(elementwise.WholeParametersError, match=r"it calls aten\.linalg_vec"):
        elementwise.check(getattr(torch.optim, name), {}, {})


class _Preconditioner:
    """Counts, and from step 25 on, long after the trial, it is of the parameter's shape."""

    def __init__(self):
        self.steps = 0

    def applied_to(self, g: Tensor) -> Tensor:
        self.steps += 1
        return g if self.steps < 25 else g / g.norm()


class LatePreconditioner(Own):
    def change(self, p: Tensor, state: dict) -> Tensor:
        state.setdefault("preconditioner", _Preconditioner())
        return state["preconditioner"].applied_to(p.grad)


NUMBERS = "what it does depends on a parameter's size or on several values"
HIDDEN = "it calls a kernel that torch does not dispatch"
NEED_WHOLE_PARAMETERS = {
    LatePreconditioner: NUMBERS,
    BlockScales: "it calls aten.constant_pad_nd",
    Lamb: "it calls aten.linalg_vector_norm",
    Centered: "it calls aten.mean",
    LargestOnly: "it calls aten.median",
    Factored: "it calls aten.mean",
    RowNorms: "it calls aten.linalg_vector_norm",
    MatricesOnly: r"with a parameter of shape \(1083,\) it raises ValueError: 2-D only",
    RoundedWhenLarge: NUMBERS,
    RateBySize: NUMBERS,
    Alternating: "it calls aten.linspace",
    Sliced: "it calls aten.select",
    BranchesOnItsNorm: "it calls aten.linalg_vector_norm",
    ReadsAList: NUMBERS,
    DecaysMatrices: NUMBERS,
    ReadsOtherMemory: HIDDEN,
    WritesOtherMemory: HIDDEN,
    OwnOperator: "it calls zero_ext_tests.doubled",
    SeededNoise: "it calls aten.rand",
}


@pytest.mark.parametrize("kind", NEED_WHOLE_PARAMETERS)
def test_what_depends_on_its_own_parameter_alone_gets_whole_ones(kind):
    """On its shape, its size, its other elements, or the place of an element in it. So do kernels
    that nothing is known of."""
    optimizer = zero_ext.optim.wrap(kind, [nn.Parameter(torch.zeros(7, 13))])
    assert isinstance(optimizer.zero_core.states, Whole)
    why = f"{kind.__name__} is not elementwise with these settings: {NEED_WHOLE_PARAMETERS[kind]}"
    with pytest.raises(elementwise.WholeParametersError, match=why):
        elementwise.check(kind, {"lr": 0.0}, {"lr": torch.tensor(0.0)})


class CountsParameters(Lamb):
    """Counts in its state what all parameters share: how many of them it has updated."""

    def step(self, closure=None):
        super().step(closure)
        every = [p for group in self.param_groups for p in group["params"]]
        self.state["updates"] = self.state.get("updates", 0) + len(every)


REFUSED = [
    (GlobalNorm, "group setting 'norm' depends on other parameters"),
    (LateEstimate, "group setting 'numerator' depends on other parameters"),
    (Estimate, "state 'distance' depends on other parameters"),
    (FirstParametersClip, "depends on other parameters"),
    (Noisy, "depends on random numbers"),
    (CountsParameters, "state 'updates' depends on other parameters"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_each_refusal_says_what_the_update_depends_on(kind, reason):
    parameters = [nn.Parameter(torch.zeros(7, 13))]
    start = f"zero_ext: {kind.__name__} cannot be sharded: it is not elementwise, and its "
    with pytest.raises(TypeError, match=start + "(?:(?!depends).)*" + reason):
        zero_ext.optim.wrap(kind, parameters)
    with pytest.raises(TypeError, match=start):  # in a group of its own, with another rate
        elementwise.check(kind, {"lr": 0.0}, {"lr": torch.tensor(0.0)})
