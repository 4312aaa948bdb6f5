"""``deepspeed.utils``: accessors of whole values, leaf modules, the logger.

The accessors are those of zero_ext/state/values.py, which check their arguments. All of them are
collective, but for those that get a local part.
"""

import functools
from collections.abc import Callable, Iterable
from logging import INFO, getLogger
from operator import eq
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_ext.deepspeed import names
from zero_ext.engine.registry import find
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.values import (
    entry_of,
    full_grad,
    full_state,
    full_tensor,
    set_full_grad,
    set_full_param,
    set_full_state,
    state_of,
)
from zero_ext.tensor.shard_tensor import ShardTensor

__getattr__ = functools.partial(names.child, __name__)
logger = getLogger("zero_ext")
_MARK = "_zero_ext_leaf"  # an attribute of leaf modules


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = INFO) -> None:
    """Log ``message`` on these ranks; -1 means all. A single process logs everything."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if rank == -1 or {rank, -1} & set(ranks or ()):
        logger.log(level, "[Rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """``zero_ext.full_tensor``."""
    return full_tensor(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """``zero_ext.set_full_param``: the value of rank 0."""
    set_full_param(param, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """``zero_ext.full_grad``."""
    return full_grad(param)


def safe_set_full_grad(param: nn.Parameter, value: Tensor | None) -> None:
    """``zero_ext.set_full_grad``: the value of rank 0."""
    set_full_grad(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient that is there by ``update_func`` of it and the parameter."""
    for param in param_list:
        gradient = full_grad(param)
        if gradient is not None:
            set_full_grad(param, update_func(gradient, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor:
    """``zero_ext.full_state`` of the optimizer that steps ``param``."""
    return full_state(_optimizer_of(param), param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """``zero_ext.set_full_state``: the value of rank 0."""
    set_full_state(_optimizer_of(param), param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's part of the fp32 master, 1-D and a copy. It may be empty."""
    handle, i = entry_of(param)
    return handle.engine.current_master(i).detach().clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Every rank gives its part of the master, and so of the parameter, new values."""
    set_full_param(param, _of_parts(param, value))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, 1-D, fp32 and a copy."""
    entry_of(param)
    return None if param.grad is None else _part_of(param.grad)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Every rank gives its part of the reduced gradient new values."""
    set_full_grad(param, _of_parts(param, value))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor:
    """This rank's part of a value of the optimizer's state, 1-D, fp32 and a copy."""
    return _part_of(torch.as_tensor(state_of(_optimizer_of(param), param, optim_state_key)))


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str
) -> None:
    """Every rank gives its part of a value of the optimizer's state new contents."""
    optimizer = _optimizer_of(param)
    set_full_state(optimizer, param, optim_state_key, _of_parts(param, value))


def _part_of(value: Tensor) -> Tensor:
    local = value.to_local() if isinstance(value, ShardTensor) else value
    return local.detach().flatten().to(torch.float32, copy=True)


def _of_parts(param: nn.Parameter, value: Tensor) -> Tensor:
    """All ranks' 1-D parts as one sharded value."""
    handle, i = entry_of(param)
    with all_or_none(handle.groups, "safe_set_local_*()"):
        own = handle.engine.current_master(i)
        if not isinstance(value, Tensor) or value.numel() != own.numel():
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{handle.groups.where}this rank has {own.numel()} elements of parameter "
                f"'{handle.engine.parameter_name(i)}', and the value is {found}. Change what "
                "safe_get_local_*() returns."
            )
    return handle.as_parameter(value.detach().flatten().to(own), i, param)


def _optimizer_of(param: nn.Parameter) -> Sharded:
    entry = find(param)
    for optimizer in () if entry is None else entry.handle.optimizers:
        if any(param is other for group in optimizer.param_groups for other in group["params"]):
            return optimizer
    raise ValueError(
        f"zero_ext: no optimizer steps the parameter of shape {tuple(param.shape)}. Pass one that "
        "an optimizer has, after initialize()."
    )


# Leaf modules, whose parameters DeepSpeed gathers at once. Nothing needs that here: ranks may enter
# different parts of a module, in any order. So these find modules and remember the mark.


def z3_leaf_module(model: nn.Module) -> bool:
    return getattr(model, _MARK, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    setattr(model, _MARK, bool(flag))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and of their subclasses, or of classes with these names.

    Returns:
        The modules that were found.
    Raises:
        ValueError: there is none.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark from the modules that ``set_z3_leaf_modules`` would find."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in ``named_modules()``.

    Returns:
        The modules that were found, and the names that were not.
    Raises:
        ValueError: a name was not found.
    """
    return _set(model.named_modules(), module_names, flag, raise_if_not_found, "named", eq)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """As ``set_z3_leaf_modules_by_name``, for the ends of names."""
    suffixes, described = module_name_suffixes, "whose name ends with"
    return _set(model.named_modules(), suffixes, flag, raise_if_not_found, described, str.endswith)


def _set_by_class(
    model: nn.Module, classes: Iterable[type | str], flag: bool, raises: bool
) -> list[nn.Module]:
    classes = list(classes)
    for each in classes:
        if not isinstance(each, (type, str)):
            raise TypeError(f"zero_ext: leaf modules: {each!r} is no class and no name of one.")
    modules = ((module, module) for module in model.modules())
    return _set(modules, classes, flag, raises, "of", _is_of, needs_all=False)[0]


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _set(
    modules: Iterable[tuple[Any, nn.Module]],
    wanted: Iterable[Any],
    flag: bool,
    raises: bool,
    described: str,
    fits: Callable[[Any, Any], bool],
    needs_all: bool = True,
) -> tuple[list[nn.Module], list[Any]]:
    """The modules whose key fits one of ``wanted``, and those of ``wanted`` that no key fits."""
    modules, wanted = list(modules), list(wanted)
    found = {id(m): m for each in wanted for key, m in modules if fits(key, each)}
    missing = [each for each in wanted if not any(fits(key, each) for key, _ in modules)]
    if raises and missing and (needs_all or not found):
        names = [getattr(each, "__name__", each) for each in missing]
        raise ValueError(f"zero_ext: the model has no module {described} {', '.join(names)}.")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
