"""Optimizers that become sharded: new ones of a class (``wrap``), and given ones (``adopt``).

Note [Adopting]
An optimizer that is adopted stays the same object: its class becomes a subclass that shards. So its
groups, hooks and attributes, and what refers to them, are simply still there. A schedule that was
made on it has put a ``step`` there which counts, and calls the step of the former class. It is made
anew for the new class. The states that a constructor has made are cut.
"""

import contextlib
import copy
import functools
import gc
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext.engine.checks import check_positive
from zero_ext.optim import fused
from zero_ext.optim.arguments import Sharding, check_differentiable
from zero_ext.optim.groups import attributes_of, named_in, parameters_of
from zero_ext.optim.lending import OwnCode
from zero_ext.optim.muon import Muon
from zero_ext.optim.own_update import sharded_class
from zero_ext.optim.owners import OWNER_MB
from zero_ext.optim.sharded import Sharded

_FUSED = {
    torch.optim.AdamW: fused.AdamW,
    torch.optim.Adam: fused.Adam,
    torch.optim.SGD: fused.SGD,
    torch.optim.Muon: Muon,
}


def wrap(optimizer_class: type[torch.optim.Optimizer], params, **kwargs: Any) -> Sharded:
    """Shard the state of any optimizer that updates each parameter by itself.

    The result is an ``optimizer_class``, with its own attributes and methods. An elementwise one
    runs on 1-D fp32 shards of the parameters. For another one (Muon, Adafactor, LAMB, …) each
    parameter has an owner, a rank on which it is updated whole, in fp32.

    Args:
        optimizer_class: Called as ``optimizer_class(params, **kwargs)``.
        kwargs: Arguments of ``optimizer_class``, and the keyword arguments of ``Sharded``.
            ``max_grad_norm`` scales ``p.grad`` itself, before the update. ``owner_mb``: MiB of
            masters and gradients that an owner has whole at a time.
    Raises:
        TypeError: an update or a state depends on other parameters or on random numbers, found by
            trying, not by name.
    """
    if not callable(optimizer_class):
        raise TypeError(
            "zero_ext: wrap() takes an optimizer's class, such as torch.optim.RMSprop, and not "
            f"a {type(optimizer_class).__name__}."
        )
    if not isinstance(optimizer_class, type):
        names = {"owner_mb", *Sharding._fields} & kwargs.keys()
        sharding = {name: kwargs.pop(name) for name in names}
        return adopt(optimizer_class(params, **kwargs), **sharding)
    if issubclass(optimizer_class, Sharded):
        raise TypeError(
            f"zero_ext: {optimizer_class.__name__} shards its state already. Use it unwrapped."
        )
    return sharded_class(optimizer_class)(params, **kwargs)


def adopt(optimizer: torch.optim.Optimizer, **sharding: Any) -> Sharded:
    """Shard the state of an optimizer that was made before its parameters were sharded.

    The same object goes on, with its groups, hooks, attributes and the schedules made on it. Its
    class becomes a subclass of what it was, until ``retire()`` gives it back. ``AdamW``, ``Adam``,
    ``SGD`` and ``Muon`` of torch become those of ``zero_ext.optim``; others are run as by ``wrap``.

    Args:
        optimizer: Of any class that ``wrap`` takes. It has not stepped yet.
        sharding: The keyword arguments of ``Sharded``, and ``owner_mb`` of ``wrap``.
    Returns:
        ``optimizer``.
    Raises:
        ValueError, TypeError: it cannot be adopted: it has stepped, or refers to parameters outside
            of its groups, or its update depends on other parameters. It is unchanged then.
    """
    code, owner_mb = check(optimizer), sharding.pop("owner_mb", OWNER_MB)
    check_positive("owner_mb", owner_mb)
    taken = Sharding.taken_from(sharding)
    if sharding:
        raise TypeError(f"adopt() got an unexpected keyword argument '{next(iter(sharding))}'")
    kind, before = type(optimizer), {**vars(optimizer)}
    step = vars(optimizer).pop("step", None)
    target = _FUSED[kind] if code is None else sharded_class(kind)
    try:
        optimizer.__class__ = target
        torch.optim.Optimizer._patch_step_function(optimizer)
        if code is None:
            optimizer.shard_fused(taken)
        else:
            optimizer.shard_update(code, owner_mb, taken)
    except BaseException:
        optimizer.__class__ = kind
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise
    optimizer.zero_core.before_adoption = kind, step
    if hasattr(step, "_wrapped_by_lr_sched"):
        count_steps(optimizer)
    return optimizer


