"""Objects in a checkpoint, beside tensors: read without running code unless the user allows it."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from zero_ext.tensor.shard_tensor import ShardTensor

_SHARDED = "zero_ext.sharded"  # the one key of a stand-in

# The classes in the metadata of torch.distributed.checkpoint.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and "." not in name:
            found = getattr(torch, name, None)
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"metadata has no {module}.{name}")


def metadata_of(data: bytes, path: Path) -> Metadata:
    """
    Raises:
        ValueError: it is truncated, damaged, or names a class that metadata does not consist of.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # damaged pickles raise errors of every kind
        raise ValueError(
            f"zero_ext: '{path}' of {len(data)} bytes is no metadata of a checkpoint "
            f"({type(error).__name__}: {error}). Load an earlier checkpoint."
        ) from error
    return metadata


def kind_of(error: pickle.UnpicklingError) -> str:
    """The objects that torch has rejected, beside tensors and plain containers."""
    found = str(error).partition("GLOBAL ")[2].split(" ")[0]
    return f"objects of {found}" if found else "objects"


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def set_apart(extra: Any, prefix: str) -> tuple[Any, dict[str, ShardTensor]]:
    """``extra`` with stand-ins for its sharded tensors, which cannot be pickled, and these by
    their places in it, after ``prefix``."""
    apart: dict[str, ShardTensor] = {}

    def stand_in(value: Any, place: str) -> Any:
        if not isinstance(value, ShardTensor):
            return value
        apart[place] = value
        return {_SHARDED: place}

    return _replaced(extra, prefix, stand_in, {}), apart


def put_back(extra: Any, tensors: Mapping[str, Tensor]) -> Any:
    """``extra`` with ``tensors`` in the places of their stand-ins."""

    def tensor_of(value: Any, _: str) -> Any:
        is_stand_in = isinstance(value, dict) and value.keys() == {_SHARDED}
        return tensors.get(value[_SHARDED], value) if is_stand_in else value

    return _replaced(extra, "", tensor_of, {})


def _replaced(value: Any, place: str, new: Callable[[Any, str], Any], done: dict[int, Any]) -> Any:
    """``value`` with what ``new`` makes of its parts. A container in which all stays is itself.

    Args:
        done: What containers became, by their ids: several may hold one.
    """
    made = new(value, place)
    if made is not value or not isinstance(value, dict | list | tuple):
        return made
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value
    parts = list(value.items() if isinstance(value, dict) else enumerate(value))
    changed = {}
    for key, part in parts:
        if isinstance(part, dict | list | tuple | ShardTensor):
            made = _replaced(part, f"{place}[{key!r}]", new, done)
            changed |= {} if made is part else {key: made}
    if changed:
        copied = copy.copy(value) if isinstance(value, dict) else list(value)
        for key, made in changed.items():
            copied[key] = made
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        done[id(value)] = make(copied) if isinstance(value, tuple) else copied
    return done[id(value)]


def pickled_extra(extra: Any) -> bytes:
    """
    Raises:
        TypeError: it is no dict.
        ValueError: one of its values cannot be pickled.
    """
    if not isinstance(extra, dict):
        raise TypeError(
            f"zero_ext: extra is a {type(extra).__name__}. Pass a dict, such as {{'step': 100}}."
        )
    try:
        return pickled(extra)
    except Exception:
        for key, value in extra.items():
            try:
                pickled(value)
            except Exception as error:  # of every kind
                raise ValueError(
                    f"zero_ext: extra[{key!r}] cannot be saved: {type(error).__name__}: {error}. "
                    "Pass what its state_dict() returns, or plain values."
                ) from error
        raise


def unpickled(data: io.BytesIO, what: str, allow_pickle: bool, place: str | None = None) -> Any:
    """The object that ``torch.save`` has written; ``what`` names it in messages.

    Raises:
        ValueError: it is more than tensors and plain containers, and ``allow_pickle`` is False.
    """
    try:
        return torch.load(data, weights_only=True, map_location=place)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise ValueError(
                f"zero_ext: {what} holds {kind_of(error)}, and loading them could run any code. If "
                "you trust the file, pass allow_pickle=True, or name the classes to "
                "torch.serialization.add_safe_globals."
            ) from error
    data.seek(0)
    return torch.load(data, weights_only=False, map_location=place)
