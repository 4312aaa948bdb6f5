"""Runs the programs of mutations.py on several ranks with the library, and in one process with
plain PyTorch: a replica for each rank, whose gradients are added in fp32 in the order (backward,
rank).
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import Random
from mutated_models import WIDTH
from mutations import STEPS, Plan, PlannedError, draw_plan, find_module, one_pass
from setups import full_gradients, readable, values_of
from torch import Tensor, nn

import zero_ext

LR = 0.1
HALF = (torch.bfloat16, torch.float16)


def batch_of(plan: Plan, rank: int, step: int, micro: int) -> Tensor:
    number = 1 + rank + 1009 * (micro + 1009 * (step + 7 * plan.seed))
    return Random(number).normal((plan.batch, WIDTH))


def fail(plan: Plan, model: nn.Module, rank: int, step: int) -> None:
    """Passes of one more micro-batch, which throw."""
    for when, whose, where in plan.failing:
        if when == step and whose in (None, rank):
            with contextlib.suppress(PlannedError), failing(model, where):
                x = batch_of(plan, rank, step, 99)
                for _ in (plan.passes or one_pass)(plan, model, x, rank, step):
                    pass


@contextlib.contextmanager
def failing(model: nn.Module, where: str) -> Iterator[None]:
    """The model throws: in its forward, or in a backward when it comes to its output (``where`` is
    "backward") or to that of a layer."""
    called: list[nn.Module] = []

    def throw(*_):
        raise PlannedError

    def on_output(module, args, output):
        outputs = output if isinstance(output, tuple) else (output,)
        outputs = [each for each in outputs if torch.is_tensor(each) and each.requires_grad]
        called.extend(module for _ in outputs)
        for each in outputs:
            each.register_hook(throw)

    hooks = []
    if where != "forward":
        module = model if where == "backward" else find_module(model, where)
        hooks.append(module.register_forward_hook(on_output))
    # Also where the layer did not run, and where no backward comes to its output.
    hooks.append(model.register_forward_hook(lambda *_: None if called else throw()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backwards(plan: Plan, model: nn.Module, rank: int, step: int) -> Iterator[None]:
    """A rank's backwards of one step; a yield after each."""
    fail(plan, model, rank, step)
    sharded = hasattr(model, "no_sync")
    if not sharded:  # plain PyTorch undoes no backward
        model.zero_grad()
    count = plan.counts(rank, step)
    for micro in range(count):
        x = batch_of(plan, rank, step, micro)
        local = sharded and plan.local and micro + 1 < count
        with model.no_sync() if local else contextlib.nullcontext():
            yield from until_it_succeeds(plan, model, x, rank, step)


def until_it_succeeds(plan: Plan, model: nn.Module, x: Tensor, rank: int, step: int):
    """Another rank that runs the same backward may have thrown."""
    for _ in range(20):
        try:
            yield from (plan.passes or one_pass)(plan, model, x.clone(), rank, step)
            return
        except RuntimeError as error:
            if "it went on without this" not in str(error):
                raise
    raise AssertionError("the backward never succeeds")


