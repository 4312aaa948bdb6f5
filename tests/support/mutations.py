"""Programs drawn from seeds: one of seven small models, and one to three mutations of it and of its
training loop. mutated_runs.py runs them.
"""

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from mutated_models import (
    MODELS,
    WIDTH,
    Cast,
    Checkpointed,
    DetachedFirst,
    InDict,
    InPlace,
    LowRank,
    OddSizes,
    OwnFunction,
    Quantised,
    ReadFromOutside,
    Twice,
    UsedDetached,
    WithAndWithoutGraph,
)
from setups import readable
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3


class PlannedError(Exception):
    """What a mutation raises."""


@dataclass
class Plan:
    """A program. Mutations change its fields."""

    seed: int
    draw: random.Random
    base: type[nn.Module]
    sketch: nn.Module  # a plain model, to look names up in
    names: list[str] = field(default_factory=list)  # of mutations
    build: list[Callable[[nn.Module], None]] = field(default_factory=list)  # before sharding
    after: list[Callable[[nn.Module], None]] = field(default_factory=list)  # after sharding
    options: dict[str, Any] = field(default_factory=dict)  # of shard
    adam: bool = False
    counts: Callable[[int, int], int] = lambda rank, step: 1  # micro-batches of (rank, step)
    batch: int = 2
    local: bool = False  # all micro-batches but the last are inside no_sync()
    call: Callable[[nn.Module, Tensor, int, int], Tensor] = lambda model, x, rank, step: model(x)
    loss: Callable[[Tensor], Tensor] = lambda output: output.float().square().mean()
    passes: Callable[..., Iterator[None]] | None = None
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    before_step: list[Callable[[nn.Module, int], None]] = field(default_factory=list)
    failing: list[tuple[int, int | None, str]] = field(default_factory=list)  # step, rank, where
    edits: list[Callable[[list[Tensor], int], None]] = field(default_factory=list)
    writes: list[Callable[[nn.Module, int], None]] = field(default_factory=list)
    tune: list[Callable[[torch.optim.Optimizer, int], None]] = field(default_factory=list)
    to_zero: bool = False  # zero_grad(set_to_none=False)
    zeroes: Callable[[int], bool] = lambda step: True

    def make(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = self.base()
        for change in self.build:
            change(model)
        return model

    def linear(self) -> str:
        """The name of a linear layer."""
        kinds = (nn.Linear,)
        # Those of nn.MultiheadAttention and of nn.TransformerEncoderLayer are read by these.
        names = [n for n, m in self.sketch.named_modules() if isinstance(m, kinds)]
        return self.draw.choice([n for n in names if not n.startswith("block.") and n != "head"])

    def parameter(self) -> str:
        return self.draw.choice([n for n, _ in self.sketch.named_parameters()])

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """One linear layer goes into a wrapper."""
        name = self.linear()

        def change(model: nn.Module) -> None:
            parent, _, child = name.rpartition(".")
            inner = find_module(model, name)
            find_module(model, parent).register_module(child, wrapper(inner))

        self.build.append(change)
        self.sketch = self.make()


MUTATIONS: dict[str, Callable[[Plan], None]] = {}


def mutation(function: Callable[[Plan], None]) -> Callable[[Plan], None]:
    MUTATIONS[function.__name__] = function
    return function


# What wrappers and parametrizations put into a name.
_INSERTED = re.compile(r"\b(inner\.(?!\d)|parametrizations\.|original\d?$)")


def _plain(name: str) -> str:
    return _INSERTED.sub("", name).rstrip(".")


def find_parameter(model: nn.Module, name: str) -> Tensor:
    """By its name in the unchanged model, also where a later mutation has wrapped its module."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if name in named:
        return named[name]
    return next(p for other, p in named.items() if _plain(other) == _plain(name))


def find_module(model: nn.Module, name: str) -> nn.Module:
    """The same; the outermost of its wrappers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return modules[name]
    return next(m for other, m in modules.items() if _plain(other) == _plain(name))


# Dtypes


@mutation
def everything_in_bf16(plan: Plan) -> None:
    plan.build.append(lambda model: model.bfloat16())
    plan.call = lambda model, x, rank, step: model(x.bfloat16())


@mutation
def one_layer_in_bf16(plan: Plan) -> None:
    plan.wrap(lambda inner: Cast(inner, torch.bfloat16))


@mutation
def one_layer_in_fp16(plan: Plan) -> None:
    plan.wrap(lambda inner: Cast(inner, torch.float16))


@mutation
def frozen_layer_in_float64(plan: Plan) -> None:
    plan.wrap(lambda inner: Cast(inner.requires_grad_(False), torch.float64))


@mutation
def frozen_integers(plan: Plan) -> None:
    plan.wrap(Quantised)


@mutation
def autocast(plan: Plan) -> None:
    plan.around = lambda: torch.autocast("cpu", torch.bfloat16)


@mutation
def gradients_in_fp32(plan: Plan) -> None:
    """A layer in bf16 whose weight has gradients in fp32."""

    def wrapper(inner: nn.Module) -> nn.Module:
        cast = Cast(inner, torch.bfloat16)
        inner.weight.grad_dtype = torch.float32
        return cast

    plan.wrap(wrapper)


# Freezing


@mutation
def some_are_frozen(plan: Plan) -> None:
    names = [n for n, _ in plan.sketch.named_parameters() if plan.draw.random() < 0.5]

    def change(model: nn.Module) -> None:
        for name in names:
            find_parameter(model, name).requires_grad_(False)

    plan.build.append(change)


@mutation
def all_but_one_are_frozen(plan: Plan) -> None:
    name = plan.parameter()

    def change(model: nn.Module) -> None:
        model.requires_grad_(False)
        find_parameter(model, name).requires_grad_(True)

    plan.build.append(change)


def _toggles(plan: Plan, first: bool) -> None:
    name, when = plan.parameter(), plan.draw.randrange(1, STEPS)

    def change(model: nn.Module) -> None:
        find_parameter(model, name).requires_grad_(first)

    plan.build.append(change)

    def toggle(model: nn.Module, step: int) -> None:
        if step == when:
            find_parameter(model, name).requires_grad_(not first)

    plan.before_step.append(toggle)


@mutation
def one_is_unfrozen(plan: Plan) -> None:
    _toggles(plan, first=False)


@mutation
def one_is_frozen_later(plan: Plan) -> None:
    _toggles(plan, first=True)


@mutation
def frozen_for_one_step(plan: Plan) -> None:
    name = plan.linear()

    def toggle(model: nn.Module, step: int) -> None:
        find_module(model, name).requires_grad_(step != 1)

    plan.before_step.append(toggle)


@mutation
def low_rank_adapter(plan: Plan) -> None:
    plan.wrap(LowRank)


# Reuse


@mutation
def layer_runs_twice(plan: Plan) -> None:
    plan.wrap(Twice)


@mutation
def layer_runs_without_graph_first(plan: Plan) -> None:
    plan.wrap(WithAndWithoutGraph)


@mutation
def layer_runs_detached_too(plan: Plan) -> None:
    plan.wrap(DetachedFirst)


@mutation
def weight_is_read_detached(plan: Plan) -> None:
    plan.wrap(UsedDetached)


@mutation
def weight_is_read_from_outside(plan: Plan) -> None:
    plan.wrap(ReadFromOutside)


@mutation
def model_runs_twice(plan: Plan) -> None:
    inner = plan.call
    plan.call = lambda *a: inner(*a) + inner(a[0], a[1] * 0.5, *a[2:])


@mutation
def model_is_evaluated_between(plan: Plan) -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, WIDTH, dtype=next(model.parameters()).dtype))
        model.train()

    plan.before_step.append(evaluate)


