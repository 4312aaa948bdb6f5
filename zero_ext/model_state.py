"""ModelState: what ``state_dict()`` of a model names, and how a checkpoint sees it."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_ext.groups import Groups, resolve
from zero_ext.handle import Handle, find
from zero_ext.shard_tensor import ShardTensor


class ModelState(NamedTuple):
    """Parameters and buffers themselves, and extra states that are no tensors, by name."""

    tensors: dict[str, Tensor]
    objects: dict[str, Any]
    names: dict[int, str]  # id of a parameter -> its first name

    @staticmethod
    def of(model: nn.Module) -> "ModelState":
        state = {
            # torch.compile's wrappers are no part of a name, as in torch's own checkpoints.
            name.replace("_orig_mod.", ""): value
            for name, value in model.state_dict(keep_vars=True).items()
        }
        names: dict[int, str] = {}
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                names.setdefault(id(value), name)
        objects = {name: v for name, v in state.items() if _is_object(name, v)}
        tensors = {name: v for name, v in state.items() if name not in objects}
        return ModelState(tensors, objects, names)

    def write(self, values: dict[str, Tensor]) -> None:
        """Give the tensors of these names new values, masters included. Collective."""
        for name, value in values.items():
            target = self.tensors[name]
            place = place_of(target)
            if place is None:
                target.copy_(value)
            else:
                full = value.full_tensor() if isinstance(value, ShardTensor) else value
                place[0].engine.write_parameter(place[1], full)


def _is_object(name: str, value) -> bool:
    # A module makes its extra state for each call, and takes it as a whole.
    return not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state"


def place_of(value: Tensor) -> tuple[Handle, int] | None:
    """The handle and the index of a parameter that lies in a unit."""
    entry = find(value)
    if entry is None:
        return None
    engine, i = entry[0].engine, entry[1]
    return entry if engine.unit_of(i) >= 0 or engine.frozen_unit_of(i) >= 0 else None


def held_value(value: Tensor) -> Tensor:
    """What this rank holds: a copy of its part of a parameter in a unit, of the fp32 master of one
    that is trained; of everything else the tensor itself."""
    place = place_of(value)
    if place is None:
        return value.detach()
    handle, i = place
    master = handle.as_parameter(handle.engine.current_master(i), i, value)
    return master if handle.engine.unit_of(i) >= 0 else master.to(value.dtype)


def target_for(value: Tensor) -> Tensor:
    """To be read into: as ``held_value``, but always a copy; of what is no part on the host."""
    held = held_value(value)
    return held if place_of(value) is not None else held.to("cpu", copy=True)


def full_value(value: Tensor) -> Tensor:
    """All of it, in its own dtype. Collective, where it is not on every rank."""
    place = place_of(value)
    if place is None or not place[0].engine.releases:
        return value.detach()
    mine = held_value(value).to(value.dtype)
    return mine.full_tensor() if isinstance(mine, ShardTensor) else mine


def set_extra_state(model: nn.Module, name: str, state) -> None:
    """``name``: as in ``ModelState.objects``."""
    for step in name.split(".")[:-1]:
        model = getattr(_uncompiled(model), step)
    _uncompiled(model).set_extra_state(state)


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def groups_of(model: nn.Module) -> Groups:
    """The ranks that a model is sharded over; all, where it is not.

    Raises:
        ValueError: its parts are sharded over different ones.
    """
    found = [find(parameter) for parameter in model.parameters()]
    every = {id(entry[0].groups.parent): entry[0].groups for entry in found if entry is not None}
    if len(every) > 1:
        raise ValueError(
            "zero_ext: parts of the model are sharded over different process groups. Save and load "
            "each part by itself."
        )
    return next(iter(every.values()), None) or resolve(None, None, model.parameters())
