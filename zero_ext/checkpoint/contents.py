"""Contents: what is in a checkpoint, as far as it can be known without its tensors."""

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero_ext._warnings import warn
from zero_ext.checkpoint import files, folders, pickles
from zero_ext.checkpoint.deepspeed_files import DeepspeedFolder, is_deepspeeds, opened
from zero_ext.state.model_state import EXTRA_STATE, ModelState, plain_name

OBJECTS = "zero_ext"  # the key of all that is no tensor, but for
EXTRA = "zero_ext.extra"  # what the user has passed
FORMAT = 3


class Contents(NamedTuple):
    source: files.CheckedReader | DeepspeedFolder
    id: str
    tensors: dict[str, TensorStorageMetadata]  # by key
    keys: dict[str, str]  # of the model's tensors and objects, by name
    objects: dict[str, Any]  # the model's, where this library has written it
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.source.path

    def read(self, targets: dict[str, Any], allow_pickle: bool = False) -> None:
        """Read these values by key, tensors in place. Not collective.

        Of sharded tensors this rank reads its parts.
        """
        if isinstance(self.source, DeepspeedFolder):
            self.source.read(targets)
        else:
            files.read(self.source, targets, allow_pickle)

    @staticmethod
    def of(path: Path, allow_pickle: bool) -> "Contents":
        if is_deepspeeds(path):
            folder = opened(path)
            return Contents(
                folder,
                folder.id,
                folder.described,
                folder.keys,
                folder.objects,
                folder.optimizers,
                folder.extra,
            )
        path = folders.find(path)
        reader = files.CheckedReader(path)
        entries = reader.metadata.state_dict_metadata
        tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        keys = {}
        for key in entries:
            if key.startswith("model."):
                key = _without_parts(key)
                keys.setdefault(plain_name(key.removeprefix("model.")), key)
        objects: dict[str, Any] = {}
        if OBJECTS in entries:
            objects = _read_objects(reader, entries, allow_pickle)
        elif not keys:
            raise ValueError(
                f"zero_ext: checkpoint '{path}' was written without a 'model' entry: no key begins "
                f"with 'model.', it has {first_of(sorted(entries)) or 'nothing'}. Write "
                "{'model': model.state_dict()}."
            )
        for name in objects.get("model", {}):
            keys.setdefault(name, f"model.{name}")
        return Contents(
            reader,
            objects.get("id", "of torch"),
            tensors,
            keys,
            objects.get("model", {}),
            objects.get("optimizers", []),
            objects.get("extra", {}),
        )

    def matching(self, of_model: ModelState, strict: bool) -> tuple[list[str], dict[str, Any]]:
        """The names of the tensors that checkpoint and model have, and copies of the objects.

        Raises:
            ValueError: shapes differ, or with ``strict`` names.
        """
        here = of_model.tensors.keys() | of_model.objects.keys()
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


def first_of(names: Sequence[str]) -> str:
    """The first eight names, for a message."""
    return ", ".join(f"'{name}'" for name in names[:8]) + (", …" if len(names) > 8 else "")


def _without_parts(key: str) -> str:
    """The key of a whole extra state, whose entries torch writes one by one."""
    steps = key.split(".")
    return ".".join(steps[: steps.index(EXTRA_STATE) + 1]) if EXTRA_STATE in steps else key


def _read_objects(
    reader: files.CheckedReader, entries: dict[str, Any], allow_pickle: bool
) -> dict[str, Any]:
    """Up to format 2, the user's ``extra`` is one of the objects."""
    path = reader.path
    target: dict[str, Any] = {key: b"" for key in (OBJECTS, EXTRA) if key in entries}
    files.read(reader, target)
    unpickled = {}
    for key, data in target.items():
        what = f"'{key}' of checkpoint '{path}'"
        unpickled[key] = pickles.unpickled(io.BytesIO(data), what, allow_pickle, "cpu")
    objects = unpickled[OBJECTS]
    if objects["format"] > FORMAT:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has format {objects['format']}, this version reads "
            f"formats up to {FORMAT}."
        )
    if objects["format"] == 1 and "optimizer" in objects:
        objects["optimizers"] = [objects["optimizer"]]
    return {"extra": unpickled.get(EXTRA, {}), **objects}
