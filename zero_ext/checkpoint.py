"""Checkpoints of a model and its optimizer, for any stage and any number of ranks.

Note [What is in a checkpoint]
A folder in the format of torch.distributed.checkpoint. Each rank writes what it holds, and reads
what it will hold, whatever number of ranks wrote it:
- ``model.<name>``: parameters and buffers under their names in ``state_dict()``. Of a parameter
  that is trained its fp32 master: read into half precision it has the parameter's bits, and a step
  goes on from all of its own.
- ``optimizer.state.<parameter's name>.<state>``: the tensors of the optimizer's state.
- ``zero_ext``: everything that is no tensor, pickled.
What all ranks have (buffers, what is not sharded) is rank 0's.
"""

import io
import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zero_ext import checkpoint_files as files
from zero_ext.export import export_safetensors
from zero_ext.groups import all_or_none
from zero_ext.handle import find
from zero_ext.model_state import ModelState, groups_of, held_value, set_extra_state, target_for

__all__ = ["export_safetensors", "load", "save"]

_OBJECTS = "zero_ext"
_FORMAT = 1


@torch.no_grad()
def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
) -> Future | None:
    """Write a checkpoint of ``model`` and ``optimizer``, between two steps. Collective.

    It is written beside ``path`` and renamed when it is whole: a checkpoint that was there before
    stays until then. Gradients are not in it. Nothing is gathered; a rank needs memory for a copy
    of its masters meanwhile.

    Args:
        path: A folder that all ranks see. A checkpoint there is replaced, anything else refused.
        model: A sharded module, one whose parameters an optimizer of this package shards, or any.
        optimizer: Of the model's parameters. Its ``loss_scaler`` is saved with it.
        extra: Whatever else a restart needs (schedulers, counts, random states); pickled, rank 0's.
        async_: Copy everything to host memory, and return while it is being written. Saves follow
            each other in the order of their calls.
    Returns:
        With ``async_`` a future, whose ``result()`` is None once the checkpoint is at ``path``, and
        raises what went wrong (which is warned of, too). Ask for it before the process group ends.
    Raises:
        ValueError: ``path`` holds something else, or the optimizer a parameter that is not the
            model's.
        RuntimeError: some rank could not write, or the call came from inside a backward.
    """
    path = Path(path).resolve()
    groups = groups_of(model)
    with all_or_none(groups, f"save() of checkpoint '{path}'"):
        files.refuse_to_replace(path)
        of_model = ModelState.of(model)
        state: dict[str, Any] = {f"model.{n}": held_value(v) for n, v in of_model.tensors.items()}
        objects = {"format": _FORMAT, "extra": extra or {}, "model": of_model.objects}
        if optimizer is not None:
            tensors, objects["optimizer"] = _optimizer_state(optimizer, of_model)
            state |= tensors
        state[_OBJECTS] = _pickled(objects)
        if async_:
            state = {key: files.copied_to_host(value) for key, value in state.items()}
    writer = files.writer_of(groups)
    return (writer.start if async_ else writer.write)(path, state, groups)