@mutation
def a_forward_is_dropped(plan: Plan) -> None:
    """A graph that no backward visits."""
    inner = plan.call

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        if (rank + step) % 2:
            inner(model, x * 2, rank, step)
        return inner(model, x, rank, step)

    plan.call = call


# Aliasing


@mutation
def two_weights_are_one(plan: Plan) -> None:
    shapes: dict[torch.Size, list[str]] = {}
    for name, p in plan.sketch.named_parameters():
        shapes.setdefault(p.shape, []).append(name)
    pairs = [names for names in shapes.values() if len(names) > 1]
    if not pairs:
        return layer_runs_twice(plan)
    first, second = plan.draw.sample(plan.draw.choice(pairs), 2)

    def change(model: nn.Module) -> None:
        module, _, name = second.rpartition(".")
        module = find_module(model, module)
        if isinstance(module, nn.ParameterList):
            module[int(name)] = find_parameter(model, first)
        else:
            setattr(module, name, find_parameter(model, first))

    plan.build.append(change)


@mutation
def memory_is_replaced_after_sharding(plan: Plan) -> None:
    name = plan.parameter()

    def change(model: nn.Module) -> None:
        with readable(model):
            parameter = find_parameter(model, name)
            parameter.data = parameter.data.clone()

    plan.after.append(change)


