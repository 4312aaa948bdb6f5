"""Errors of accesses to released parameters (stage 3), chosen by what was called.

A released storage has no memory, and torch raises one text for every access to it. The text of a
read is in ``csrc/units/unit_parameters.cpp``. Every other access is recognised here, when its error
is raised: by the functions that called it, the innermost first, and by torch's operator. Nothing
here runs before that.
"""

import functools
import re
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from zero_ext import _C
from zero_ext.engine.registry import find
from zero_ext.engine.unit_hooks import hooks_of

# The handles whose parameters come and go, and those that have states offloaded: accesses to these
# raise an error of their own, which looks the same from here.
_releasing: weakref.WeakSet = weakref.WeakSet()
_offloading: weakref.WeakSet = weakref.WeakSet()


class ProfiledParameter(nn.Parameter):
    """The class of released parameters during a profile.

    With stacks, torch's profiler reads the address of each parameter whose class is exactly
    ``nn.Parameter``, and an error there breaks the profile.
    """

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]


def begin_releasing(handle) -> None:
    """From now on ``handle`` releases its parameters."""
    _releasing.add(handle)
    if profiler._is_profiler_enabled:
        _set_class(handle, ProfiledParameter)


def note_offloaded(handle, anything: bool) -> None:
    (_offloading.add if anything else _offloading.discard)(handle)


def end_releasing(handle) -> None:
    _releasing.discard(handle)
    _set_class(handle, nn.Parameter)


def _set_class(handle, other: type) -> None:
    for parameter in handle.parameters:
        if type(parameter) in (nn.Parameter, ProfiledParameter) and type(parameter) is not other:
            parameter.__class__ = other


def _watch_profilers() -> None:
    """Torch has no hook for the beginning and the end of a profile, but calls two functions."""

    def around(function, other: type):
        @functools.wraps(function)
        def called() -> None:
            for handle in list(_releasing):
                _set_class(handle, other)
            function()

        return called

    profiler._run_on_profiler_start = around(profiler._run_on_profiler_start, ProfiledParameter)
    profiler._run_on_profiler_stop = around(profiler._run_on_profiler_stop, nn.Parameter)


class _Caller(NamedTuple):
    module: str
    name: str  # with its class
    frame: FrameType

    @property
    def owner(self):
        """What a method was called on."""
        code = self.frame.f_code
        is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
        return self.frame.f_locals.get("self") if is_method else None


def _callers() -> Iterator[_Caller]:
    frame = sys._getframe(2)
    while frame is not None:
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
        yield _Caller(frame.f_globals.get("__name__") or "", name, frame)
        frame = frame.f_back


def _begin_of_message(callers: list[_Caller]) -> str | None:
    """The rank and the unit, from the text of the storage that was accessed: that of the first
    released tensor among the parameters of the running node of a backward, the variables of the
    callers and the parameters of their modules."""
    for value in (*_C.parameters_after_this_node(), *_variables_of(callers)):
        if isinstance(value, Tensor) and type(value).__torch_dispatch__ is _PLAIN:
            try:
                value.data_ptr()
            except RuntimeError as error:
                begin, released, _ = str(error).partition(_RELEASED)
                if released or begin.startswith("zero_ext"):  # offloaded, or a gradient
                    return begin if released else None
    return f"zero_ext [rank {next(iter(_releasing)).groups.global_rank}]: "


def _variables_of(callers: list[_Caller]) -> Iterator[Any]:
    for caller in callers:
        yield from caller.frame.f_locals.values()
        yield from (getattr(caller.owner, "_parameters", None) or {}).values()


_PLAIN = nn.Parameter.__torch_dispatch__
_RELEASED = "the parameters of this unit are released"
_TRACERS = ("torch._dynamo", "torch._subclasses", "torch._functorch", "torch.fx", "torch.export")
_PARAMETRIZING = tuple(
    f"torch.nn.utils.{name}" for name in ("parametriz", "weight_norm", "spectral_norm", "prune")
)
_AVERAGE = re.compile(
    r"(^|[._a-z])(EMA|Ema)([A-Z_.]|$)|(^|[._])ema([_.]|$)|[Mm]oving_?[Aa]verage|[Mm]omentum"
    r"|[Pp]olyak|update_(target|teacher)"
)
_AVERAGING_OPERATOR = re.compile(r"(_foreach_)?lerp_")
_COMBINING_OPERATOR = re.compile(r"(_foreach_)?(copy|add|sub)_")  # read one tensor, write another
_WRITING_OPERATOR = re.compile(r"\w*[a-z0-9]_(_[A-Z]\w*)?$")
_LOSS_OPERATOR = re.compile(r"(sum|mean|mul|pow|square|abs|add|sub|dot|matmul|mm)(_[A-Z]|_dim|$)")

