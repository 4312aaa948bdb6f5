"""Writing and reading the files of a checkpoint, with torch.distributed.checkpoint."""

import contextlib
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from zero_ext.checkpoint import folders
from zero_ext.ranks.agreement import all_or_none, of_all_ranks
from zero_ext.ranks.comm_groups import timeout_of
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.shard_tensor import ShardTensor, wrap

_VISIBLE_WITHIN_S = 60.0  # a network file system shows late what another host has made
ALONE = "torch.distributed is disabled"  # a warning of dcp


def refuse_to_replace(path: Path) -> None:
    """Raises where ``path`` is something else than a checkpoint."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"zero_ext: '{path}' is a file; a checkpoint is a folder.")
    if path.is_dir() and not folders.is_checkpoint(path) and folders.users_files(path):
        raise ValueError(
            f"zero_ext: '{path}' holds something else than a checkpoint, which would be lost. "
            "Choose another path."
        )


def write(path: Path, state: dict[str, Any], groups: Groups) -> None:
    """Write ``state`` beside ``path``, and rename it to ``path`` when it is whole. Collective.

    Raises:
        RuntimeError: some rank could not write. What was at ``path`` is unchanged.
    """
    what = f"save() of checkpoint '{path}'"
    token = secrets.token_hex(4)
    if groups.world > 1:
        token = of_all_ranks(token, groups, what)[0]
    new = folders.NewFolder(path, token)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with all_or_none(groups, what):
            if groups.rank == 0:
                new.make()
        with _as_exceptions(groups, what):
            dcp.save(
                state,
                checkpoint_id=new.folder,
                planner=planner,
                process_group=groups.parent,
                no_dist=groups.world == 1,
            )
        with all_or_none(groups, what):
            _check_that_it_is_shared(new.folder, groups)
        with all_or_none(groups, what):
            if groups.rank == 0:
                new.commit()
    except Exception:  # it is raised on all ranks, each of which may have a folder of its own
        new.discard()
        vars(planner).clear()  # its tensors, which the error would keep
        raise


def _check_that_it_is_shared(incomplete: Path, groups: Groups) -> None:
    """Raise if ranks write to different folders, of which only rank 0's would be renamed."""
    patience_s = _VISIBLE_WITHIN_S
    if groups.world > 1:  # the others wait meanwhile
        patience_s = min(patience_s, timeout_of(groups).total_seconds() / 2)
    deadline = time.monotonic() + patience_s
    while not (incomplete / ".metadata").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"zero_ext: what rank 0 has written to '{incomplete.parent}' is not there for this "
                "rank. Save to a folder that all ranks share."
            )
        time.sleep(0.1)
        os.listdir(incomplete.parent)  # makes a network file system ask its server again


def read_metadata(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def read(path: Path, targets: dict[str, Any]) -> None:
    """Read the values of ``targets``, tensors in place. Not collective.

    Of sharded tensors this rank reads its parts.
    """
    if not targets:
        return
    with warnings.catch_warnings(), _as_exceptions(None, f"load() of checkpoint '{path}'"):
        warnings.filterwarnings("ignore", message=ALONE)
        dcp.load(targets, checkpoint_id=path, no_dist=True)


@contextlib.contextmanager
def _as_exceptions(groups: Groups | None, what: str) -> Iterator[None]:
    """Raise torch's CheckpointException, which `except Exception` does not catch, as another."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        where = "zero_ext: "
        if groups is not None:
            what, where = f"{what}: rank {groups.global_ranks[rank]}", groups.where
        raise RuntimeError(f"{where}{what}: {type(cause).__name__}: {cause}") from error


def copied_to_host(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return wrap(value.to_local().to("cpu", copy=True), value)
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