@mutation
def weight_is_transposed(plan: Plan) -> None:
    name = plan.linear() + ".weight"

    def change(model: nn.Module) -> None:
        weight = find_parameter(model, name)
        weight.data = weight.data.t().contiguous().t()

    plan.build.append(change)


@mutation
def parameter_is_known_elsewhere(plan: Plan) -> None:
    """A list that is no module holds it, and the loss reads it there."""
    name = plan.linear() + ".bias"

    def change(model: nn.Module) -> None:
        bias = find_parameter(model, name)
        model.kept = [bias] if bias is not None else []

    plan.build.append(change)
    inner = plan.call

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        output = inner(model, x, rank, step)
        with readable(model) if not model.kept[0].requires_grad else contextlib.nullcontext():
            return output + 0.01 * sum(bias.float().sum() for bias in model.kept)

    plan.call = call


@mutation
def output_is_written_in_place(plan: Plan) -> None:
    plan.wrap(InPlace)


@mutation
def output_is_in_a_container(plan: Plan) -> None:
    plan.wrap(InDict)


@mutation
def output_is_a_view(plan: Plan) -> None:
    inner = plan.call
    plan.call = lambda *a: inner(*a).unsqueeze(0)[..., :2].squeeze(0)


# Hooks


@mutation
def tensor_hook_scales(plan: Plan) -> None:
    name = plan.parameter()

    def change(model: nn.Module) -> None:
        parameter = find_parameter(model, name)
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 2)

    plan.draw.choice((plan.build, plan.after)).append(change)


@mutation
def post_accumulate_hook_counts(plan: Plan) -> None:
    def change(model: nn.Module) -> None:
        model.seen = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: model.seen.append(p.grad))

    plan.draw.choice((plan.build, plan.after)).append(change)


@mutation
def forward_hook_changes_the_output(plan: Plan) -> None:
    name = plan.linear()
    plan.draw.choice((plan.build, plan.after)).append(
        lambda model: find_module(model, name).register_forward_hook(lambda m, a, out: out * 0.75)
    )


@mutation
def forward_pre_hook_changes_the_input(plan: Plan) -> None:
    name = plan.linear()
    plan.draw.choice((plan.build, plan.after)).append(
        lambda model: find_module(model, name).register_forward_pre_hook(lambda m, a: (a[0] + 0.5,))
    )


@mutation
def full_backward_hook_scales(plan: Plan) -> None:
    name = plan.linear()

    def hook(module, grad_input, grad_output):
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    plan.draw.choice((plan.build, plan.after)).append(
        lambda model: find_module(model, name).register_full_backward_hook(hook)
    )


@mutation
def root_has_backward_hooks(plan: Plan) -> None:
    def change(model: nn.Module) -> None:
        model.register_full_backward_pre_hook(lambda m, g: tuple(each * 2 for each in g))
        model.register_full_backward_hook(lambda m, gi, go: None)

    plan.draw.choice((plan.build, plan.after)).append(change)


@mutation
def saved_tensors_are_packed(plan: Plan) -> None:
    plan.around = lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda tensor: tensor
    )


@mutation
def saved_tensors_on_the_host(plan: Plan) -> None:
    plan.around = torch.autograd.graph.save_on_cpu