@dataclass
class Outcome:
    """What one rank has seen, or the reference in its name."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # of each step
    values: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""  # of the exception that ended the program


def optimizer_of(plan: Plan, library: Any, parameters) -> torch.optim.Optimizer:
    if plan.adam:
        return library.AdamW(parameters, lr=LR, eps=1e-3, weight_decay=0.01)
    return library.SGD(parameters, lr=LR, momentum=0.5)


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run_sharded(plan: Plan, stage: int) -> Outcome:
    """On this rank, with the library."""
    outcome = Outcome()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_sharded(plan, stage, outcome)
    except Exception as error:
        outcome.error = str(error) or repr(error)
    return outcome


def train_sharded(plan: Plan, stage: int, outcome: Outcome) -> None:
    model = zero_ext.shard(plan.make(), stage, **plan.options)
    for change in plan.after:
        change(model)
    optimizer = optimizer_of(plan, zero_ext.optim, model.parameters())
    for step in range(STEPS):
        for change in plan.before_step:
            change(model, step)
        for _ in backwards(plan, model, dist.get_rank(), step):
            pass
        for edit in plan.edits:
            edit(list(model.parameters()), step)
        optimizer.step()
        outcome.gradients.append(full_gradients(model))
        if plan.zeroes(step):
            optimizer.zero_grad(set_to_none=not plan.to_zero)
        if plan.writes:
            with torch.no_grad(), readable(model):
                for write in plan.writes:
                    write(model, step)
        for tune in plan.tune:
            tune(optimizer, step)
        outcome.values.append(values_of(model))
    outcome.buffers = copied_buffers(model)


class Reference:
    """A plain replica for each rank, and one set of fp32 masters."""

    def __init__(self, plan: Plan, world: int):
        self.plan, self.world = plan, world
        self.models = [plan.make() for _ in range(world)]
        for model in self.models:
            for change in plan.after:
                change(model)
        self.masters = {
            name: (p.detach().float() if p.is_floating_point() else p.detach()).clone()
            for name, p in self.models[0].named_parameters()
        }
        self.optimizer = optimizer_of(plan, torch.optim, list(self.masters.values()))

    def backwards(self, step: int) -> None:
        running = {r: backwards(self.plan, m, r, step) for r, m in enumerate(self.models)}
        while running:
            for rank, each in list(running.items()):
                if next(each, "the end") == "the end":
                    del running[rank]
                else:
                    self._add_gradients(self.models[rank])

    def _add_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            master = self.masters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad += parameter.grad.float() / self.world
            parameter.grad = None

    def step(self, step: int) -> dict[str, Tensor | None]:
        """Returns the gradients that the step was made with."""
        for edit in self.plan.edits:
            edit(list(self.masters.values()), step)
        self.optimizer.step()
        with torch.no_grad():
            for model in self.models:
                for name, parameter in model.named_parameters():
                    if self.masters[name].grad is not None:
                        parameter.copy_(self.masters[name])
        masters = self.masters.items()
        gradients = {n: None if m.grad is None else m.grad.clone() for n, m in masters}
        if self.plan.zeroes(step):
            self.optimizer.zero_grad(set_to_none=not self.plan.to_zero)
        return gradients

    def write(self, step: int) -> None:
        """A written parameter wins over its master."""
        with torch.no_grad():
            before = {name: p.clone() for name, p in self.models[0].named_parameters()}
            for model in self.models:
                for write in self.plan.writes:
                    write(model, step)
            for name, parameter in self.models[0].named_parameters():
                if not torch.equal(before[name], parameter):
                    self.masters[name].copy_(parameter)


def run_reference(plan: Plan, world: int) -> list[Outcome]:
    """Of every rank."""
    outcomes = [Outcome() for _ in range(world)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_plain(Reference(plan, world), outcomes)
    except Exception as error:
        for outcome in outcomes:
            outcome.error = str(error) or repr(error)
    return outcomes


def train_plain(reference: Reference, outcomes: list[Outcome]) -> None:
    plan = reference.plan
    for step in range(STEPS):
        for model in reference.models:
            for change in plan.before_step:
                change(model, step)
        reference.backwards(step)
        gradients = reference.step(step)
        reference.write(step)
        for tune in plan.tune:
            tune(reference.optimizer, step)
        values = {n: p.detach().clone() for n, p in reference.models[0].named_parameters()}
        for outcome in outcomes:
            outcome.gradients.append(gradients)
            outcome.values.append(values)
    for outcome, model in zip(outcomes, reference.models, strict=True):
        outcome.buffers = copied_buffers(model)


# Verdicts


class Verdict(NamedTuple):
    """``kind``: "same"; "both raise": plain PyTorch raises as well; "named error": zero_ext's own
    on every rank. Anything else is a fault: "silent", "other error", "uneven". ``text``: where."""

    kind: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("same", "both raise", "named error")


def judge(plan: Plan, actual: list[Outcome], expected: list[Outcome]) -> Verdict:
    errors = [each.error for each in actual]
    if expected[0].error:
        kind = "both raise" if all(errors) else "silent"
        return Verdict(kind, f"plain PyTorch raises: {expected[0].error[:120]}")
    if any(errors):
        if not all(errors):
            return Verdict("uneven", " | ".join(each[:200] or "no error" for each in errors))
        named = all(each.startswith("zero_ext") for each in errors)
        return Verdict("named error" if named else "other error", " | ".join(errors))
    for rank, (mine, one) in enumerate(zip(actual, expected, strict=True)):
        if text := difference(mine, one, is_exact(plan, len(actual)), tolerance_of(plan, one)):
            return Verdict("silent", f"rank {rank}, {text}")
    return Verdict("same")


def is_exact(plan: Plan, world: int) -> bool:
    """Whether the gradients of the first step have the bits of the reference."""
    inexact = {"autocast", "gradients_are_clipped"} & set(plan.names)  # which round elsewhere
    # The uses of a shared parameter are added up in fp32, which plain PyTorch does not do.
    shared = plan.base.__name__ == "Tokens" or "two_weights_are_one" in plan.names
    power_of_two = world & (world - 1) == 0  # else the average is rounded elsewhere
    in_half = shared and "everything_in_bf16" in plan.names
    return power_of_two and not (plan.local or inexact or in_half)


def tolerance_of(plan: Plan, expected: Outcome) -> dict[str, float]:
    """Of gradients: by the coarsest dtype that the model computes in."""
    dtypes = {value.dtype for value in expected.values[0].values()}
    return tolerance(torch.bfloat16 if "autocast" in plan.names or dtypes & set(HALF) else None)


def tolerance(dtype: torch.dtype | None) -> dict[str, float]:
    """Updates round once here, and several times in torch; half precision may take the other
    neighbour then."""
    return {"rtol": 5e-2, "atol": 2e-2} if dtype in HALF else {"rtol": 2e-4, "atol": 2e-5}


def difference(actual: Outcome, expected: Outcome, exact: bool, of_gradients: dict) -> str:
    """In what they differ, or nothing."""
    for step, (mine, one) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        for name, gradient in one.items():
            where = f"step {step}: gradient of {name}"
            if (mine[name] is None) != (gradient is None):
                return f"{where} is {'not ' * (gradient is None)}None"
            if gradient is None:
                continue
            # Later values are rounded elsewhere.
            if exact and step == 0 and not torch.equal(mine[name], gradient):
                return f"{where}: bits"
            if text := distance(mine[name], gradient, of_gradients):
                return f"{where}: {text}"
    for step, (mine, one) in enumerate(zip(actual.values, expected.values, strict=True)):
        for name, value in one.items():
            if mine[name].dtype != value.dtype:
                return f"step {step}: {name} is {mine[name].dtype}, not {value.dtype}"
            if text := distance(mine[name], value, tolerance(value.dtype)):
                return f"step {step}: value of {name}: {text}"
    for name, value in expected.buffers.items():
        if text := distance(actual.buffers[name], value, tolerance(torch.bfloat16)):
            return f"buffer {name}: {text}"
    return ""


def distance(actual: Tensor, expected: Tensor, tolerance: dict[str, float]) -> str:
    try:
        torch.testing.assert_close(actual, expected, **tolerance, equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:160]
    return ""


def run_all(seeds, stage: int) -> dict[int, Verdict]:
    """Of each seed the verdict. Collective; the first rank judges."""
    verdicts = {}
    for seed in seeds:
        mine = run_sharded(draw_plan(seed), stage)
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, mine)
        if dist.get_rank() == 0:
            expected = run_reference(draw_plan(seed), len(outcomes))
            verdicts[seed] = judge(draw_plan(seed), outcomes, expected)
    return verdicts
