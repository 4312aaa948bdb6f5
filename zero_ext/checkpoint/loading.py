"""Loading what a checkpoint holds into a model and its optimizers."""

import functools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint import failures, folders
from zero_ext.checkpoint.contents import Contents
from zero_ext.checkpoint.optimizer_states import SavedOptimizer, listed
from zero_ext.checkpoint.writer import writer_of
from zero_ext.ranks.agreement import all_or_none, check_same_on_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import (
    ModelState,
    handles_of,
    has_wider_master,
    held_value,
    target_for,
)

_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Give ``model`` and ``optimizer`` what a checkpoint holds; returns its ``extra``. Collective.

    Call it between two steps; gradients stay as they are. Sharded tensors in ``extra`` are whole.

    Success means that every tensor that was read has the bits that were saved: their digests are
    checked. Checkpoints of torch and of versions without digests are loaded without that check.

    Stage, number of ranks, dtypes and units may differ from those that saved it. Values that differ
    between ranks, such as running statistics and ``extra``, are given back to the rank that had
    them. If the number of ranks differs, every rank gets rank 0's, and a warning names them.

    A checkpoint of a plain or an FSDP2 model by ``torch.distributed.checkpoint.save({"model":
    model.state_dict()}, …)`` is read as well. All of it is read before anything is changed. So a
    rank needs memory for a second copy of its masters and of its part of the optimizer's state, and
    host memory for what is not sharded.

    Args:
        optimizer: As many as were saved, in the same order, or none.
        strict: Names that the checkpoint or the model lacks are an error; else they are passed over
            with a warning.
        allow_pickle: Also load ``extra``, extra states and settings of optimizers that consist of
            more than tensors and plain containers. Unpickling them can run any code that the file
            names: pass True only for files that you trust. Classes that are known to
            ``torch.serialization.add_safe_globals`` do not need it.
    Raises:
        TypeError: ``path`` is no path.
        ValueError: there is no checkpoint; names, shapes, or the optimizers or their groups do not
            fit; the metadata is damaged; or objects need ``allow_pickle=True``. Nothing is changed.
        RuntimeError: some rank could not read it, or its bytes are damaged. Nothing is changed.
    """
    return _load(path, model, optimizer, strict, allow_pickle)


def from_deepspeed(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    tag: str | int | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """``load`` what DeepSpeed 0.14 to 0.19 has saved with stages 1 to 3. Collective.

    Parameters get the values of DeepSpeed's fp32 masters. Its number of ranks may be another one.
    Nothing is unpickled but tensors and plain containers.

    Args:
        directory: What DeepSpeed's ``save_checkpoint`` was given.
        tag: A folder in it. Default: what the file ``latest`` names.
    Returns:
        ``client_state``; ``counts``: global steps, samples and skipped steps; and ``lr_scheduler``,
        the state of the schedule.
    Raises:
        As ``load``. ValueError: files are missing, are those of tensor, pipeline or expert
        parallelism, or hold objects that are not known to ``torch.serialization.add_safe_globals``.
    """
    return _load(
        directory, model, optimizer, strict, False, find=lambda d, *_: folders.tagged(d, tag)
    )


def load_optimizers(
    path: str | os.PathLike,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    strict: bool = True,
    allow_pickle: bool = False,
) -> None:
    """As ``load``, for a model that has loaded its values by itself.

    Of the model only masters are loaded, with the bits that their parameters lack. A value that was
    changed since is kept.
    """
    _load(path, model, optimizers, strict, allow_pickle, keeps_values=True)


def _load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
    strict: bool,
    allow_pickle: bool,
    keeps_values: bool = False,
    find: Callable[..., Path] = folders.path_of,
) -> dict[str, Any]:
    what = f"load() of checkpoint '{path}'"
    groups, (path, optimizers) = failures.checked(
        what, model, lambda: (find(path, "load", model), listed(optimizer))
    )
    writer_of(groups).wait()
    contents = functools.partial(Contents.of, path, allow_pickle, groups)
    return load_contents(
        what, groups, contents, model, optimizers, strict, allow_pickle, keeps_values
    )


@torch.inference_mode(False)
@torch.no_grad()
def load_contents(
    what: str,
    groups: Groups,
    opened: Callable[[], Contents],
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    strict: bool = True,
    allow_pickle: bool = False,
    keeps_values: bool = False,
) -> dict[str, Any]:
    """As ``load``, of the contents that ``opened()`` returns. ``what`` names the call. Collective.

    ``keeps_values``: see ``load_optimizers``.
    """
    with failures.together(groups, what):
        _prepare(model)
        of_model = ModelState.of(model, optimizers)
        contents = opened()
        names, objects = contents.matching(of_model, strict)
        if keeps_values:
            beside, tensors = of_model.beside, of_model.tensors
            names = [name for name in names if name in beside or has_wider_master(tensors[name])]
            objects = {}
        values = {contents.keys[name]: target_for(of_model.tensors[name]) for name in names}
        objects |= {name: contents.objects[name] for name in objects.keys() & contents.objects}
        # Objects that torch has written are read into the present ones, part by part.
        templates = {contents.keys[n]: objects[n] for n in objects.keys() - contents.objects}
        saved = SavedOptimizer.all_of(contents, optimizers, of_model)
        for each in saved:
            values |= each.targets()
        of_model.check_writable(names)
    check_same_on_all_ranks(
        groups,
        [f"checkpoint {contents.id}", f"strict={strict}", *sorted(values), *sorted(templates)],
        "checkpoints to be loaded",
        remedy="Load the same one into the same model and optimizer on every rank.",
    )
    with failures.together(groups, what):
        contents.read(values)
        contents.read(templates, allow_pickle)
        extra = {} if keeps_values else contents.whole_extra()  # their caller takes none
    with all_or_none(groups, what):  # optimizers have checks of their own
        loads = [each.checked_load(values) for each in saved]
    with all_or_none(groups, what):
        for load_optimizer in loads:
            load_optimizer()
    if keeps_values:
        for name in filter(lambda name: name not in of_model.beside, names):
            _keep_changes(values, contents.keys[name], of_model.tensors[name])
    of_model.write(
        model,
        {name: values[contents.keys[name]] for name in names},
        {name: templates.get(contents.keys[name], value) for name, value in objects.items()},
    )
    _log.debug("%sended %s: %d values", groups.where, what, len(values))
    return extra


def _keep_changes(values: dict[str, Any], key: str, parameter: torch.Tensor) -> None:
    now, saved = held_value(parameter), values[key]
    unchanged = now.to(parameter.dtype) == saved.to(parameter.dtype)
    values[key] = torch.where(unchanged, saved, now)


def read_whole(
    path: str | os.PathLike, *, allow_pickle: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's whole ``state_dict()`` on the host, and ``extra``. Not collective.

    Parameters that were trained have the values of their masters. ``allow_pickle``: as of ``load``.
    """
    with failures.named(None, f"read_whole() of checkpoint '{path}'"):
        contents = Contents.of(folders.path_of(path), allow_pickle)
    # Tied parameters may have one key.
    read = contents.whole(key for key in contents.keys.values() if key in contents.tensors)
    values = {name: read[key] for name, key in contents.keys.items() if key in read}
    return values | contents.objects, contents.whole_extra()


def _prepare(model: nn.Module) -> None:
    """Parameters that were frozen before get masters and states. Collective."""
    for handle in handles_of(model):
        handle.refuse_forgotten_writes("load() of a checkpoint")
        handle.adopt_unfrozen()
        for optimizer in handle.optimizers:
            optimizer.follow_groups()