_EMA = (
    "an average of weights reads parameters that stage 3 has released. Use zero_ext.EMA(module, "
    "decay), which averages the shards."
)
_MOVED = (
    "{name}() of a module whose parameters stage 3 has released. Call it before zero_ext.shard()."
)
_DEEPCOPY = (
    "copy.deepcopy() of parameters that stage 3 has released. Copy the module inside `with "
    "module.summon_full_params():`, on every rank."
)
_SAVED = (
    "parameters that stage 3 has released were to be saved. Save them on every rank with "
    "zero_ext.checkpoint.save(path, module), or zero_ext.checkpoint.export_safetensors()."
)
_OPTIMIZER = (
    "{name} steps parameters that stage 3 has released. Make the optimizer from zero_ext.optim, "
    "after zero_ext.shard()."
)
_FORWARD = (
    "the forward of {name} reads parameters of another unit, which are released. Choose units so "
    "that both are in one: zero_ext.shard(units=…)."
)
_METHOD = (
    "{name}() reads parameters that are released outside of a forward. Make it one with "
    "zero_ext.register_forward_method(module, '{name}')."
)
_BACKWARD = (
    "a backward reads parameters that are released. Either retained_bytes of zero_ext.shard() is "
    "too small for a second backward over one graph, or the module returned no tensor that leads "
    "back to them: return one."
)
_LOSS = (
    "parameters that stage 3 has released are read. For a statistic, read zero_ext.full_tensor("
    "parameter), on every rank. Compute a term of a loss in the forward of their module. "
    "Leave out a `0.0 * p.sum()` for unused parameters."
)
_COMBINED = (
    "{name}() from or to parameters that stage 3 has released. Average weights with zero_ext.EMA("
    "module, decay); write values with zero_ext.set_full_param(parameter, value), on every rank."
)
_WRITTEN = (
    "'{name}' writes to parameters that stage 3 has released. Use zero_ext.set_full_param("
    "parameter, value), on every rank."
)
_READ = ""  # the storage's own text, which names the unit


def _explain(operator: str, in_backward: bool) -> str:
    """The error of an access; "" where it is the storage's own."""
    callers = list(_callers())
    traced = any(caller.module.startswith(_TRACERS) for caller in callers)
    if traced or not _releasing or any(handle in _offloading for handle in _releasing):
        return _READ
    variables = (value for caller in callers for value in caller.frame.f_locals.values())
    if _offloading and any(map(_is_offloaded, variables)):
        return _READ
    begin = _begin_of_message(callers)
    if begin is None:
        return _READ
    text = _by_caller(callers)
    if text is None:
        text = _BACKWARD if in_backward else _by_operator(operator)
    return text if text == _READ else begin + text


def _is_offloaded(value: Any) -> bool:
    """Whether ``value`` is a handle with offloaded states, has one, or is a parameter of one."""
    if isinstance(value, Tensor):
        place = find(value)
        return place is not None and place[0] in _offloading
    held = getattr(value, "__dict__", {}).get("_handle")
    return any(handle is value or handle is held for handle in _offloading)


def _by_caller(callers: list[_Caller]) -> str | None:
    for caller in callers:
        of_user = not caller.module.startswith(("torch.", "zero_ext."))
        if caller.module == "torch.optim.swa_utils" or (of_user and _AVERAGE.search(caller.name)):
            return _EMA
    for k, caller in enumerate(callers):
        text = _of_caller(caller, callers[k:])
        if text is not None:
            return text
    return None


def _of_caller(caller: _Caller, outer: list[_Caller]) -> str | None:
    module, name = caller.module, caller.name.rpartition(".")[2]
    if module == "torch._tensor_str":
        return _READ
    if module == "torch.nn.modules.module" and name == "_apply":
        verbs = [c.name.rpartition(".")[2] for c in outer]
        return _MOVED.format(name=next(v for v in verbs if v not in ("_apply", "convert")))
    if module.startswith(_PARAMETRIZING):
        verbs = [c.name.rpartition(".")[2] for c in outer if c.module.startswith(_PARAMETRIZING)]
        return _MOVED.format(name=verbs[-1])
    if module == "copy":
        return _DEEPCOPY
    if module.startswith(("torch.serialization", "safetensors")) or name == "save_pretrained":
        return _SAVED
    if module.startswith("torch.optim") and name != "wrapper":
        steppers = [c.owner for c in outer if isinstance(c.owner, torch.optim.Optimizer)]
        return _OPTIMIZER.format(name=type(steppers[0]).__name__ if steppers else "torch.optim")
    if isinstance(caller.owner, nn.Module):
        return _of_module(outer)
    return None


def _of_module(callers: list[_Caller]) -> str:
    """Of a method of a module, which other modules may have called."""
    methods = [c for c in callers if isinstance(c.owner, nn.Module)]
    calls = [c for c in methods if c.name.endswith("_call_impl")]
    if any(hooks_of(c.owner) for c in calls):
        return _FORWARD.format(name=type(methods[0].owner).__name__)
    method = next((c for c in methods if not c.module.startswith("torch.")), methods[-1])
    return _METHOD.format(name=method.name.rpartition(".")[2])


def _by_operator(operator: str) -> str:
    if _AVERAGING_OPERATOR.match(operator):
        return _EMA
    name = operator.partition("__")[0].rstrip("_") + "_"
    if _COMBINING_OPERATOR.match(operator):
        return _COMBINED.format(name=name)
    if _WRITING_OPERATOR.match(operator):
        return _WRITTEN.format(name=name)
    if torch.is_grad_enabled() and _LOSS_OPERATOR.match(operator):
        return _LOSS
    return _READ


_watch_profilers()
_C.explain_released_accesses(_explain)
