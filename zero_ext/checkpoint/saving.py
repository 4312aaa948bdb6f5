"""Saving a model and its optimizers, for any stage and any number of ranks.

Note [What is in a checkpoint]
A checkpoint is a folder in the format of torch.distributed.checkpoint. Each rank writes what it
holds, and reads what it will hold. The number of ranks may change in between. The keys:
- ``model.<name>``: each entry of ``state_dict()``. For a parameter that is trained it is the fp32
  master: rounded to half precision it has the parameter's bits, and a step goes on from all bits.
- ``optimizer.state.<parameter's name>.<state>``: the tensors of the optimizers' states.
- ``zero_ext``: everything that is no tensor, pickled. Extra states are here as well, and what
  optimizers keep under names, tensors too.
- ``zero_ext.extra``: what the user has passed, pickled. Its sharded tensors: ``…extra[<key>]…``.
- ``zero_ext.rank<rank>.<key>``: values that differ between ranks, see Note [Values of ranks].
"""

import copy
import os
import secrets
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from typing import Any, Literal, overload

import torch
from torch import nn

from zero_ext.checkpoint import failures, files, folders, pickles, rank_values
from zero_ext.checkpoint.contents import FORMAT, OBJECTS
from zero_ext.checkpoint.optimizer_states import listed, states_of, torchs_groups
from zero_ext.checkpoint.rank_values import EXTRA
from zero_ext.checkpoint.writer import writer_of
from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import ModelState, held_value

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


@overload
def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: _Optimizers = None,
    *,
    extra: dict[str, Any] | None = None,
    async_: Literal[False] = False,
) -> None: ...
@overload
def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: _Optimizers = None,
    *,
    extra: dict[str, Any] | None = None,
    async_: Literal[True],
) -> Future: ...


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: _Optimizers = None,
    *,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
) -> Future | None:
    """Write a checkpoint of ``model`` and ``optimizer``, between two steps. Collective.

    It is written beside ``path``, with digests that ``load`` checks, and renamed when it is whole.
    A checkpoint that was there before stays until then. Several runs may save to one path: the last
    one to end is kept. Gradients are not saved. Nothing is gathered, but a rank needs memory for a
    copy of its masters.

    Args:
        path: A folder that all ranks share. A checkpoint there is replaced, and the user's own
            files in it are kept. A folder without a checkpoint must be empty.
        model: A sharded module, one whose parameters an optimizer of this package shards, or any.
        optimizer: Of the model's parameters, or several, which share none. A ``loss_scaler`` is
            saved with its optimizer.
        extra: Whatever else a restart needs (schedulers, counts, random states, ``EMA``); pickled,
            but for sharded tensors. Ranks may pass different ones, but the same sharded tensors.
            ``load`` needs ``allow_pickle=True`` for what is more than tensors, numbers, strings
            and plain containers of them.
        async_: Copy everything to host memory, and return while it is being written. Saves are
            written in the order of their calls.
    Returns:
        With ``async_`` a future. Its ``result()`` is None once the checkpoint is at ``path``.
        Where the save failed it raises the error, which is also a warning. Call it before the
        process group ends.
    Raises:
        TypeError, ValueError: ``path`` is no path, or holds something else; ``extra`` is no dict or
            has a value that cannot be pickled; or an optimizer has a parameter that is not the
            model's, or that another optimizer has, too.
        RuntimeError: some rank could not write, or the call came from inside a backward.
    """
    return save_without((), path, model, optimizer, extra=extra, async_=async_)


@torch.inference_mode(False)
@torch.no_grad()
def save_without(
    left_out: Collection[str],
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
    *,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
) -> Future | None:
    """``save``, but for the entries of the model with the names ``left_out``."""
    what = f"save() of checkpoint '{path}'"
    groups, (path, optimizers) = failures.checked(
        what, model, lambda: (folders.path_of(path, "save", model), listed(optimizer))
    )
    with failures.together(groups, what):
        folders.refuse_to_replace(path)
        of_model, state, objects = held_state(model, optimizers, groups, left_out)
        extra, apart = pickles.set_apart({} if extra is None else extra, EXTRA)
        saved_extra = pickles.pickled_extra(extra)
        digests = rank_values.digests_of(state, extra, of_model) if groups.world > 1 else {}
        state |= {OBJECTS: pickles.pickled(objects), EXTRA: saved_extra, **apart}
        state |= torchs_groups(objects["optimizers"])
    check_same_on_all_ranks(
        groups,
        [f"folder {path.name}", *sorted(state)],
        "checkpoints to be saved",
        remedy="Save the same model, optimizer and sharded tensors of extra to the same folder on "
        "every rank.",
    )
    if groups.world > 1:
        state |= rank_values.own_values(state, digests, groups)
    if async_:
        with failures.together(groups, what):
            state = {key: files.copied_to_host(value) for key, value in state.items()}
    writer = writer_of(groups)
    return (writer.start if async_ else writer.write)(path, state, groups)


def held_state(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    groups: Groups,
    left_out: Collection[str] = (),
) -> tuple[ModelState, dict[str, Any], dict[str, Any]]:
    """The model's names, this rank's values by key, and its objects that are no tensors."""
    of_model = ModelState.of(model, optimizers)
    state: dict[str, Any] = {
        f"model.{n}": held_value(v) for n, v in of_model.tensors.items() if n not in left_out
    }
    state |= {f"model.{n}": copy.deepcopy(v) for n, v in of_model.objects.items()}
    objects = {
        "format": FORMAT,
        "id": secrets.token_hex(8),
        "ranks": groups.world,
        "model": of_model.objects,
    }
    tensors, objects["optimizers"] = states_of(optimizers, of_model)
    return of_model, state | tensors, objects