@mutation
def hooks_come_and_go(plan: Plan) -> None:
    name = plan.parameter()

    def toggle(model: nn.Module, step: int) -> None:
        if step == 1 and find_parameter(model, name).requires_grad:
            model.handle = find_parameter(model, name).register_hook(lambda g: g * 3)
        if step == 2 and hasattr(model, "handle"):
            model.handle.remove()

    plan.before_step.append(toggle)


@mutation
def intermediate_hook(plan: Plan) -> None:
    name = plan.linear()

    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))

    plan.build.append(lambda model: find_module(model, name).register_forward_hook(hook))


# Control flow


class _Skips(nn.Module):
    """Some (rank, step) leave the inner layer out."""

    def __init__(self, inner: nn.Linear, skipped: set[tuple[int, int]]):
        super().__init__()
        self.inner, self.skipped, self.now = inner, skipped, (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        if self.now in self.skipped:
            width = next(m.out_features for m in self.inner.modules() if hasattr(m, "out_features"))
            return x.new_zeros(*x.shape[:-1], width)
        return self.inner(x)


def _tell_where(plan: Plan) -> None:
    inner = plan.call

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, _Skips):
                module.now = (rank, step)
        return inner(model, x, rank, step)

    plan.call = call


@mutation
def ranks_skip_a_layer(plan: Plan) -> None:
    skipped = {(r, s) for r in range(4) for s in range(STEPS) if plan.draw.random() < 0.5}
    plan.wrap(lambda inner: _Skips(inner, skipped))
    _tell_where(plan)


@mutation
def steps_skip_a_layer(plan: Plan) -> None:
    steps = {s for s in range(STEPS) if plan.draw.random() < 0.5}
    skipped = {(r, s) for r in range(4) for s in steps}
    plan.wrap(lambda inner: _Skips(inner, skipped))
    _tell_where(plan)


@mutation
def one_rank_uses_no_parameter(plan: Plan) -> None:
    inner, which = plan.call, plan.draw.randrange(STEPS)

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        if rank == 1 and step == which:
            return x.clone().requires_grad_()
        return inner(model, x, rank, step)

    plan.call = call


@mutation
def loops_grow(plan: Plan) -> None:
    inner = plan.call

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        return sum(inner(model, x * (n + 1), rank, step) for n in range(step + 1))

    plan.call = call


@mutation
def micro_batches_differ(plan: Plan) -> None:
    counts = {(r, s): plan.draw.randint(1, 3) for r in range(4) for s in range(STEPS)}
    plan.counts = lambda rank, step: counts[rank, step]


@mutation
def a_rank_has_no_batch(plan: Plan) -> None:
    rank, step = plan.draw.randrange(2), plan.draw.randrange(STEPS)
    plan.counts = lambda r, s: 0 if (r, s) == (rank, step) else 1


@mutation
def micro_batches_are_added_up(plan: Plan) -> None:
    count = plan.draw.randint(2, 4)
    plan.counts = lambda rank, step: count


@mutation
def micro_batches_without_sync(plan: Plan) -> None:
    micro_batches_are_added_up(plan)
    plan.local = True


# Sizes


@mutation
def odd_sizes(plan: Plan) -> None:
    plan.wrap(OddSizes)


@mutation
def empty_batches(plan: Plan) -> None:
    plan.batch = 0
    plan.loss = lambda output: output.float().square().sum()


@mutation
def batch_of_thirteen(plan: Plan) -> None:
    plan.batch = 13


@mutation
def tiny_buckets(plan: Plan) -> None:
    plan.options["bucket_mb"] = plan.draw.choice((1e-6, 1e-4, 3e-4))


@mutation
def unused_parameters(plan: Plan) -> None:
    def change(model: nn.Module) -> None:
        model.spare = nn.Linear(3, 2)
        model.single = nn.Parameter(torch.ones(()))

    plan.build.append(change)


@mutation
def own_function(plan: Plan) -> None:
    plan.wrap(OwnFunction)


# Checkpointing


@mutation
def checkpointed(plan: Plan) -> None:
    plan.wrap(lambda inner: Checkpointed(inner, reentrant=False))


