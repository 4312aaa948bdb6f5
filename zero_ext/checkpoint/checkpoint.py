"""Checkpoints of a model and its optimizers, for any stage and any number of ranks.

Note [What is in a checkpoint]
A folder in the format of torch.distributed.checkpoint. Each rank writes what it holds, and reads
what it will hold, whatever number of ranks wrote it:
- ``model.<name>``: what ``state_dict()`` names. Of a parameter that is trained its fp32 master:
  read into half precision it has the parameter's bits, and a step goes on from all of its own.
- ``optimizer.state.<parameter's name>.<state>``: the tensors of the optimizers' states.
- ``zero_ext``: everything that is no tensor, pickled, extra states once more.
What all ranks have (buffers, what is not sharded) is rank 0's.
"""

import copy
import io
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint import files
from zero_ext.checkpoint import optimizer_states as states
from zero_ext.checkpoint.contents import FORMAT, OBJECTS, Contents
from zero_ext.engine.registry import find
from zero_ext.ranks.agreement import all_or_none, check_same_on_all_ranks
from zero_ext.state.model_state import ModelState, groups_of, has_master, held_value, target_for


@torch.inference_mode(False)
@torch.no_grad()
def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
) -> Future | None:
    """Write a checkpoint of ``model`` and ``optimizer``, between two steps. Collective.

    It is written beside ``path`` and renamed when it is whole: a checkpoint that was there before
    stays until then. Gradients are not in it. Nothing is gathered; a rank needs memory for a copy
    of its masters meanwhile.

    Args:
        path: A folder that all ranks see. A checkpoint there is replaced, anything else refused;
            what else is kept beside a checkpoint's files stays.
        model: A sharded module, one whose parameters an optimizer of this package shards, or any.
        optimizer: Of the model's parameters, or several, which share none. A ``loss_scaler`` is
            saved with its optimizer.
        extra: Whatever else a restart needs (schedulers, counts, random states); pickled, rank 0's.
        async_: Copy everything to host memory, and return while it is being written. Saves follow
            each other in the order of their calls.
    Returns:
        With ``async_`` a future, whose ``result()`` is None once the checkpoint is at ``path``, and
        raises what went wrong (which is warned of, too). Ask for it before the process group ends.
    Raises:
        ValueError: ``path`` holds something else, or an optimizer a parameter that is not the
            model's or another's, too.
        RuntimeError: some rank could not write, or the call came from inside a backward.
    """
    groups = groups_of(model)
    with all_or_none(groups, f"save() of checkpoint '{path}'"):
        path = Path(path).resolve()
        files.refuse_to_replace(path)
        of_model = ModelState.of(model)
        state: dict[str, Any] = {f"model.{n}": held_value(v) for n, v in of_model.tensors.items()}
        state |= {f"model.{n}": copy.deepcopy(v) for n, v in of_model.objects.items()}
        objects = {
            "format": FORMAT,
            "id": secrets.token_hex(8),
            "extra": extra or {},
            "model": of_model.objects,
        }
        tensors, objects["optimizers"] = states.states_of(states.listed(optimizer), of_model)
        state |= tensors
        state[OBJECTS] = _pickled(objects)
        if async_:
            state = {key: files.copied_to_host(value) for key, value in state.items()}
    check_same_on_all_ranks(
        groups,
        [f"folder {path.name}", *sorted(state)],
        "checkpoints to be saved",
        remedy="Save the same model and optimizer to the same folder on every rank.",
    )
    writer = files.writer_of(groups)
    return (writer.start if async_ else writer.write)(path, state, groups)


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
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
        optimizer: As many as were saved, in the same order, or none.
        strict: Names that the checkpoint or the model lacks are an error; else they are passed over
            with a warning.
    Raises:
        ValueError: names, shapes, or the optimizers or their groups do not fit. Nothing is changed.
        RuntimeError: some rank could not read it. Nothing is changed.
    """
    return _load(path, model, states.listed(optimizer), strict)


def load_optimizers(
    path: str | os.PathLike,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    strict: bool = True,
) -> None:
    """As ``load``, but for what ``model`` has loaded by itself: of it, masters alone get the bits
    that their parameters have not. What was changed since keeps its value."""
    _load(path, model, optimizers, strict, keeps_values=True)


@torch.inference_mode(False)
@torch.no_grad()
def _load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    strict: bool,
    keeps_values: bool = False,
) -> dict[str, Any]:
    groups = groups_of(model)
    what = f"load() of checkpoint '{path}'"
    files.writer_of(groups).wait()
    with all_or_none(groups, what):
        path = Path(path).resolve()
        _prepare(model)
        of_model = ModelState.of(model)
        contents = Contents.of(path)
        names, objects = contents.matching(of_model, strict)
        if keeps_values:
            names = [name for name in names if has_master(of_model.tensors[name])]
            objects = {}
        values = {contents.keys[name]: target_for(of_model.tensors[name]) for name in names}
        objects |= {name: contents.objects[name] for name in objects.keys() & contents.objects}
        # What torch has written is read into what there is, part by part.
        templates = {contents.keys[n]: objects[n] for n in objects.keys() - contents.objects}
        saved = states.saved_states(contents, optimizers, of_model)
        for theirs, ours in zip(saved, optimizers, strict=True):
            values |= states.targets_of(theirs, ours, of_model, contents)
        of_model.check_writable(names)
    check_same_on_all_ranks(
        groups,
        [f"checkpoint {contents.id}", f"strict={strict}", *sorted(values), *sorted(templates)],
        "checkpoints to be loaded",
        remedy="Load the same one into the same model and optimizer on every rank.",
    )
    with all_or_none(groups, what):
        files.read(path, values)
        files.read(path, templates)
    with all_or_none(groups, what):  # optimizers have checks of their own
        loads = [
            states.checked_load(theirs, ours, of_model, values)
            for theirs, ours in zip(saved, optimizers, strict=True)
        ]
    with all_or_none(groups, what):
        for load_optimizer in loads:
            load_optimizer()
    if keeps_values:
        for name in names:
            _keep_changes(values, contents.keys[name], of_model.tensors[name])
    of_model.write(
        model,
        {name: values[contents.keys[name]] for name in names},
        {name: templates.get(contents.keys[name], value) for name, value in objects.items()},
    )
    return contents.extra


def _keep_changes(values: dict[str, Any], key: str, parameter: torch.Tensor) -> None:
    now, saved = held_value(parameter), values[key]
    unchanged = now.to(parameter.dtype) == saved.to(parameter.dtype)
    values[key] = torch.where(unchanged, saved, now)


def read_whole(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's ``state_dict()``, whole and on the host, with masters for parameters that were
    trained, and ``extra``. Not collective."""
    contents = Contents.of(Path(path).resolve())
    values = {
        name: torch.empty(contents.tensors[key].size, dtype=contents.tensors[key].properties.dtype)
        for name, key in contents.keys.items()
        if key in contents.tensors
    }
    files.read(contents.path, {contents.keys[name]: value for name, value in values.items()})
    return values | contents.objects, contents.extra


def _prepare(model: nn.Module) -> None:
    """Parameters that were frozen before have masters and states from now on. Collective."""
    found = [find(parameter) for parameter in model.parameters()]
    for handle in {id(entry[0]): entry[0] for entry in found if entry is not None}.values():
        handle.refuse_forgotten_writes("load() of a checkpoint")
        handle.adopt_unfrozen()
        for optimizer in handle.optimizers:
            optimizer._adopt_unfrozen()


def _pickled(objects: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    return buffer.getvalue()