@torch.no_grad()
def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Give ``model`` and ``optimizer`` what a checkpoint holds; returns its ``extra``. Collective.

    Stage, number of ranks, dtypes and units may be others than when it was saved. What
    ``torch.distributed.checkpoint.save({"model": model.state_dict()}, …)`` has written of a plain
    or an FSDP2 model is read as well. All of it is read before anything is changed: a rank needs
    memory for a second copy of its masters and its part of the optimizer's state, and on the host
    for what is not sharded. To be called between two steps; gradients stay as they are. Whoever
    wrote the checkpoint is trusted: what is no tensor is unpickled.

    Args:
        strict: Names that the checkpoint or the model lacks are an error; else they are passed over
            with a warning.
    Raises:
        ValueError: names, shapes or the optimizer's groups do not fit. Nothing is changed.
        RuntimeError: some rank could not read it. Nothing is changed.
    """
    path = Path(path).resolve()
    groups = groups_of(model)
    what = f"load() of checkpoint '{path}'"
    with all_or_none(groups, what):
        of_model = ModelState.of(model)
        metadata = files.read_metadata(path)
        objects = _read_objects(path, metadata)
        names = _matching_names(path, metadata, objects, of_model, strict)
        values = {f"model.{name}": target_for(of_model.tensors[name]) for name in names}
        if optimizer is not None:
            saved = _saved_optimizer(path, objects, optimizer, of_model)
            values |= _optimizer_targets(saved, optimizer, of_model, metadata)
        files.read(path, values)
    if optimizer is not None:  # which has checks of its own
        with all_or_none(groups, what):
            optimizer.load_state_dict(_state_dict(saved, optimizer, of_model, values))
            scaler = getattr(optimizer, "loss_scaler", None)
            if scaler is not None and saved["loss_scaler"] is not None:
                scaler.load_state_dict(saved["loss_scaler"])
    of_model.write({name: values[f"model.{name}"] for name in names})
    for name, value in objects.get("model", {}).items():
        if name in of_model.objects:
            set_extra_state(model, name, value)
    return objects.get("extra", {})


def _pickled(objects: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    return buffer.getvalue()


def _read_objects(path: Path, metadata: Metadata) -> dict[str, Any]:
    if _OBJECTS not in metadata.state_dict_metadata:  # torch alone has written it
        return {}
    target: dict[str, Any] = {_OBJECTS: b""}
    files.read(path, target)
    objects = torch.load(io.BytesIO(target[_OBJECTS]), weights_only=False, map_location="cpu")
    if objects["format"] > _FORMAT:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has format {objects['format']}, this version reads "
            f"formats up to {_FORMAT}."
        )
    return objects


def _matching_names(
    path: Path, metadata: Metadata, objects: dict[str, Any], of_model: ModelState, strict: bool
) -> list[str]:
    """Of the tensors that both have; checks their shapes, and that the other names are the same."""
    shapes = {
        key.removeprefix("model."): item.size
        for key, item in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(item, TensorStorageMetadata)
    }
    there = shapes.keys() | objects.get("model", {}).keys()
    here = of_model.tensors.keys() | of_model.objects.keys()
    for verb, names in (("lacks", here - there), ("has, and the model has not,", there - here)):
        if not names:
            continue
        first = ", ".join(f"'{name}'" for name in sorted(names)[:8])
        message = f"zero_ext: checkpoint '{path}' {verb} {first}{', …' if len(names) > 8 else ''}"
        if strict:
            raise ValueError(f"{message}. strict=False passes such names over.")
        warnings.warn(f"{message}: passed over.", stacklevel=4)
    common = [name for name in of_model.tensors if name in shapes]
    for name in common:
        shape = of_model.tensors[name].shape
        if shape != shapes[name]:
            raise ValueError(
                f"zero_ext: '{name}' has shape {tuple(shape)} in the model, and "
                f"{tuple(shapes[name])} in checkpoint '{path}'."
            )
    return common


# The optimizer's state


def _names(optimizer: torch.optim.Optimizer, of_model: ModelState) -> list[list[str]]:
    """Of each group's parameters."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in of_model.names:
                raise ValueError(
                    f"zero_ext: parameter {i} of the optimizer's group {g}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's."
                )
    return [[of_model.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _key(name: str, state: str) -> str:
    return f"optimizer.state.{name}.{state}"


def _optimizer_state(
    optimizer: torch.optim.Optimizer, of_model: ModelState
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by key, and everything else."""
    names = _names(optimizer, of_model)
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    states: dict[str, list[str]] = {}  # which are tensors
    objects: dict[str, dict[str, Any]] = {}
    for group, group_names in zip(state_dict["param_groups"], names, strict=True):
        for number, name in zip(group["params"], group_names, strict=True):
            values = state_dict["state"].get(number, {})
            states[name] = [s for s, value in values.items() if isinstance(value, Tensor)]
            objects[name] = {s: value for s, value in values.items() if s not in states[name]}
            tensors |= {_key(name, s): values[s].detach() for s in states[name]}
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state_dict["param_groups"]
    ]
    scaler = getattr(optimizer, "loss_scaler", None)
    return tensors, {
        "names": names,
        "settings": settings,
        "states": states,
        "objects": objects,
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }


def _saved_optimizer(
    path: Path, objects: dict[str, Any], optimizer: torch.optim.Optimizer, of_model: ModelState
) -> dict[str, Any]:
    """What ``_optimizer_state`` has put into ``objects``, if the groups have these parameters."""
    names = _names(optimizer, of_model)
    saved = objects.get("optimizer")
    if saved is None:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has no optimizer's state. Load the model alone."
        )
    if len(saved["names"]) != len(names):
        raise ValueError(
            f"zero_ext: the optimizer has {len(names)} groups, and {len(saved['names'])} in "
            f"checkpoint '{path}'."
        )
    for g, (here, there) in enumerate(zip(names, saved["names"], strict=True)):
        for name in sorted(set(here) ^ set(there)):
            where = "not in the checkpoint's" if name in here else "in the checkpoint's alone"
            raise ValueError(
                f"zero_ext: the optimizer's group {g} has other parameters than in checkpoint "
                f"'{path}': '{name}' is {where}."
            )
    return saved


def _optimizer_targets(
    saved: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    of_model: ModelState,
    metadata: Metadata,
) -> dict[str, Tensor]:
    targets = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = of_model.names[id(parameter)]
            for state in saved["states"][name]:
                item = metadata.state_dict_metadata[_key(name, state)]
                targets[_key(name, state)] = _target(parameter, item)
    return targets


def _target(parameter: Tensor, item: TensorStorageMetadata) -> Tensor:
    """This rank's part of a state, where it has one of each element; else all of it."""
    place = find(parameter)
    dtype = item.properties.dtype
    counts = parameter.dim() == 0 or item.size != parameter.shape
    if place is None or place[0].engine.unit_of(place[1]) < 0 or counts:
        return torch.empty(item.size, dtype=dtype, device="cpu")
    handle, i = place
    local = torch.empty_like(handle.engine.master_slice(i), dtype=dtype)
    return handle.as_parameter(local, i, parameter)


def _state_dict(
    saved: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    of_model: ModelState,
    values: dict[str, Tensor],
) -> dict[str, Any]:
    """As the optimizer's ``load_state_dict`` takes it."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for names, settings in zip(_names(optimizer, of_model), saved["settings"], strict=True):
        numbers = range(len(state), len(state) + len(names))
        for number, name in zip(numbers, names, strict=True):
            tensors = {s: values[_key(name, s)] for s in saved["states"][name]}
            state[number] = tensors | saved["objects"][name]
        groups.append({**settings, "params": list(numbers)})
    return {"state": {n: values for n, values in state.items() if values}, "param_groups": groups}