@mutation
def checkpointed_reentrantly(plan: Plan) -> None:
    plan.wrap(lambda inner: Checkpointed(inner, reentrant=True))


@mutation
def checkpoints_in_checkpoints(plan: Plan) -> None:
    reentrant = plan.draw.random() < 0.5
    plan.wrap(lambda inner: Checkpointed(inner, reentrant=reentrant, times=3))


@mutation
def model_is_checkpointed(plan: Plan) -> None:
    inner, reentrant = plan.call, plan.draw.random() < 0.5

    def call(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
        x = x.requires_grad_() if x.is_floating_point() else x
        return checkpoint(
            inner, model, x, rank, step, use_reentrant=reentrant, preserve_rng_state=False
        )

    plan.call = call


# Exceptions


@mutation
def a_forward_throws(plan: Plan) -> None:
    plan.failing.append((plan.draw.randrange(STEPS), None, "forward"))


@mutation
def a_backward_throws(plan: Plan) -> None:
    plan.failing.append((plan.draw.randrange(STEPS), None, "backward"))


@mutation
def a_backward_throws_in_a_layer(plan: Plan) -> None:
    plan.failing.append((plan.draw.randrange(STEPS), None, plan.linear()))


@mutation
def one_ranks_forward_throws(plan: Plan) -> None:
    plan.failing.append((plan.draw.randrange(STEPS), plan.draw.randrange(2), "forward"))


@mutation
def one_ranks_backward_throws(plan: Plan) -> None:
    plan.failing.append((plan.draw.randrange(STEPS), plan.draw.randrange(2), plan.linear()))


# How backward is called


def _forward(plan: Plan, model, x, rank, step) -> Tensor:
    with plan.around():
        return plan.call(model, x, rank, step)


def one_pass(plan: Plan, model, x, rank, step) -> Iterator[None]:
    plan.loss(_forward(plan, model, x, rank, step)).backward()
    yield


@mutation
def retained_graph(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        loss = plan.loss(_forward(plan, model, x, rank, step))
        loss.backward(retain_graph=True)
        yield
        (loss * 0.5).backward()
        yield

    plan.passes = passes


@mutation
def two_losses(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        output = _forward(plan, model, x, rank, step)
        plan.loss(output).backward(retain_graph=True)
        yield
        output.float().abs().sum().backward()
        yield

    plan.passes = passes


@mutation
def two_graphs_backwards_reversed(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        losses = [plan.loss(_forward(plan, model, x * n, rank, step)) for n in (1, 2)]
        for loss in reversed(losses):
            loss.backward()
            yield

    plan.passes = passes


@mutation
def two_losses_at_once(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        losses = [plan.loss(_forward(plan, model, x * n, rank, step)) for n in (1, 2)]
        torch.autograd.backward(losses)
        yield

    plan.passes = passes


@mutation
def output_gets_a_gradient(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        output = _forward(plan, model, x, rank, step)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype))
        yield

    plan.passes = passes


@mutation
def input_gradient_first(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        x = x.requires_grad_()
        loss = plan.loss(_forward(plan, model, x, rank, step))
        torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
        loss.backward()
        yield

    plan.passes = passes


@mutation
def gradient_penalty(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        x = x.requires_grad_()
        loss = plan.loss(_forward(plan, model, x, rank, step))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        penalty = 0 if gradient is None else gradient.float().square().sum()
        (loss + penalty).backward()
        yield

    plan.passes = passes


@mutation
def gradients_of_some_inputs(plan: Plan) -> None:
    def passes(plan, model, x, rank, step):
        loss = plan.loss(_forward(plan, model, x, rank, step))
        some = [p for n, p in enumerate(model.parameters()) if p.requires_grad and n % 2 == 0]
        if some:
            loss.backward(inputs=some)
        yield

    plan.passes = passes


@mutation
def backward_in_a_hook(plan: Plan) -> None:
    """The hook of a leaf runs the model's own backward, as cached losses do."""

    def passes(plan, model, x, rank, step):
        outer = torch.ones((), requires_grad=True)

        def hook(gradient):
            with torch.enable_grad():
                (plan.loss(_forward(plan, model, x, rank, step)) * gradient).backward()

        outer.register_hook(hook)
        outer.backward()
        yield

    plan.passes = passes


# Gradients, values, states


@mutation
def gradients_are_halved(plan: Plan) -> None:
    def edit(parameters: list[Tensor], step: int) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    plan.edits.append(edit)


@mutation
def gradients_are_clipped(plan: Plan) -> None:
    plan.edits.append(
        lambda parameters, step: nn.utils.clip_grad_norm_(parameters, 0.05) is None or None
    )


@mutation
def gradients_are_clipped_by_value(plan: Plan) -> None:
    plan.edits.append(lambda parameters, step: nn.utils.clip_grad_value_(parameters, 0.01))


@mutation
def one_gradient_is_dropped(plan: Plan) -> None:
    which = plan.draw.randrange(5)

    def edit(parameters: list[Tensor], step: int) -> None:
        parameters[which % len(parameters)].grad = None

    plan.edits.append(edit)


@mutation
def zeroed_to_zero(plan: Plan) -> None:
    plan.to_zero = True


@mutation
def a_step_is_not_zeroed(plan: Plan) -> None:
    when = plan.draw.randrange(STEPS - 1)
    plan.zeroes = lambda step: step != when


@mutation
def values_are_scaled(plan: Plan) -> None:
    name = plan.parameter()

    def write(model: nn.Module, step: int) -> None:
        find_parameter(model, name).mul_(0.75)

    plan.writes.append(write)


@mutation
def values_are_written_to_data(plan: Plan) -> None:
    name, when = plan.parameter(), plan.draw.randrange(STEPS)

    def write(model: nn.Module, step: int) -> None:
        if step == when:
            find_parameter(model, name).data.fill_(0.125)

    plan.writes.append(write)


@mutation
def layer_is_made_anew(plan: Plan) -> None:
    name = plan.linear()

    def write(model: nn.Module, step: int) -> None:
        if step == 1:
            for parameter in find_module(model, name).parameters():
                nn.init.constant_(parameter, 0.0625)

    plan.writes.append(write)


@mutation
def rates_change(plan: Plan) -> None:
    def tune(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    plan.tune.append(tune)


@mutation
def adam(plan: Plan) -> None:
    plan.adam = True


@mutation
def requires_grad_is_switched_after_the_forward(plan: Plan) -> None:
    """Autograd has seen the parameter by then."""
    name = plan.parameter()

    def passes(plan, model, x, rank, step):
        loss = plan.loss(_forward(plan, model, x, rank, step))
        parameter = find_parameter(model, name)
        was = parameter.requires_grad
        parameter.requires_grad_(False)
        loss.backward()
        parameter.requires_grad_(was)
        yield

    plan.passes = passes


@mutation
def weight_norm(plan: Plan) -> None:
    plan.wrap(nn.utils.parametrizations.weight_norm)


@mutation
def spectral_norm(plan: Plan) -> None:
    plan.wrap(nn.utils.parametrizations.spectral_norm)


@mutation
def model_is_a_copy(plan: Plan) -> None:
    """Of one that has run."""

    def change(model: nn.Module) -> None:
        dtype = next(model.parameters()).dtype
        if any(p.requires_grad for p in model.parameters()):
            copied = copy.deepcopy(model)
            copied(torch.ones(2, WIDTH, dtype=dtype)).float().sum().backward()

    plan.build.append(change)


def draw_plan(seed: int) -> Plan:
    """Models take turns, then mutations, and up to two more are drawn."""
    draw = random.Random(seed)
    base = MODELS[seed % len(MODELS)]
    torch.manual_seed(seed)
    plan = Plan(seed, draw, base, base())
    names = sorted(MUTATIONS)
    chosen = [names[(seed // len(MODELS)) % len(names)]]
    chosen += draw.sample(names, draw.choice((0, 0, 1, 1, 2)))
    for name in dict.fromkeys(chosen):
        plan.names.append(name)
        MUTATIONS[name](plan)
    return plan
