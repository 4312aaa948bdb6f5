"""Writing and reading the files of a checkpoint, with torch.distributed.checkpoint."""

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import re
import secrets
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero_ext.checkpoint import digests, failures, folders, pickles
from zero_ext.ranks.agreement import naming, of_all_ranks
from zero_ext.ranks.comm_groups import timeout_of
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.shard_tensor import ShardTensor, wrap

_HAS_DIGESTS = "zero_ext.digests"  # in the metadata of checkpoints that have a file of them
_VISIBLE_WITHIN_S = 60.0  # a network file system shows late what another host has made
_log = logging.getLogger(__name__)

ALONE = "torch.distributed is disabled"  # a warning of dcp


def write(path: Path, state: dict[str, Any], groups: Groups) -> None:
    """Write ``state`` beside ``path``, and rename it to ``path`` when it is whole. Collective.

    Raises:
        RuntimeError: some rank could not write. What was at ``path`` is unchanged.
    """
    _log.debug("%swrites checkpoint '%s': %d values", groups.where, path, len(state))
    what = f"save() of checkpoint '{path}'"
    token = secrets.token_hex(4)
    if groups.world > 1:
        token = of_all_ranks(token, groups, what)[0]
    new = folders.NewFolder(path, token)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        with failures.together(groups, what):
            if groups.rank == 0:
                new.make()
        waiting = naming(what) if groups.world > 1 else contextlib.nullcontext()
        with failures.named(groups, what), waiting:
            dcp.save(
                state,
                storage_writer=DigestingWriter(new.folder),
                planner=planner,
                process_group=groups.parent,
                no_dist=groups.world == 1,
            )
        with failures.together(groups, what):
            _check_that_it_is_shared(new.folder, groups)
        with failures.together(groups, what):
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


@dataclasses.dataclass(frozen=True)
class _DigestedResult(WriteResult):
    """A rank's report to rank 0 about an entry that it has written."""

    digests: tuple[int, ...] = ()


class DigestingWriter(dcp.FileSystemWriter):
    """As torch's, with a file of the digests of all other files."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.fs = digests.DigestingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            raise failures.of_the_file_system(error) from None
        results.set_result([self._digested(each) for each in written])
        return results

    def _digested(self, result: WriteResult) -> WriteResult:
        place = result.storage_data
        piece = self.fs.pieces[place.relative_path, place.offset]
        return _DigestedResult(result.index, result.size_in_bytes, place, piece.digests)

    def storage_meta(self) -> StorageMeta:
        return dataclasses.replace(super().storage_meta(), modules=[_HAS_DIGESTS])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        of_files: dict[str, list[digests.Piece]] = {}
        for result in itertools.chain.from_iterable(results):
            place = result.storage_data
            piece = digests.Piece(place.offset, place.length, result.digests)
            of_files.setdefault(place.relative_path, []).append(piece)
        whole = self.fs.pieces[f"{folders.METADATA}.tmp", 0]
        of_files[folders.METADATA] = [whole]
        digests.write(self.path, of_files)


class CheckedReader(dcp.FileSystemReader):
    """As torch's. What is read is checked, and the metadata can name no other classes.

    Raises:
        DamagedError, ValueError: the metadata is damaged.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.digests = digests.read(path)
        if self.digests is not None:
            self.fs = digests.CheckedFiles(self.digests)
        self.metadata = self._checked_metadata()

    def _checked_metadata(self) -> Metadata:
        file = self.path / folders.METADATA
        data = file.read_bytes()
        if self.digests is not None:
            [piece] = self.digests[folders.METADATA]
            if len(data) != piece.length or digests.of(data) != piece.digests:
                raise digests.DamagedError(
                    f"zero_ext: '{file}' of {len(data)} bytes is damaged: {piece.length} bytes "
                    "with another digest were written. Load an earlier checkpoint."
                )
        metadata = pickles.metadata_of(data, file)
        marks = getattr(metadata.storage_meta, "modules", None) or ()
        if self.digests is None and _HAS_DIGESTS in marks:
            raise digests.DamagedError(
                f"zero_ext: checkpoint '{self.path}' lacks the file '{digests.FILE}', which was "
                "saved with it, so that its bytes cannot be checked. Copy all files of the folder, "
                "also those whose names begin with a dot."
            )
        for index, place in (metadata.storage_data or {}).items():
            _check_place(file, index.fqn, getattr(place, "relative_path", None))
        return metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            damaged = getattr(self.fs, "damaged", None)
            if damaged is None:
                raise failures.of_the_file_system(error) from None
            raise digests.DamagedError(
                f"bytes of '{self.name_of(*damaged)}' in '{self.path / damaged[0]}' are not those "
                "that were saved. Load an earlier checkpoint"
            ) from error

    def is_whole(self, file: str, offset: int, length: int) -> bool:
        """Whether these bytes are those that were written. Reads them."""
        try:
            with self.fs.create_stream(self.path / file, "rb") as stream:
                stream.seek(offset)
                for begin in range(0, length, digests.BLOCK):
                    stream.read(min(digests.BLOCK, length - begin))
        except (digests.DamagedError, OSError):
            return False
        return True

    def name_of(self, file: str, piece: digests.Piece) -> str:
        """The key of the entry that lies there."""
        for index, place in self.metadata.storage_data.items():
            if (place.relative_path, place.offset) == (file, piece.offset):
                return index.fqn
        return file


def _check_place(file: Path, key: str, name: Any) -> None:
    """Raise if an entry lies outside of the checkpoint's folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
        raise ValueError(
            f"zero_ext: '{file}' says that '{key}' lies in '{name}', which is not the name of a "
            "file in that folder. Load a checkpoint that you trust."
        )


class _Planner(DefaultLoadPlanner):
    def __init__(self, path: Path, allow_pickle: bool):
        super().__init__()
        self._path, self._allow_pickle = path, allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        what = f"'{key}' of checkpoint '{self._path}'"
        found = pickles.unpickled(value, what, self._allow_pickle)
        set_element(self.original_state_dict, self.mappings[key], found)


def damaged_entries(path: Path) -> list[str]:
    """Read all of a checkpoint, and return the keys of the entries that are damaged.

    Raises:
        ValueError: there is no checkpoint, it has no digests, or its metadata is damaged.
    """
    reader = CheckedReader(folders.find(path))
    if reader.digests is None:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has no digests: torch or an older version has written "
            "it. Load it and save it again."
        )
    return sorted(
        {
            index.fqn
            for index, place in reader.metadata.storage_data.items()
            if not reader.is_whole(place.relative_path, place.offset, place.length)
        }
    )


def read(reader: CheckedReader, targets: dict[str, Any], allow_pickle: bool = False) -> None:
    """Read the values of ``targets``, tensors in place. Not collective."""
    if not targets:
        return
    with warnings.catch_warnings(), failures.named(None, f"load() of checkpoint '{reader.path}'"):
        warnings.filterwarnings("ignore", message=ALONE)
        dcp.load(
            targets,
            storage_reader=reader,
            planner=_Planner(reader.path, allow_pickle),
            no_dist=True,
        )


def copied_to_host(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return wrap(value.to_local().to("cpu", copy=True), value)
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
