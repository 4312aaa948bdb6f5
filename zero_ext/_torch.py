"""All Python that leans on parts of torch which its documentation does not promise, and all that
changes torch for everybody in the process.

What is changed is listed in ``docs/what_changes_in_torch.md``, and ``undo()`` takes it back. A test
compares torch before and after with that list. Each entry says why it is needed.

Tested with torch 2.13. ``csrc/core/torch_internals.h`` is the same for C++.
"""

import atexit
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import Unsupported
from torch._guards import TracingContext
from torch.autograd import profiler
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._composable.contract import STATE_KEY as STATES_OF_MODULE
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Private names of torch that other files use unchanged.
__all__ = [
    "STATES_OF_MODULE",  # where a module has what fully_shard and its like keep of it
    "DTensorSpec",  # what a DTensor is made of: it has no public constructor for uneven slices
    "TensorMeta",
    "TorchDispatchMode",  # sees each operation below autograd
    "TracingContext",  # whether torch.compile looks inside a tensor, or something else
    "Unsupported",  # breaks a graph of torch.compile
    "compute_local_shape_and_global_offset",  # where a rank's part of a DTensor begins
    "is_traceable_wrapper_subclass",  # whether a tensor consists of others
    "tree_flatten",  # nested containers, as torch's operators take them apart
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# The names and types of an operator's arguments, and which of them it writes to.
schema_of = attrgetter("_schema")
# Of a DTensor. Unlike to_local() the first one is the tensor itself, without a node of autograd.
local_tensor_of, spec_of = attrgetter("_local_tensor"), attrgetter("_spec")

# Inside, writes to tensors do not count as changes of what graphs have saved.
keep_versions = torch.autograd._unsafe_preserve_version_counter

_EXIT_S = 0.05  # a thread needs microseconds, once it runs
_Function = TypeVar("_Function", bound=Callable)
# The calls that undo each change of torch.
_undo: list[Callable[[], None]] = []


def undo() -> None:
    """Give torch back what was changed in it. Sharded modules do not work any more afterwards."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


@contextlib.contextmanager
def hooks_are_off(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, a backward runs no hooks that users have registered on these leaves.

    Torch has no other way to give a leaf a gradient that its hooks have seen before.
    """
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [(p, name, getattr(p, name)) for p in parameters for name in names]
    registered = [each for each in hooks if each[2]]
    try:
        for parameter, name, _ in registered:
            setattr(parameter, name, OrderedDict())  # None would leave torch the last ones
        yield
    finally:
        for each in registered:
            setattr(*each)


# ---- Clipping and unscaling ----

# Torch's own, by their names in torch.nn.utils.
clip_grad_norm_ = clip_grad.clip_grad_norm_
clip_grad_value_ = clip_grad.clip_grad_value_
clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
get_total_norm = clip_grad._get_total_norm
unscale_ = torch.amp.GradScaler.unscale_


def replace_clipping(is_needed: Callable[[], bool], **functions: Callable) -> None:
    """Call ``functions`` in the place of torch's of these names, once ``is_needed()``.

    Gradients of sharded parameters are parts: torch sees no gradient where one is still to be
    reduced, and would clip nothing. Functions that scripts imported before call ours, too: they
    call two functions of their module by their names there. torch.compile does not trace ours.
    Gradients of sharded parameters cannot be traced, and a part that became a graph would be
    compiled again for each list of parameters.
    """
    for name, function in functions.items():
        torchs = globals()[name]
        replacement = _untraced(torchs, function, is_needed)
        if name == "unscale_":
            _replace(torch.amp.GradScaler, name, replacement)
        else:
            _replace(clip_grad, torchs.__name__, replacement)
            _replace(nn.utils, name, replacement)


def _untraced(torchs: Callable, function: Callable, is_needed: Callable[[], bool]) -> Callable:
    uncompiled = torch.compiler.disable(function)

    @functools.wraps(torchs)
    def replacement(*args, **kwargs):
        return (uncompiled if is_needed() else torchs)(*args, **kwargs)

    return run_as_it_is(replacement)


# ---- torch.compile ----


def disable_compilation(function: _Function) -> _Function:
    """``torch.compiler.disable``, whose result type checkers cannot bind to an object."""
    return torch.compiler.disable(function)


def run_as_it_is(function: FunctionType) -> FunctionType:
    """Where torch calls ``function``, torch.compile makes no graph of it alone."""
    skip_code(function.__code__)
    return function


def compile_for_hooks() -> None:
    """Look at a module's hooks before code that was compiled for it is used again.

    By default torch reuses code that was compiled before a module gained hooks, or for another
    module of the same class without hooks. A sharded module would then run without ours. This only
    affects code that is compiled later.
    """
    _replace(torch._dynamo.config, "skip_nnmodule_hook_guards", False)


# ---- Lists of a tensor's kinds ----


def use_foreach_for(kind: type) -> None:
    """Let the default (foreach=None) of clip_grad_norm_ and of optimizers be fast for ``kind``.

    DTensor adds itself to these lists, too. Without it every gradient's norm would be an all-reduce
    of its own.
    """
    for module in (_foreach_utils, torch_optimizer):
        _replace(module, "_foreach_supported_types", [*module._foreach_supported_types, kind])


# ---- Optimizers of scripts that were written for FSDP2 ----


@functools.cache
def after_making_optimizers(follow: Callable[[torch_optimizer.Optimizer], None]) -> None:
    """Call ``follow`` with each optimizer that is made from now on, at the end of the constructor
    that all of torch's share.

    A stock optimizer that steps the parts of parameters must become one that shards its state.
    """
    construct = torch_optimizer.Optimizer.__init__
    _replace(torch_optimizer.Optimizer, "__init__", followed(construct, follow))


def followed(construct: Callable[..., None], follow: Callable[[Any], None]) -> Callable[..., None]:
    """The ``__init__`` that calls ``follow`` with what ``construct`` has made."""

    @functools.wraps(construct)
    def construct_and_follow(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        follow(self)

    return construct_and_follow


# ---- Profiles ----


def hide_parameters_in_profiles(
    is_needed: Callable[[], bool], show: Callable[[bool], None]
) -> None:
    """During profiles, once ``is_needed()``: parameters are no tensors to torch's profiler.

    With stacks it reads the address of each parameter of each module that is called, and an error
    there breaks the profile. Torch has no hook for the beginning and the end of a profile, but
    calls two functions. ``show(False)`` takes the class ``nn.Parameter`` out of the comparison that
    the profiler makes. For torch's operators parameters then have a class of their own: slower by
    50 ns.
    """

    def around(torchs: Callable[[], None], visible: bool) -> Callable[[], None]:
        @functools.wraps(torchs)
        def called() -> None:
            if visible or is_needed():
                show(visible)
            torchs()

        return called

    for name, visible in (("_run_on_profiler_start", False), ("_run_on_profiler_stop", True)):
        _replace(profiler, name, around(getattr(profiler, name), visible))


def is_profiling() -> bool:
    return profiler._is_profiler_enabled


# ---- Other wrappers that reduce gradients ----
# One around a sharded module is found in the next forward: DistributedDataParallel and replicate by
# their hooks on the parameters (csrc/units/sharded_parameters.h), the others by what stands in the
# place of a parameter. With stage 3 most read released parameters before that, which is an error.

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_COMPOSABLE = ("fully_shard", "replicate")
# An attribute of parameters that FullyShardedDataParallel has made parts of a larger one, and which
# stay in their places.
FLATTENED = "_fsdp_flattened"


def wrappers_of(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The modules whose own gradients another wrapper reduces, or will reduce, and its name."""
    found = {}
    for module in modules:
        for kind in type(module).__mro__:  # isinstance() would run Python of these classes
            if kind in _WRAPPERS:
                found[module] = kind.__name__
        applied = vars(module).get(REGISTRY_KEY, ())
        for name in _COMPOSABLE:
            if name in applied:
                found.setdefault(module, name)
    return found


def wrapper_around(owner: nn.Module, key: str) -> str | None:
    """The one that has put something else in the place of the parameter ``owner.key``.

    Torch keeps a module's parameters as parts of one tensor (FullyShardedDataParallel), or knows
    which module each state of fully_shard or replicate belongs to.
    """
    stands = vars(owner).get(key)
    if isinstance(stands, torch.Tensor) and getattr(stands._base, "_is_flat_param", False):
        return FullyShardedDataParallel.__name__
    around: Iterable[nn.Module] = (m for m in _module_state_mapping if owner in m.modules())
    return next(iter(wrappers_of(around).values()), None)


# ---- Threads of process groups ----


@functools.cache
def let_threads_finish_at_exit() -> None:
    """A thread of gloo may hold the last reference to a tensor of a collective that has ended.

    It then waits for the interpreter. If that has gone, the thread aborts the process, or the
    process waits for the thread: the exit code of a finished training is -6, and torchrun begins it
    again. ``destroy_process_group()`` ends the threads of groups that nothing else holds. A sharded
    module holds its group.
    """
    atexit.register(time.sleep, _EXIT_S)
