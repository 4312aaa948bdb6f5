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
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.collectives import broadcast_, on_wire, wait_for
from zero_ext.ranks.groups import rank_and_world
from zero_ext.state.model_state import full_value
from zero_ext.state.values import set_full_param

_PIECE = "_zero_ext_piece"  # an attribute, which goes with a Parameter that takes its place


def _broadcast(value: Tensor, source: int) -> None:
    """As bytes: backends do not know every dtype. Collective."""
    if rank_and_world()[1] > 1:
        broadcast_(value.flatten().view(torch.uint8), dist.group.WORLD, source)


def _part(value: Tensor) -> Tensor:
    """This rank's part, flat. The last ranks' parts may be padded."""
    rank, ranks = rank_and_world()
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


@torch.no_grad()
def _cut(parameter: Tensor) -> None:
    value = parameter.data.contiguous()
    _broadcast(value, 0)
    setattr(parameter, _PIECE, _part(value))
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
    own = [p for p in module._parameters.values() if p is not None and piece_of(p) is not None]
    with gathered(own, 0):
        function(module)
    return module


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Make parameters whole inside the context: those that were cut, and those of sharded modules.
    Collective.

    Args:
        modifier_rank: Whose changes every rank gets in the end.
    """
    unique = list({id(p): p for p in parameters}.values())
    away = [p for p in unique if piece_of(p) is not None or _is_released(p)]
    nothing = [p.data for p in away]
    whole = [full_value(p).clone() if piece_of(p) is None else _whole(p) for p in away]
    groups = next((entry.handle.groups for entry in map(find, unique) if entry is not None), None)
    told = modifier_rank is not None and groups is not None  # so that no rank waits in vain
    before: list[Tensor | None] = []
    fails = True
    try:
        with all_or_none(groups, "GatheredParameters()") if told else contextlib.nullcontext():
            for p, data in zip(away, whole, strict=True):
                p.data = data
            if modifier_rank == rank_and_world()[0]:
                # Of what was cut, all is sent, without a copy.
                before = [p.detach().clone() if piece_of(p) is None else None for p in unique]
            yield
        fails = False
    finally:
        after = [p.data for p in unique]
        for p, data in zip(away, nothing, strict=True):
            p.data = data
        # Where ranks tell each other of an error, all of them raise it.
        if unique and modifier_rank is not None and not (told and fails):
            with torch.no_grad():
                _share(unique, before, after, modifier_rank)


def _is_released(parameter: Tensor) -> bool:
    entry = find(parameter)
    if entry is None or not entry.handle.engine.releases:
        return False
    try:
        parameter.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def _share(
    parameters: list[Tensor], before: list[Tensor | None], after: list[Tensor], source: int
) -> None:
    """Give every rank what ``source``, which alone knows ``before``, has changed. The masters of
    others keep all bits."""
    device = after[0].device if after else torch.device("cpu")
    changed = torch.zeros(len(parameters), dtype=torch.uint8, device=device)
    for k, (old, new) in enumerate(zip(before, after, strict=False)):
        changed[k] = old is None or not torch.equal(old, new)
    _broadcast(changed, source)
    for is_changed, p, value in zip(changed.tolist(), parameters, after, strict=True):
        if not is_changed:
            continue
        value = value.contiguous()
        _broadcast(value, source)
        if piece_of(p) is not None:
            setattr(p, _PIECE, _part(value))
        elif find(p) is None:
            p.data.copy_(value)
        else:
            set_full_param(p, value)


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
