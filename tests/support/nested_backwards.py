"""Backwards inside backwards: programs that run on a plain and on a sharded model alike.

All values are small integers, so that sums have the same bits in any order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

LAYERS = 4
WIDTH = 3


class PlannedError(Exception):
    """What a user's hook raises."""


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """From ``low`` to ``high``, in the host's memory: hooks have no default device."""
    return torch.randint(low, high + 1, shape, generator=generator, device="cpu").float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        numbers = torch.Generator("cpu").manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(integers(numbers, -1, 1, *parameter.shape))

    def forward(self, x: Tensor, layers: Sequence[int]) -> Tensor:
        for number in layers:
            x = self.layers[number](x)
            x = x + 2 * torch.relu(x)
        return x


@dataclass(frozen=True)
class Backward:
    """A backward whose graph is: leaf → layers ``before`` → the place → layers ``after`` → loss.

    The place's code runs after the gradients of ``after`` and before those of ``before``. It runs
    the backwards ``inner`` one after the other, and throws afterwards if ``throws``.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    place: str = ""
    inner: tuple[Backward, ...] = ()
    throws: bool = False
    caught: bool = False  # what it throws is caught by the backward around it
    made_before: bool = False  # its forward runs before the backward around it

    def uses_model(self) -> bool:
        return bool(self.before or self.after) or any(each.uses_model() for each in self.inner)

    def catches(self) -> bool:
        """An error of an inner backward that may have had gradients is caught."""
        return any((each.caught and each.uses_model()) or each.catches() for each in self.inner)


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, code):
        ctx.code = code
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.code()
        return grad, None


@dataclass
class Run:
    """One program on one model. ``seed``: of its data."""

    model: nn.Module
    seed: int
    _handles: list = field(default_factory=list)

    def __post_init__(self):
        self._numbers = torch.Generator("cpu").manual_seed(self.seed)
        self._device = next(self.model.parameters()).device

    def backward(self, program: Backward) -> None:
        try:
            self._loss(program).backward()
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _loss(self, program: Backward) -> Tensor:
        leaf = integers(self._numbers, -3, 3, 2, WIDTH).to(self._device).requires_grad_()
        factor = int(integers(self._numbers, 1, 3))
        losses = [self._loss(each) if each.made_before else None for each in program.inner]
        x = self.model(leaf, program.before) if program.before else leaf
        if program.place:
            todo = [losses]

            def code(*_) -> None:
                while todo:  # once, though a parameter's hooks run in inner backwards as well
                    self._code(program, todo.pop())

            x = PLACES[program.place](self, x, program, code)
        if program.after:
            x = self.model(x, program.after)
        return (factor * x).sum()

    def _code(self, program: Backward, losses: Sequence[Tensor | None]) -> None:
        with torch.enable_grad():
            for inner, loss in zip(program.inner, losses, strict=True):
                caught = contextlib.suppress(PlannedError) if inner.caught else None
                with caught or contextlib.nullcontext():
                    (self._loss(inner) if loss is None else loss).backward()
        if program.throws:
            raise PlannedError

    def keep(self, handle) -> None:
        self._handles.append(handle)


# Each place: from the run, the tensor there, the program and the code, the tensor that goes on.


def on_tensor(_run, x, _program, code):
    x.register_hook(code)
    return x


def on_leaf(_run, x, _program, code):
    leaf = torch.zeros_like(x, requires_grad=True)
    leaf.register_hook(code)
    return x + leaf


def after_accumulation(_run, x, _program, code):
    leaf = torch.zeros_like(x, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(code)
    return x + leaf


def before_node(run, x, _program, code):
    x = 1 * x
    run.keep(x.grad_fn.register_prehook(code))
    return x


def after_node(run, x, _program, code):
    x = 1 * x
    run.keep(x.grad_fn.register_hook(code))
    return x


def after_several_leaves(run, x, _program, code):
    leaves = [torch.zeros_like(x, requires_grad=True) for _ in range(2)]
    run.keep(torch.autograd.graph.register_multi_grad_hook(leaves, code))
    return x + leaves[0] + leaves[1]


def of_module(_run, x, _program, code):
    module = nn.Identity()
    module.register_full_backward_hook(code)
    return module(1 * x)


def before_module(_run, x, _program, code):
    module = nn.Identity()
    module.register_full_backward_pre_hook(code)
    return module(1 * x)


def of_function(_run, x, _program, code):
    return Calling.apply(x, code)


def of_saved_tensor(_run, x, _program, code):
    def unpack(tensor):
        code()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return x * torch.ones_like(x)


def in_callback(_run, x, _program, code):
    """When the task ends that ran the hook."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    x.register_hook(lambda _grad: queue(code))
    return x


