"""Torch's optimizers of noted parameters: they shard their state at their first step.

FSDP2's scripts make a stock optimizer after ``fully_shard``. When one is made of noted parameters,
these are sharded, and its class becomes ``Waiting`` beside its own. Its first use adopts it, see
Note [Adopting] in optim/adoption.py: inside its constructor more of it may still be to come.
"""

import functools
from typing import Any

import torch

from zero_ext.engine.registry import find_all
from zero_ext.fsdp.first_use import shard_noted
from zero_ext.fsdp.notes import any_of_fsdp, roots_with, waiting
from zero_ext.optim.adoption import adopt, count_steps
from zero_ext.optim.groups import named_parameters, parameters_of
from zero_ext.optim.sharded import Sharded


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Called for each optimizer that is made, at the end of torch's own constructor. Collective if
    its parameters are noted.

    Raises:
        ValueError: others train beside the noted ones, or they cannot be sharded.
    """
    parameters = parameters_of(optimizer.param_groups)
    roots = roots_with(parameters) if waiting() else []
    if roots:
        shard_noted(roots)
    if isinstance(optimizer, Sharded) or not any_of_fsdp(parameters):
        return
    _check_all_sharded(optimizer)
    optimizer.__class__ = _waiting_class(type(optimizer))


def _check_all_sharded(optimizer: torch.optim.Optimizer) -> None:
    named, _ = named_parameters(optimizer.param_groups)
    for (name, parameter), entry in zip(named, find_all([p for _, p in named]), strict=True):
        if entry is None and parameter.requires_grad:
            raise ValueError(
                f"zero_ext: {type(optimizer).__name__} steps '{name}' of shape "
                f"{tuple(parameter.shape)}, which no call of fully_shard() has taken: nothing "
                "averages its gradient. Give such parameters an optimizer of their own, or call "
                "fully_shard() for the module around."
            )


class Waiting(torch.optim.Optimizer):
    """An optimizer that is adopted when it is used."""

    zero_given_class: type[torch.optim.Optimizer]
    # A GradScaler asks before a step. See Sharded.
    _step_supports_amp_scaling = property(
        lambda _: False,
        lambda self, value: vars(self).update(_step_supports_amp_scaling=value),
    )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return adopted(self).step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return adopted(self).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        adopted(self).load_state_dict(state_dict)


@functools.cache
def _waiting_class(kind: type[torch.optim.Optimizer]) -> type[Waiting]:
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    attributes["zero_given_class"] = kind
    return type(kind.__name__, (Waiting, kind), attributes)


def adopted(optimizer: Waiting) -> Sharded:
    """Adopt ``optimizer``, and return it. Collective."""
    if torch._C._current_graph_task_id() >= 0:
        raise RuntimeError(
            f"zero_ext: a step of {type(optimizer).__name__} inside a backward: gradients are "
            "reduced when it ends. Call step() after loss.backward() has returned."
        )
    waits, step = type(optimizer), vars(optimizer).get("step")
    counts = getattr(step, "_wrapped_by_lr_sched", False) and step.__wrapped__ is Waiting.step
    optimizer.__class__ = waits.zero_given_class
    if counts:
        del optimizer.step
    try:
        adopt(optimizer)
    except BaseException:
        optimizer.__class__ = waits
        if counts:
            optimizer.step = step
        raise
    if counts:
        count_steps(optimizer)
    return optimizer
