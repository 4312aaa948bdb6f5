"""Errors of accesses to released parameters (stage 3): a table from what was called to a text.

A released storage has no memory, and torch raises one text for every access to it: for a read that
of ``csrc/units/unit_parameters.cpp``. Every other access is recognised here, when it raises: by the
functions that called it, or by torch's operator.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_ext import _C, _torch
from zero_ext.engine.registry import Handle, living


def _releasing() -> list[Handle]:
    """The handles whose parameters come and go."""
    return [handle for handle in living() if handle.engine and handle.engine.releases]


class _Caller(NamedTuple):
    module: str
    name: str  # with its class
    frame: FrameType

    @property
    def function(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def owner(self):
        """The object whose method was called."""
        code = self.frame.f_code
        is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
        return self.frame.f_locals.get("self") if is_method else None


def _callers() -> Iterator[_Caller]:
    """The innermost first. A thread of gloo's has none."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
        yield _Caller(frame.f_globals.get("__name__") or "", name, frame)
        frame = frame.f_back


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
_WRAPPED = (
    "{name} was put around parameters that are sharded. Use the module without {name}: its "
    "backward reduces the gradients."
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


def _outermost(callers: Sequence[_Caller]) -> str:
    """The function of torch.nn that the user called, of which the first of ``callers`` is part."""
    names = []
    for caller in callers:
        if not caller.module.startswith("torch.nn."):
            break
        names.append(caller.function)
    return names[-1]


def _optimizer(callers: Sequence[_Caller]) -> str:
    steppers = [c.owner for c in callers if isinstance(c.owner, torch.optim.Optimizer)]
    return type(steppers[0]).__name__ if steppers else "torch.optim"


class _Row(NamedTuple):
    """For a caller whose module and name match. ``{name}`` in the text is ``name(callers)``."""

    module: str
    name: str
    text: str
    name_of: Callable[[Sequence[_Caller]], str] = lambda callers: ""


def _wrapper(module: str, name: str) -> _Row:
    return _Row(module, "", _WRAPPED, lambda callers: name)


_OF_USER = r"(?!torch\.|zero_ext\.)"
# Names that say that weights are averaged.
_AVERAGE = (
    r"(.*[._a-z]|)(EMA|Ema)([A-Z_.]|$)|(.*[._]|)ema([_.]|$)|.*[Mm]oving_?[Aa]verage|.*[Mm]omentum"
    r"|.*[Pp]olyak|.*update_(target|teacher)"
)
# The first row counts that fits any caller, and of its callers the innermost.
_BY_CALLER = [
    _Row(r"torch\.optim\.swa_utils$", "", _EMA),
    _Row(_OF_USER, _AVERAGE, _EMA),
    _Row(r"torch\._tensor_str$", "", _READ),
    _Row(r"zero_ext\.(tensor|state|checkpoint)\.", "", _READ),  # gradients, states
    _wrapper(r"torch\.nn\.parallel\.distributed$", "DistributedDataParallel"),
    _wrapper(r"torch\.nn\.parallel\.", "DataParallel"),
    _wrapper(r"torch\.distributed\._composable\.replicate", "replicate"),
    _wrapper(r"torch\.distributed\.fsdp\._fully_shard\.", "fully_shard"),
    _wrapper(r"torch\.distributed\.fsdp\.", "FullyShardedDataParallel"),
    _Row(r"torch\.nn\.modules\.module$", r".*\b_apply$", _MOVED, _outermost),
    _Row(r"torch\.nn\.utils\.(parametriz|weight_norm|spectral_norm|prune)", "", _MOVED, _outermost),
    _Row(r"copy$", "", _DEEPCOPY),
    _Row(r"torch\.serialization|safetensors", "", _SAVED),
    _Row("", r".*\bsave_pretrained$", _SAVED),
    _Row(r"torch\.optim\b", r"(?!.*\bwrapper$)", _OPTIMIZER, _optimizer),
]
# Of torch's operators, with their overloads. Those that combine read one tensor and write another.
_BY_OPERATOR = [
    (r"(_foreach_)?lerp_", _EMA),
    (r"(_foreach_)?(copy|add|sub)_", _COMBINED),
    (r"\w*[a-z0-9]_(_[A-Z]\w*)?$", _WRITTEN),
]
_LOSS_OPERATOR = re.compile(r"(sum|mean|mul|pow|square|abs|add|sub|dot|matmul|mm)(_[A-Z]|_dim|$)")
_AUTOGRAD, _PLAIN = "torch.autograd", nn.Parameter.__torch_dispatch__
_TRACERS = (
    "torch._dynamo.convert_frame",
    "torch._subclasses",
    "torch._functorch",
    "torch.fx",
    "torch.export",
)


def _explain(operator: str, in_backward: bool) -> str:
    """The error of an access; "" where it is the storage's own."""
    callers = list(_callers())
    traced = any(caller.module.startswith(_TRACERS) for caller in callers)
    if traced or not _releasing():
        return _READ
    if in_backward:  # who called backward() has not read them
        callers = list(itertools.takewhile(lambda c: not c.module.startswith(_AUTOGRAD), callers))
    if (text := _by_caller(callers)) is None:
        text = _BACKWARD if in_backward else _by_operator(operator)
    begin = _begin_of_message(callers)
    return _READ if text == _READ or begin is None else begin + text


def _begin_of_message(callers: Sequence[_Caller]) -> str | None:
    """The rank, and the unit: that of the first one without memory of the parameters that the
    running node of a backward has read, and of those that the callers and their modules have.
    None where that one is not released, but offloaded."""
    own = itertools.chain.from_iterable(map(_parameters_of, callers))
    for parameter in (*_C.parameters_after_this_node(), *own):
        try:
            parameter.data_ptr()
        except RuntimeError as error:
            begin, released, _ = str(error).partition("the parameters of this unit are released")
            return begin if released else None
    return _releasing()[0].groups.where


def _parameters_of(caller: _Caller) -> list[Tensor]:
    own = caller.owner._parameters if isinstance(caller.owner, nn.Module) else {}
    values = [*caller.frame.f_locals.values(), *own.values()]
    return [v for v in values if isinstance(v, Tensor) and type(v).__torch_dispatch__ is _PLAIN]


def _by_caller(callers: Sequence[_Caller]) -> str | None:
    for row in _BY_CALLER:
        for k, caller in enumerate(callers):
            if re.match(row.module, caller.module) and re.match(row.name, caller.name):
                return row.text.format(name=row.name_of(callers[k:]))
    methods = [caller for caller in callers if isinstance(caller.owner, nn.Module)]
    if not methods:
        return None
    if any(handle.forwards.here() for handle in _releasing()):
        return _FORWARD.format(name=type(methods[0].owner).__name__)
    own = [method for method in methods if not method.module.startswith("torch.")]
    return _METHOD.format(name=(own or methods[-1:])[0].function)


def _by_operator(operator: str) -> str:
    name = operator.partition("__")[0].rstrip("_") + "_"
    for pattern, text in _BY_OPERATOR:
        if re.match(pattern, operator):
            return text.format(name=name)
    return _LOSS if torch.is_grad_enabled() and _LOSS_OPERATOR.match(operator) else _READ


_C.explain_released_accesses(_explain)
_torch.hide_parameters_in_profiles(lambda: bool(_releasing()), _C.show_parameters_to_profiler)