def check(optimizer: Any) -> OwnCode | None:
    """The code that updates its parameters if it is adopted. None: that in C++ does the same.

    Raises:
        ValueError, TypeError: it cannot be adopted.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"zero_ext: optimizer is {optimizer!r}, not an optimizer.")
    foreign = type(optimizer).__module__.startswith("deepspeed")
    if isinstance(optimizer, Sharded) or foreign:
        raise ValueError(
            "zero_ext: only one of torch's optimizers can be adopted. Pass torch.optim's in place "
            f"of this {name}."
        )
    for group in optimizer.param_groups:
        check_differentiable(group.get("differentiable", False))
    code, own_step = None, _own_step(optimizer)
    if own_step is not None or not _has_fused(optimizer):
        code = OwnCode(_like(optimizer, own_step), {}, own_step or type(optimizer).step)
        code.try_all(optimizer.param_groups)
        check_attributes(optimizer)
    # Some make their state when constructed, with a count of 0.
    states = [optimizer.state.get(p) for p in parameters_of(optimizer.param_groups)]
    if any(float(state.get("step", 1)) > 0 for state in states if state):
        raise ValueError(
            f"zero_ext: the {name} has a state already. Pass one that has not stepped, and load "
            "its state_dict() afterwards."
        )
    return code


def _has_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update in C++ does the same. An object may have methods of its own."""
    kind = type(optimizer)
    return kind in _FUSED and not any(hasattr(kind, name) for name in attributes_of(optimizer))


def _own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The function that a user has assigned to ``step``: called with the optimizer."""
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched"):  # which counts, and calls what was there before
        own = step.__wrapped__
        return None if own is type(optimizer).step else own
    if isinstance(step, types.MethodType) and step.__self__ is optimizer:
        return step.__func__  # without a reference to the optimizer
    return None if step is None else lambda _, *args, **keywords: step(*args, **keywords)


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer count its steps. Schedules of torch warn where it has not stepped."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        stepped = reference()
        stepped._opt_called = True
        return type(stepped).step(stepped, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


def _like(
    given: torch.optim.Optimizer, step: Callable[..., Any] | None
) -> Callable[..., torch.optim.Optimizer]:
    """Makes optimizers that update as ``given`` does: of its class, defaults and attributes.

    Its constructor is not called, except where it has made states: then it is asked for those of
    the new parameters. What cannot be copied of an attribute, such as a module, is shared.
    """
    kind, defaults, reference = type(given), given.defaults, weakref.ref(given)
    makes_states = any(state for key, state in given.state.items() if isinstance(key, Tensor))
    named, known = named_in(given.state), inspect.signature(kind).parameters
    arguments = {key: value for key, value in defaults.items() if key in known}

    @functools.wraps(kind, updated=())
    def made(groups: list[Any]) -> torch.optim.Optimizer:
        optimizer = kind.__new__(kind)
        init = inspect.unwrap(torch.optim.Optimizer.__init__)  # entries follow what a user makes
        init(optimizer, groups, {**defaults})
        memo = {id(reference()): optimizer}  # to which methods are bound then
        for name, value in attributes_of(reference()).items():
            with contextlib.suppress(Exception):  # whatever an object's own copying raises
                value = copy.deepcopy(value, memo)
            vars(optimizer)[name] = value
        if step is not None:
            optimizer.step = types.MethodType(step, optimizer)
        if makes_states:
            own = [{**group} for group in optimizer.param_groups]
            optimizer.state = kind(own, **arguments).state
        optimizer.state.update(copy.deepcopy(named))
        return optimizer

    return made


def check_attributes(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: an attribute belongs to the whole parameters, which no step has.
    """
    parameters = parameters_of(optimizer.param_groups)
    ids, shapes = set(map(id, parameters)), {p.shape for p in parameters}
    for name, value in attributes_of(optimizer).items():
        left, seen = [value], {id(optimizer)}
        while left:
            each = left.pop()
            if isinstance(each, Tensor) and (
                id(each) in ids or (each.numel() > 1 and each.shape in shapes)
            ):
                how = "refers to a parameter" if id(each) in ids else "has a tensor"
                raise ValueError(
                    f"zero_ext: attribute '{name}' of the {type(optimizer).__name__} {how} of "
                    f"shape {tuple(each.shape)}, which no step has where parameters are sharded. "
                    "Make the optimizer without it."
                )
            if id(each) not in seen:
                seen.add(id(each))
                left += _parts_of(each)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, type | types.ModuleType | Tensor):
        return []
    if isinstance(value, types.FunctionType):  # without its module's names
        return [*(value.__closure__ or ())]
    return gc.get_referents(value)


# For entries that shard a model and its optimizers in one call


def names_of(*models: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """The model and the name of each parameter, by id."""
    return {id(p): (model, name) for model in models for name, p in model.named_parameters()}


def follow_models(given: torch.optim.Optimizer, names: dict[int, tuple[nn.Module, str]]) -> None:
    """Give ``given`` the parameters that now have these names.

    A model that was on the meta device has new ones.
    """
    for group in given.param_groups:
        places = [names.get(id(p)) for p in group["params"]]
        group["params"] = [
            place[0].get_parameter(place[1]) if place else p
            for p, place in zip(group["params"], places, strict=True)
        ]
