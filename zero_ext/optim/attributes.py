"""What an optimizer keeps beside groups and state: attributes, carried from object to object."""

import contextlib
import copy
import functools
import types
from typing import Any

import torch
from torch import Tensor

TORCHS = vars(torch.optim.SGD([torch.zeros(1)])).keys()
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, type)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those that its class or its user has set, not torch's own.

    Schedules put a ``step`` there that counts and calls the class's: it is left out.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in TORCHS and not hasattr(value, "_wrapped_by_lr_sched")
    }


def check_attributes(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: an attribute belongs to the whole parameters, or to this very object.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids, shapes = {id(p) for p in parameters}, {p.shape for p in parameters}
    for name, value in attributes_of(optimizer).items():
        found = _first_tied(value, optimizer, ids, shapes, {id(optimizer)})
        if found is not None:
            raise ValueError(
                f"zero_ext: attribute '{name}' of the {type(optimizer).__name__} {found}, which "
                "cannot be carried over to the shards. Make the optimizer without it."
            )


def carry(attributes: dict[str, Any], to: torch.optim.Optimizer, given: Any = None) -> None:
    """Give ``to`` copies of ``attributes``. Methods bound to ``given`` are bound to ``to``.

    What cannot be copied, such as a module or a lock, is shared.
    """
    memo = {id(given): to}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # whatever an object's own copying raises
            value = copy.deepcopy(value, memo)
        vars(to)[name] = value


def _first_tied(
    value: Any, optimizer: Any, ids: set[int], shapes: set[torch.Size], seen: set[int]
) -> str | None:
    """In words, what ties ``value`` to the parameters or to ``optimizer``, or None."""
    if isinstance(value, Tensor):
        if id(value) in ids:
            return f"refers to a parameter of shape {tuple(value.shape)}"
        if value.numel() > 1 and value.shape in shapes:
            return f"holds a tensor of a parameter's shape {tuple(value.shape)}"
        return None
    if id(value) in seen or isinstance(value, (*_PLAIN, types.ModuleType)):
        return None
    seen.add(id(value))
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif isinstance(value, types.FunctionType):
        parts = [cell.cell_contents for cell in value.__closure__ or ()]
        if any(part is optimizer for part in parts):
            return "is a function that refers to the optimizer itself"
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        found = _first_tied(part, optimizer, ids, shapes, seen)
        if found is not None:
            return found
    return None
