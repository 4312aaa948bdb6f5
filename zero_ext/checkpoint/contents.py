"""Contents: what is in a checkpoint, as far as it can be known without its tensors."""

import copy
import functools
import importlib
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from zero_ext._warnings import warn
from zero_ext.checkpoint import files, folders, pickles, rank_values
from zero_ext.checkpoint.rank_values import EXTRA
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import EXTRA_STATE, ModelState, plain_name

OBJECTS = "zero_ext"  # the key of all that is no tensor, but for ``extra``
FORMAT = 3
# Modules of rooms above this one that read checkpoints of other libraries, by name. Each has
# ``opened(path)``, which returns the Contents of a folder, or None if it is not its library's.
FOREIGN_READERS = ("zero_ext.deepspeed.saved_files",)


class Contents(NamedTuple):
    """
    Args:
        tensors: The metadata of each key.
        keys: Those of the model's tensors and objects, by name.
        objects: The model's, by name. torch's own checkpoints have them as entries alone.
        optimizers: As ``states_of`` gives them.
        read: Reads values by key, tensors in place: of sharded ones this rank's parts. Not
            collective. ``allow_pickle`` is of ``load``.
    """

    path: Path
    id: str
    tensors: dict[str, TensorStorageMetadata]
    keys: dict[str, str]
    objects: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any]
    read: Callable[..., None]

    @staticmethod
    def of(path: Path, allow_pickle: bool, groups: Groups | None = None) -> "Contents":
        """``groups``: the ranks that load it, each its own values; None: one process, rank 0's."""
        foreign = (importlib.import_module(name).opened(path) for name in FOREIGN_READERS)
        if (contents := next(filter(None, foreign), None)) is not None:
            return contents
        path = folders.find(path)
        reader = files.CheckedReader(path)
        entries = reader.metadata.state_dict_metadata
        keys = {}
        for key in entries:
            if key.startswith("model."):
                key = _without_parts(key)
                keys.setdefault(plain_name(key.removeprefix("model.")), key)
        objects: dict[str, Any] = {}
        if OBJECTS in entries:
            objects = _read_objects(reader, groups, allow_pickle)
        elif not keys:
            raise ValueError(
                f"zero_ext: checkpoint '{path}' was written without a 'model' entry: no key begins "
                f"with 'model.', it has {first_of(sorted(entries)) or 'nothing'}. Write "
                "{'model': model.state_dict()}."
            )
        for name in objects.get("model", {}):
            keys.setdefault(name, f"model.{name}")
        return Contents(
            path,
            objects.get("id", "of torch"),
            {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)},
            keys,
            objects.get("model", {}),
            objects.get("optimizers", []),
            objects.get("extra", {}),
            functools.partial(files.read, reader),
        )

    def whole_extra(self) -> dict[str, Any]:
        """``extra`` with its sharded tensors, read whole to the host."""
        apart = self.whole(key for key in self.tensors if key.startswith(f"{EXTRA}["))
        return pickles.put_back(self.extra, apart)

    def whole(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The tensors under ``keys``, read whole to the host."""
        saved = {key: self.tensors[key] for key in keys}
        tensors = {
            key: torch.empty(each.size, dtype=each.properties.dtype, device="cpu")
            for key, each in saved.items()
        }
        self.read(tensors)
        return tensors

    def matching(self, of_model: ModelState, strict: bool) -> tuple[list[str], dict[str, Any]]:
        """The names of the tensors that checkpoint and model have, and copies of the objects.

        Raises:
            ValueError: shapes differ, or with ``strict`` names.
        """
        here = of_model.tensors.keys() | of_model.objects.keys()
        if here and self.keys and not here & self.keys.keys():
            raise ValueError(f"zero_ext: checkpoint '{self.path}' {_no_name_in(here, self.keys)}")
        for verb, names in (
            ("lacks", here - self.keys.keys()),
            ("has, but the model lacks,", self.keys.keys() - here),
        ):
            if not names:
                continue
            message = f"zero_ext: checkpoint '{self.path}' {verb} {first_of(sorted(names))}"
            if strict:
                raise ValueError(f"{message}. strict=False passes such names over.")
            warn(f"{message}: passed over.")
        common = [name for name in of_model.tensors if self.keys.get(name) in self.tensors]
        for name in common:
            shape, saved = of_model.tensors[name].shape, self.tensors[self.keys[name]].size
            if shape != saved:
                raise ValueError(
                    f"zero_ext: '{name}' has shape {tuple(shape)} in the model, and {tuple(saved)} "
                    f"in checkpoint '{self.path}'. Build the model with the sizes of the saved one."
                )
        objects = {
            name: copy.deepcopy(value)
            for name, value in of_model.objects.items()
            if name in self.keys
        }
        return common, objects


def _no_name_in(here: Collection[str], saved: Collection[str]) -> str:
    """How the names of a checkpoint and of a model differ, and what to do."""
    for name in sorted(here):
        for other in sorted(saved):
            if other.endswith(f".{name}") or name.endswith(f".{other}"):
                longer, shorter = max(name, other, key=len), min(name, other, key=len)
                inside = "a module around it" if longer == other else "the module of that name"
                return (
                    f"has '{other}' and the model has '{name}', and no name is the same. Without "
                    f"the prefix '{longer.removesuffix(shorter)}' they are: pass {inside}."
                )
    return (
        f"and the model have no name in common: it has '{min(saved)}', the model has "
        f"'{min(here)}'. Pass the model that was saved."
    )


def first_of(names: Sequence[str]) -> str:
    """The first eight names, for a message."""
    return ", ".join(f"'{name}'" for name in names[:8]) + (", …" if len(names) > 8 else "")


def _without_parts(key: str) -> str:
    """The key of a whole extra state, whose entries torch writes one by one."""
    steps = key.split(".")
    return ".".join(steps[: steps.index(EXTRA_STATE) + 1]) if EXTRA_STATE in steps else key


def _unpickled(
    reader: files.CheckedReader, keys: Iterable[str], allow_pickle: bool
) -> dict[str, Any]:
    target: dict[str, Any] = dict.fromkeys(keys, b"")
    files.read(reader, target)
    return {
        key: pickles.unpickled(
            io.BytesIO(data), f"'{key}' of checkpoint '{reader.path}'", allow_pickle, "cpu"
        )
        for key, data in target.items()
    }


def _read_objects(
    reader: files.CheckedReader, groups: Groups | None, allow_pickle: bool
) -> dict[str, Any]:
    """What is no tensor, with this rank's own values in the places of rank 0's."""
    objects = _unpickled(reader, [OBJECTS], allow_pickle)[OBJECTS]
    if (found := objects.get("format")) != FORMAT:
        raise ValueError(
            f"zero_ext: checkpoint '{reader.path}' has format {found}, this version reads format "
            f"{FORMAT}. Load it with the version that has saved it."
        )
    own = [] if groups is None else _own_keys(reader, objects.get("ranks"), groups)
    entries = reader.metadata.state_dict_metadata
    own_objects = [key for key in own if isinstance(entries[key], BytesStorageMetadata)]
    values = _unpickled(reader, {*own_objects, EXTRA}, allow_pickle)
    extra = values.pop(EXTRA)
    objects["model"] |= {key.removeprefix("model."): value for key, value in values.items()}
    return {**objects, "extra": extra}


def _own_keys(reader: files.CheckedReader, ranks: int, groups: Groups) -> list[str]:
    """The keys under which this rank's own values are read from now on, in place of rank 0's."""
    metadata = reader.metadata
    if ranks == groups.world:
        return rank_values.read_own(metadata, groups.rank)
    if groups.rank == 0:
        saved = f"checkpoint '{reader.path}' was saved by {ranks} ranks and is loaded by"
        differing = rank_values.differing_keys(metadata.state_dict_metadata)
        warn_of_differing(f"{saved} {groups.world}", differing)
    return []


def warn_of_differing(what: str, keys: Sequence[str]) -> None:
    """Warn that the values under ``keys``, if there are any, differ between ranks that saved."""
    if keys:
        warn(
            f"zero_ext: {what}. Every rank gets rank 0's values of what differed between them: "
            f"{first_of(keys)}."
        )
