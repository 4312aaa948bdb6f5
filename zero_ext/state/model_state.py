"""ModelState: what ``state_dict()`` of a model names, and how a checkpoint sees it."""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from zero_ext.engine.checks import check_module
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import RegistryEntry, find
from zero_ext.optim.groups import name_in_module, stepped_beside
from zero_ext.ranks.collectives import expansion
from zero_ext.ranks.groups import ALONE, Groups, resolve
from zero_ext.tensor.meshes import AcrossMeshes, local_of

EXTRA_STATE = "_extra_state"


class ModelState(NamedTuple):
    """The values of a model by name.

    ``tensors``: parameters and buffers themselves, and the tensors that hooks make for
    ``state_dict()``. ``made``: the names of the latter, which only ``load_state_dict()`` can load.
    ``objects``: what is no tensor, and extra states, which modules make for each call and load as a
    whole. ``names``: the first name of each parameter, by id. ``beside``: of the parameters that
    are not the model's, and that its optimizers step all the same.
    """

    tensors: dict[str, Tensor]
    made: frozenset[str]
    objects: dict[str, Any]
    names: dict[int, str]
    beside: frozenset[str]

    @staticmethod
    def of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> "ModelState":
        """Raises a ValueError where two parameters have one name."""
        own = _own_tensors(model)
        tensors, objects, names = {}, {}, {}
        made = set()
        for name, value in model.state_dict(keep_vars=True).items():
            name = plain_name(name)
            if not isinstance(value, Tensor) or is_extra_state(name):
                objects[name] = value
                continue
            found = value if id(value) in own else own.get(_place(value))
            tensors[name] = value if found is None else found
            if found is None:
                made.add(name)
            elif isinstance(found, nn.Parameter):
                names.setdefault(id(found), name)
        for name, parameter in model.named_parameters():  # hooks may have left some out
            names.setdefault(id(parameter), plain_name(name))
        others = stepped_beside(optimizers, names)
        beside = {name_in_module(p): p for p in others}
        if len(beside) < len(others) or beside.keys() & (tensors.keys() | objects.keys()):
            raise ValueError(
                f"zero_ext: the optimizers step parameters beside the model, {sorted(beside)}, and "
                "two have one name. Make the optimizers of (name, parameter) pairs."
            )
        names |= {id(parameter): name for name, parameter in beside.items()}
        return ModelState(tensors | beside, frozenset(made), objects, names, frozenset(beside))

    def check_writable(self, names: Iterable[str]) -> None:
        """Raise where several elements of one of these tensors share memory."""
        for name in set(names) - self.made:
            value = self.tensors[name]
            if entry_in_unit(value) is None and any(expansion(value)):
                raise ValueError(
                    f"zero_ext: '{name}' of shape {tuple(value.shape)} is expanded: its elements "
                    "share memory, so it cannot be loaded. Make it contiguous."
                )

    def write(self, model: nn.Module, values: dict[str, Tensor], objects: dict[str, Any]) -> None:
        """Give the tensors of these names new values, masters included, and modules their extra
        states. Collective."""
        others = {name: value for name, value in objects.items() if not is_extra_state(name)}
        for name, value in values.items():
            if name in self.made:
                others[name] = whole(value)
            else:
                write_held(self.tensors[name], value)
        if others:
            model.load_state_dict(others, strict=False)
        for name in [name for name in objects if is_extra_state(name)]:  # in torch's order
            _set_extra_state(model, name, objects[name])


def plain_name(name: str) -> str:
    """``name`` without torch.compile's wrappers, as in torch's own checkpoints."""
    return name.replace("_orig_mod.", "")


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def whole(value: Tensor) -> Tensor:
    """Collective for a DTensor. Of a class with hooks around gathers: the plain tensor inside."""
    return value.full_tensor() if isinstance(value, DTensor) else local_of(value)


def _own_tensors(model: nn.Module) -> dict[int | tuple | None, Tensor | None]:
    """A model's parameters and buffers by their ids, and by their places in memory: hooks may
    detach them. None at the place of several."""
    own: dict[int | tuple | None, Tensor | None] = {None: None}
    for value in [*model.parameters(), *model.buffers()]:
        own[id(value)] = value
        entry = find(value)
        if entry is None or not entry.handle.engine.releases:  # such parameters may not be read
            place = _place(value)
            own[place] = None if place in own else value
    return own


def _place(value: Tensor) -> tuple | None:
    """The place in memory of all elements of a plain tensor."""
    if type(value) not in (Tensor, nn.Parameter) or value.numel() == 0:
        return None
    start = value.untyped_storage().data_ptr(), value.storage_offset()
    return *start, value.shape, value.stride(), value.dtype


def entry_in_unit(value: Tensor) -> RegistryEntry | None:
    """Of a parameter that lies in a unit, else None."""
    entry = find(value)
    if entry is None:
        return None
    engine, i = entry.handle.engine, entry.index
    return entry if engine.unit_of(i) >= 0 or engine.frozen_unit_of(i) >= 0 else None


