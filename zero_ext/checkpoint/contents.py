"""Contents: what is in a checkpoint, as far as it can be known without its tensors."""

import copy
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero_ext.checkpoint import files, folders
from zero_ext.state.model_state import EXTRA_STATE, ModelState, plain_name

OBJECTS = "zero_ext"  # the key of all that is no tensor
FORMAT = 2


class Contents(NamedTuple):
    """What is in a checkpoint, as far as it can be known without its tensors."""

    path: Path
    id: str
    tensors: dict[str, TensorStorageMetadata]  # by key
    keys: dict[str, str]  # of the model's tensors and objects, by name
    objects: dict[str, Any]  # the model's, where this library has written it
    optimizers: list[dict[str, Any]]
    extra: dict[str, Any]

    @staticmethod
    def of(path: Path) -> "Contents":
        path = folders.find(path)
        metadata = files.read_metadata(path)
        entries = metadata.state_dict_metadata
        tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        keys = {}
        for key in entries:
            if key.startswith("model."):
                key = _without_parts(key)
                keys.setdefault(plain_name(key.removeprefix("model.")), key)
        objects: dict[str, Any] = {}
        if OBJECTS in entries:
            objects = _read_objects(path)
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
            warnings.warn(f"{message}: passed over.", stacklevel=6)
        common = [name for name in of_model.tensors if self.keys.get(name) in self.tensors]
        for name in common:
            shape, saved = of_model.tensors[name].shape, self.tensors[self.keys[name]].size
            if shape != saved:
                raise ValueError(
                    f"zero_ext: '{name}' has shape {tuple(shape)} in the model, and {tuple(saved)} "
                    f"in checkpoint '{self.path}'."
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


def _read_objects(path: Path) -> dict[str, Any]:
    target: dict[str, Any] = {OBJECTS: b""}
    files.read(path, target)
    objects = torch.load(io.BytesIO(target[OBJECTS]), weights_only=False, map_location="cpu")
    if objects["format"] > FORMAT:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has format {objects['format']}, this version reads "
            f"formats up to {FORMAT}."
        )
    if objects["format"] == 1 and "optimizer" in objects:
        objects["optimizers"] = [objects["optimizer"]]
    return objects
