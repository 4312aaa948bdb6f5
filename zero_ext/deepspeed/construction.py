"""``zero.Init``: models that are larger than a rank's memory.

Inside the context a module's parameters are cut as soon as its constructor is done, which torch
tells when a parent registers it. Each rank keeps its piece of rank 0's values. The Parameter stays
the same object of the same shape, without memory: its elements are one NaN, and writing raises.
``GatheredParameters`` and ``Module.apply`` make it whole for a while. ``initialize`` gives each
unit its values when it is cut.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from zero_ext.deepspeed.casting import COMPUTED
from zero_ext.deepspeed.environment import init_distributed
from zero_ext.engine.registry import find
from zero_ext.ranks.collectives import broadcast_, on_wire, wait_for
from zero_ext.ranks.groups import rank_and_world

_PIECE = "_zero_ext_piece"  # an attribute, which goes with a Parameter that takes its place


@torch.no_grad()
def _piece(value: Tensor, source: int) -> Tensor:
    """This rank's part of rank ``source``'s value, flat. The last ranks' parts may be padded.
    Collective."""
    rank, ranks = rank_and_world()
    value = value.detach().contiguous()
    if ranks > 1:
        # As bytes: backends do not know every dtype.
        broadcast_(value.flatten().view(torch.uint8), dist.group.WORLD, source)
    part = -(-value.numel() // ranks)
    local = value.new_zeros(part)
    mine = value.flatten()[rank * part : (rank + 1) * part]
    local[: mine.numel()] = mine
    return local


@torch.no_grad()
def _whole(parameter: Tensor) -> Tensor:
    """The values of all ranks' pieces. Collective."""
    piece, (_, ranks) = piece_of(parameter), rank_and_world()
    parts = [piece]
    if ranks > 1:
        wire = on_wire(piece.view(torch.uint8), dist.group.WORLD)
        parts = [torch.empty_like(wire) for _ in range(ranks)]
        wait_for(dist.all_gather(parts, wire, async_op=True), wire)
        parts = [part.view(piece.dtype) for part in parts]
    whole = torch.cat(parts)[: parameter.numel()].reshape(parameter.shape)
    return whole.to(piece.device)


def piece_of(parameter: Tensor) -> Tensor | None:
    return parameter.__dict__.get(_PIECE)


def _cut(parameter: Tensor, source: int = 0) -> None:
    setattr(parameter, _PIECE, _piece(parameter.data, source))
    nothing = parameter.data.new_full((), float("nan"))
    torch._C._set_throw_on_mutable_data_ptr(nothing)
    parameter.data = nothing.expand(parameter.shape)


class Init(contextlib.ContextDecorator):
    """Cut the parameters of modules that are made inside the context. Collective: every rank makes
    the same modules.

    Args:
        module: A module that was made before, to be cut now.
        dtype: What parameters are cast to. Default: as they were made.
        enabled: False: the context does nothing.
        others: DeepSpeed's other arguments, which say where and how it keeps its parts.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        **others: Any,
    ):
        self._dtype, self._enabled = dtype, enabled
        self._made: list[nn.Module] = []
        if enabled:
            init_distributed()
            for each in () if module is None else module.modules():
                self._cut_own(each)

    def __enter__(self) -> "Init":
        if self._enabled:
            self._hooks = [
                torchs.register_module_parameter_registration_hook(self._note),
                torchs.register_module_module_registration_hook(self._finished),
            ]
            self._apply = nn.Module.apply
            nn.Module.apply = _apply_gathered
        return self

    def __exit__(self, kind: type | None, *error: Any) -> None:
        if not self._enabled:
            return
        for hook in self._hooks:
            hook.remove()
        nn.Module.apply = self._apply
        made, self._made = self._made, []
        for module in made if kind is None else ():
            self._cut_own(module)

    def _note(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        self._made.append(module)

    def _finished(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if _initialises_children(parent):
            return
        for each in () if child is None else child.modules():
            self._cut_own(each)

    def _cut_own(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is None or piece_of(parameter) is not None or parameter.numel() <= 1:
                continue
            if find(parameter) is not None:  # an engine was made inside the context
                continue
            if self._dtype is not None and parameter.dtype in COMPUTED:
                parameter.data = parameter.data.to(self._dtype)
            if not parameter.is_meta:
                _cut(parameter)


def _initialises_children(module: nn.Module) -> bool:
    """torch's attention, for example: its children are cut when it is registered itself."""
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return type(module).__module__.startswith("torch.nn.") and not is_list


def _apply_gathered(module: nn.Module, function) -> nn.Module:
    """``Module.apply``, with the parameters of each module gathered, and changes of rank 0 kept."""
    for child in module.children():
        child.apply(function)
    with gathered(module._parameters.values(), 0):
        function(module)
    return module


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor | None], modifier_rank: int | None) -> Iterator[None]:
    """Make those that were cut whole inside the context. Collective."""
    cut = [p for p in parameters if p is not None and piece_of(p) is not None]
    nothing = [p.data for p in cut]
    for parameter in cut:
        parameter.data = _whole(parameter)
    try:
        yield
    finally:
        for parameter, before in zip(cut, nothing, strict=True):
            if modifier_rank is None:
                parameter.data = before
            else:
                _cut(parameter, modifier_rank)


def is_cut(model: nn.Module) -> bool:
    """Whether a parameter was cut and not yet sharded."""
    return any(piece_of(parameter) is not None for parameter in model.parameters())


def prepare(model: nn.Module, by_unit: bool) -> None:
    """Before the model is sharded: parameters that were cut go to the meta device, where
    ``fill`` gives them values unit by unit, or become whole at once. Collective."""
    twins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or piece_of(parameter) is None:
                continue
            if not by_unit:
                parameter.data = _whole(parameter)
                delattr(parameter, _PIECE)
                continue
            if id(parameter) not in twins:
                data = torch.empty_like(parameter, device="meta")
                twins[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                twins[id(parameter)].__dict__.update(parameter.__dict__)
            module._parameters[name] = twins[id(parameter)]


def fill(module: nn.Module) -> None:
    """A ``param_init_fn``: the values that the parameters had in their pieces. Collective."""
    for parameter in module._parameters.values():
        if parameter is None or parameter.is_meta or piece_of(parameter) is None:
            continue
        parameter.data.copy_(_whole(parameter))
        delattr(parameter, _PIECE)