def entry_with_master(value: Tensor) -> RegistryEntry | None:
    """As ``entry_in_unit``, for a parameter that is trained: it has a master."""
    entry = find(value)
    return entry if entry is not None and entry.handle.engine.unit_of(entry.index) >= 0 else None


def has_wider_master(value: Tensor) -> bool:
    """Whether ``value`` is a parameter with a master of more bits than its own."""
    return value.dtype != torch.float32 and entry_with_master(value) is not None


def held_value(value: Tensor) -> Tensor:
    """This rank's part of a value.

    A copy of its part for a parameter in a unit: of the fp32 master where the parameter is trained.
    Otherwise the tensor itself.
    """
    entry = entry_in_unit(value)
    if entry is None:
        return value.detach()
    handle, i = entry
    master = handle.as_parameter(handle.engine.current_master(i), i, value)
    return master if handle.engine.unit_of(i) >= 0 else master.to(value.dtype)


def write_held(target: Tensor, value: Tensor) -> None:
    """Give ``target``, and its master, a value as ``held_value`` shows it. Collective."""
    entry = entry_in_unit(target)
    if entry is None:
        target.copy_(value)
    else:
        entry.handle.write_value(entry.index, value)


def target_for(value: Tensor) -> Tensor:
    """A tensor that a saved value can be read into: always a copy of ``held_value``.

    It lies on the host where the value lies in no unit.
    """
    held = held_value(value)
    return held if entry_in_unit(value) is not None else held.to("cpu", copy=True)


def full_value(value: Tensor) -> Tensor:
    """The whole value, in its own dtype. Collective, where not every rank holds it."""
    entry = entry_in_unit(value)
    if entry is None or not entry.handle.engine.releases:
        return whole(value.detach())
    return whole(held_value(value).to(value.dtype))


@torch.no_grad()
def gather_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole ``state_dict()``, copied to the host, on rank 0; nothing on others. Collective.

    A tensor with several names is copied once.
    """
    state = ModelState.of(model)
    keeps = groups_of(model).rank == 0
    copies: dict[int, Tensor | None] = {}
    for value in state.tensors.values():
        if id(value) not in copies:
            full = full_value(value)  # all ranks take part
            copies[id(value)] = full.to("cpu", copy=True) if keeps else None
    if not keeps:
        return {}
    return {name: copies[id(value)] for name, value in state.tensors.items()} | state.objects


def _set_extra_state(model: nn.Module, name: str, state) -> None:
    for step in name.split(".")[:-1]:
        model = getattr(_uncompiled(model), step)
    _uncompiled(model).set_extra_state(state)


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def handles_of(model: nn.Module) -> list[Handle]:
    """The handles of the engines that shard parts of ``model``."""
    entries = map(find, model.parameters())
    return list({id(entry.handle): entry.handle for entry in entries if entry is not None}.values())


def groups_of(model: nn.Module) -> Groups:
    """The ranks that hold a model together; all ranks, where it is not sharded.

    Raises:
        TypeError: it is no module.
        ValueError: its parts are sharded over different ranks, or lie on dimensions of a mesh whose
            ranks are not all.
    """
    check_module(model, "a checkpoint")
    handles = handles_of(model)
    if not handles:
        together = dist.is_available() and dist.is_initialized()
        return resolve(None, None if together else ALONE, model.parameters())
    groups = handles[-1].groups
    if any(handle.groups.parent is not groups.parent for handle in handles):
        raise ValueError(
            "zero_ext: parts of the model are sharded over different process groups. Save and load "
            "each part by itself."
        )
    if groups.parent is not None and groups.parent not in distributed_c10d._world.pg_map:
        raise RuntimeError(
            f"{groups.where}the process group of this {type(model).__name__} was destroyed. "
            "Save, load and export before destroy_process_group()."
        )
    across = [each.across_meshes for each in handles if each.across_meshes is not None]
    return _ranks_of_mesh(model, groups, across) if across else groups


def _ranks_of_mesh(model: nn.Module, groups: Groups, across: list[AcrossMeshes]) -> Groups:
    """All ranks. Raises where the dimensions of the parameters' mesh make up a part of them."""
    others = dict.fromkeys(group for each in across for group in each.groups)
    ranks = groups.world * prod(group.size() for group in others)
    if ranks != dist.get_world_size():
        raise ValueError(
            f"{groups.where}the parameters lie on {ranks} of {dist.get_world_size()} ranks, in "
            "several dimensions of a mesh. Here that must be all ranks: save such a model with "
            "torch.distributed.checkpoint and a process_group of its ranks."
        )
    return resolve(None, None, model.parameters())


def refuse_meshes(model: nn.Module, what: str) -> None:
    """Raise where parameters are DTensors on other dimensions of a mesh."""
    if any(handle.across_meshes is not None for handle in handles_of(model)):
        raise NotImplementedError(
            f"zero_ext: {what} of a model with tensor parallelism: its parameters lie on several "
            "dimensions of a mesh. Save checkpoints with zero_ext.checkpoint.save()."
        )