def parameter_of(run, program):
    return run.model.layers[program.before[0]].weight


def on_parameter(run, x, program, code):
    run.keep(parameter_of(run, program).register_hook(code))
    return x


def before_parameter(run, x, program, code):
    node = torch.autograd.graph.get_gradient_edge(parameter_of(run, program)).node
    run.keep(node.register_prehook(code))
    return x


def after_parameter(run, x, program, code):
    node = torch.autograd.graph.get_gradient_edge(parameter_of(run, program)).node
    run.keep(node.register_hook(code))
    return x


def after_parameters_accumulation(run, x, program, code):
    """Autograd deadlocks if an inner backward reaches the same parameter."""
    run.keep(parameter_of(run, program).register_post_accumulate_grad_hook(code))
    return x


PLACES = {
    place.__name__: place
    for place in (
        on_tensor,
        on_leaf,
        after_accumulation,
        before_node,
        after_node,
        after_several_leaves,
        of_module,
        before_module,
        of_function,
        of_saved_tensor,
        in_callback,
        on_parameter,
        before_parameter,
        after_parameter,
        after_parameters_accumulation,
    )
}
# Those that need a layer before the place.
ON_PARAMETERS = {name for name in PLACES if "parameter" in name}


def deep(depth: int, innermost: Backward, place: str = "on_leaf", own: bool = False) -> Backward:
    """``innermost`` inside ``depth`` others. ``own``: those have a gradient, too."""
    program = innermost
    for _ in range(depth):
        program = Backward(before=(0,) if own else (), place=place, inner=(program,))
    return program


class Generator:
    """Random programs. The same seed makes the same ones."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def program(self) -> Backward:
        throws = self._random.random() < 0.3
        return self._backward(depth=0, allowed=range(LAYERS), throws=throws)

    def _layers(self, allowed: Sequence[int], most: int) -> tuple[int, ...]:
        count = self._random.randint(0, min(most, len(allowed)))
        return tuple(self._random.sample(list(allowed), count))

    def _backward(self, depth: int, allowed: Sequence[int], throws: bool) -> Backward:
        draw = self._random
        before, after = self._layers(allowed, 2), self._layers(allowed, 2)
        leaf = depth == 3 or (depth > 0 and draw.random() < 0.5)
        if leaf:
            place = "on_leaf" if throws else ""
            own = before or after or tuple(allowed[:1])
            return Backward(own, after, place, throws=throws, made_before=draw.random() < 0.3)
        names = [name for name in PLACES if before or name not in ON_PARAMETERS]
        if throws and depth == 0:
            names.remove("in_callback")  # which runs when the backward has ended
        place = draw.choice(names)
        if place == "after_parameters_accumulation":
            allowed = [number for number in allowed if number != before[0]]
            if not allowed:
                place = "on_tensor"
        inner = []
        count = draw.choice((1, 1, 2, 2, 3, 7))
        thrower = draw.randrange(count) if throws and draw.random() < 0.7 else None
        for number in range(count):
            each = self._backward(depth + 1, allowed or range(LAYERS), number == thrower)
            if number == thrower and draw.random() < 0.4:
                each = replace(each, caught=True)
            inner.append(each)
        return Backward(
            before,
            after,
            place,
            tuple(inner),
            throws=throws and thrower is None,
            made_before=depth > 0 and draw.random() < 0.2,
        )


def programs(seed: int, count: int) -> Iterator[Backward]:
    generator = Generator(seed)
    for _ in range(count):
        yield generator.program()
