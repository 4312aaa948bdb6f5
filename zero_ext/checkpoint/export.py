"""A sharded model's parameters in safetensors files, as other libraries read them."""

import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from zero_ext.checkpoint import failures
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.model_state import ModelState, full_value

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json|\.incomplete)?")


@torch.no_grad()
def export_safetensors(
    model: nn.Module, directory: str | os.PathLike, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write parameters and buffers as ``model.safetensors``, in their own dtypes. Collective.

    Above ``max_shard_size`` there are several files, ``model-00001-of-0000N.safetensors`` and so
    on, and ``model.safetensors.index.json``: the layout of the Hugging Face hub. A tied parameter
    is written once, under its first name. Files of an earlier export are replaced. Rank 0 writes,
    and holds the tensors of one file at a time; the other ranks hold one tensor at a time.

    Args:
        directory: Made if it does not exist.
        max_shard_size: Bytes of the tensors in a file, as a number or with a unit of powers of
            1,000 (``"500MB"``); a larger tensor has a file of its own.
    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: ``max_shard_size`` is not a size.
        TypeError: the model has an extra state, for which safetensors has no place.
        RuntimeError: rank 0 could not write.
    """
    from safetensors.torch import save_file

    what = f"export_safetensors() to '{directory}'"
    groups, directory = failures.checked(what, model, lambda: Path(directory))
    with all_or_none(groups, what):
        values = _once_each(ModelState.of(model))
        files = _cut(values, _bytes(max_shard_size))
        if groups.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
    with all_or_none(groups, what):
        failure = None
        for file, names in files.items():
            tensors = {}
            for name in names:  # all ranks take part, whatever happens to rank 0
                full = full_value(values[name])
                if groups.rank == 0 and failure is None:
                    tensors[name] = _apart(full, tensors)
            try:
                if groups.rank == 0 and failure is None:
                    save_file(tensors, directory / f"{file}.incomplete", metadata={"format": "pt"})
            except Exception as error:
                failure = error
        if failure is not None:
            for file in files:
                (directory / f"{file}.incomplete").unlink(missing_ok=True)
            raise failure
        if groups.rank == 0:
            _replace(directory, files, values)


def _apart(value: Tensor, others: dict[str, Tensor]) -> Tensor:
    """``value`` on the host, contiguous, in memory of its own: a file holds no views."""
    value = value.cpu().contiguous()
    taken = {other.untyped_storage().data_ptr() for other in others.values()}
    return value.clone() if value.untyped_storage().data_ptr() in taken else value


def _once_each(state: ModelState) -> dict[str, Tensor]:
    if state.objects:
        names = ", ".join(f"'{name}'" for name in state.objects)
        raise TypeError(f"zero_ext: safetensors files hold tensors; the model has {names} as well.")
    names: dict[int, str] = {}
    for name, value in state.tensors.items():
        names.setdefault(id(value), name)
    return {name: state.tensors[name] for name in names.values()}


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(size).upper())
    number = int(match[1]) * _UNITS[match[2]] if match else 0
    if number == 0:
        raise ValueError(f"zero_ext: max_shard_size={size!r} is not a size such as 10**9 or '5GB'.")
    return number


def _cut(values: dict[str, Tensor], limit: int) -> dict[str, list[str]]:
    """The names of each file's tensors."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, value in values.items():
        size = value.numel() * value.element_size()
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {
        f"model-{k:05d}-of-{len(parts):05d}.safetensors": part for k, part in enumerate(parts, 1)
    }


def _replace(directory: Path, files: dict[str, list[str]], values: dict[str, Tensor]) -> None:
    stale = {file.name for file in directory.iterdir() if _OURS.fullmatch(file.name)}
    for name in stale - {f"{file}.incomplete" for file in files}:
        (directory / name).unlink()
    for file in files:
        (directory / f"{file}.incomplete").rename(directory / file)
    if len(files) == 1:
        return
    total = sum(value.numel() * value.element_size() for value in values.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
