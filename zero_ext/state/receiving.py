"""What ``iter_changed_params`` yields, and how a copy of the model takes it over.

This file needs torch alone. A process without zero_ext may have a copy of it.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

if __name__ == "zero_ext.state.receiving":
    from zero_ext._C import part_digest
else:
    part_digest = None  # a copy of this file, where torch computes the same in five times the time

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_ROW = 1024  # words, csrc/kernels/digest.h has the formula
_FIRST_OF_ROWS = 2**32
_ROWS_IN_CACHE = 256  # 2 MiB


class ChangedParam(NamedTuple):
    """New values of one parameter.

    Attributes:
        name: As in ``module.named_parameters()``.
        indices: Of the changed elements in the flattened parameter, ascending; int32, or int64 for
            more than 2^31 elements; [elements]. None: all elements may have changed.
        values: [elements], or the whole parameter in its shape; in its dtype.
        digest: Of the whole parameter with these values, 64 bits. None: it cannot be compared.
        since: The ``number`` of the token that was passed. The copy has all changes up to that
            token already. None: no token was passed.
    """

    name: str
    indices: Tensor | None
    values: Tensor
    digest: int | None
    since: int | None = None


def apply_changes(
    target: nn.Module | Mapping[str, Tensor], changes: Iterable[ChangedParam | tuple]
) -> int:
    """Write changes that ``iter_changed_params`` yielded into a copy of the model.

    Args:
        target: A plain module, or tensors by the names of the parameters. They keep their memory.
        changes: In any order. Tuples of the same values will do.
    Returns:
        The number of elements that were written.
    Raises:
        KeyError: The target has no parameter of a change's name.
        ValueError: The target's parameter has another shape, dtype or memory order. Nothing of this
            change was written.
        RuntimeError: With a change, the parameter is not that of the trainer. The copy lacks
            earlier changes, or somebody wrote to it. Ask the trainer for all of it, with
            ``since=None``.
    """
    tensors = dict(target.named_parameters()) if isinstance(target, nn.Module) else target
    written = 0
    with torch.no_grad():
        for change in changes:
            name, indices, values, digest, since = ChangedParam(*change)
            tensor = _checked(tensors, name, indices, values)
            if indices is None:
                tensor.copy_(values)
            else:
                bits = _INTEGERS[tensor.itemsize]  # torch scatters these in half of the time
                new = values.to(tensor.device).view(bits)
                places = indices.to(tensor.device, torch.int64)
                tensor.view(-1).view(bits).scatter_(0, places, new)
            written += values.numel()
            if digest is not None and digest_of(tensor) != digest:
                before = "" if since is None else f" of the time before token {since}"
                raise RuntimeError(
                    f"zero_ext: '{name}' differs from the trainer's after its changes were applied."
                    f" This copy lacks changes{before}, or somebody wrote to it. Ask the trainer"
                    " for all values: iter_changed_params(module, since=None)."
                )
    return written


def _checked(
    tensors: Mapping[str, Tensor], name: str, indices: Tensor | None, values: Tensor
) -> Tensor:
    if name not in tensors:
        raise KeyError(f"zero_ext: the target has no parameter '{name}'; it has {[*tensors][:5]}…")
    tensor = tensors[name].detach()
    if tensor.dtype != values.dtype:
        raise ValueError(
            f"zero_ext: '{name}' is {tensor.dtype} here and {values.dtype} at the trainer. Convert"
            " the target, or apply changes to a copy and cast that."
        )
    if indices is None and tensor.shape != values.shape:
        raise ValueError(
            f"zero_ext: '{name}' has the shape {list(tensor.shape)} here and {list(values.shape)}"
            " at the trainer. Build the target as the trainer's model."
        )
    if indices is not None:
        if not tensor.is_contiguous():
            raise ValueError(
                f"zero_ext: the elements of '{name}' do not lie in rows here. Pass a contiguous"
                " copy of it."
            )
        if len(indices) > 0 and int(indices[-1]) >= tensor.numel():
            raise ValueError(
                f"zero_ext: '{name}' has {tensor.numel()} elements here, and a change of element"
                f" {int(indices[-1])}. Build the target as the trainer's model."
            )
    return tensor


def digest_of(tensor: Tensor) -> int:
    """64 bits of a tensor's elements in rows. A change of one element always changes them.

    The formula is that of ``part_digest`` in csrc/kernels/digest.h, modulo 2^64.
    """
    if part_digest is not None:
        return part_digest(tensor, 0)
    data = tensor.detach().cpu().contiguous()
    data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
    missing = -data.numel() % _WORD_BYTES
    if missing or data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = nn.functional.pad(data, (0, missing))
    words = data.view(torch.int64)
    rows = words.numel() // _ROW
    of_row = _weights(0, _ROW)
    of_rows = _weights(_FIRST_OF_ROWS, 2 ** max(rows, 1023).bit_length())  # few are cached
    total = 0
    upper = torch.empty_like(words[: _ROWS_IN_CACHE * _ROW])
    for begin in range(0, rows, _ROWS_IN_CACHE):
        end = min(begin + _ROWS_IN_CACHE, rows)
        some = words[begin * _ROW : end * _ROW]
        for each in (some, torch.bitwise_right_shift(some, 32, out=upper[: len(some)])):
            # A product with rows as columns is twice as fast as a multiplication and a sum.
            total += int(each.view(-1, _ROW).t().mv(of_rows[begin:end]).dot(of_row))
    tail = words[rows * _ROW :]
    total += int((tail + (tail >> 32)).dot(of_row[: len(tail)])) * int(of_rows[rows])
    return total % 2**64


@cache
def _weights(first: int, count: int) -> Tensor:
    """int64 [count]: numbers ``first`` and so on of SplitMix64, made odd."""
    z = torch.arange(first + 1, first + 1 + count, device="cpu") * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, by: int) -> Tensor:
    """To the right, and zeros come in from the left."""
    return (z >> by) & (2 ** (64 - by) - 1)
