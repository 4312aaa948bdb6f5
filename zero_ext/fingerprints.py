"""Fingerprints: 128 bits of a training's state, the same for any number of ranks and any stage.

Note [A fingerprint without an order]
Each 32-bit word of a value is multiplied by two numbers that are hashes of the parameter's name,
the kind of the value and the word's place in the parameter's own order. The products are summed
modulo 2^64, so each rank sums over what it holds, and one all-reduce adds the sums of the ranks.
csrc/kernels/fingerprint.h has the formula. Bits are kept for what is fp32 or wider; bf16 and fp16
count as their fp32 values, integers as 64-bit ones.
"""

import functools
import hashlib
from collections.abc import Iterator
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.engine.checks import check_module
from zero_ext.engine.registry import find
from zero_ext.optim.groups import parameters_of
from zero_ext.optim.owners import Owners
from zero_ext.optim.sharded import Sharded
from zero_ext.optim.whole import Whole
from zero_ext.ranks.agreement import calling
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import groups_of, held_value, plain_name
from zero_ext.tensor.shard_tensor import ShardTensor

_STRIDE, _HALF, _MASK = 0x9E3779B97F4A7C15, 2**32 - 1, 2**64 - 1
_CHUNK_NUMEL = 2**22  # of what a device hashes at once, in int64


class _Part(NamedTuple):
    """This rank's part of a value: ``flat``, 1-D, from element ``first`` on.

    ``counted``: whether this rank counts that there is such a value, whatever its elements are.
    ``strides``: of a parameter whose elements do not lie in its own order.
    """

    name: str
    kind: str
    flat: Tensor
    first: int
    shape: torch.Size
    counted: bool = True
    strides: tuple[int, ...] | None = None


@calling("fingerprint()")
def fingerprint(
    module: nn.Module, *optimizers: torch.optim.Optimizer, gradients: bool = False
) -> str:
    """32 hexadecimal digits that change with any bit of the training's state. Collective.

    They are over parameters (fp32 masters where there are any), buffers, the optimizers' states and
    counts of steps. They do not depend on the number of ranks, stage, buckets, device or layout.
    What every rank holds counts once, as rank 0 has it. Call it between two steps.

    Args:
        module: Sharded or plain.
        optimizers: Those of its parameters, of this package or of torch.
        gradients: Include the reduced gradients.
    Raises:
        ValueError: an optimizer has a parameter that is not the module's.
    """
    return _digits(_sums(module, optimizers, gradients)[1].sum(0))


@calling("parameter_fingerprints()")
def parameter_fingerprints(
    module: nn.Module, *optimizers: torch.optim.Optimizer, gradients: bool = False
) -> dict[str, str]:
    """A fingerprint of each parameter and buffer with its states, by name. See ``fingerprint``."""
    names, sums = _sums(module, optimizers, gradients)
    return dict(zip(names, map(_digits, sums), strict=True))


def _digits(sums: Tensor) -> str:
    return "".join(f"{number & _MASK:016x}" for number in sums.tolist())


@torch.no_grad()
def _sums(module: nn.Module, optimizers: Any, gradients: bool) -> tuple[list[str], Tensor]:
    """The names, and the sums of each of them, over all ranks: int64 [names, 2] on the host."""
    check_module(module, "fingerprint()")
    groups = groups_of(module)
    named = _named(module)
    names = {id(tensor): name for name, tensor in named.items()}
    numbers = {name: k for k, name in enumerate(named)}
    parts: list[_Part] = []
    for name, tensor in named.items():
        parts += _part(name, "value", held_value(tensor), groups)
        if gradients and tensor.grad is not None:
            parts += _part(name, "grad", tensor.grad, groups)
    for optimizer in optimizers:
        parts += _states(optimizer, names, groups)
    int64 = functools.partial(torch.tensor, dtype=torch.int64, device="cpu")
    of_parts = int64([_signed(*each) for each in hash_sums(parts)]).view(-1, 2)
    rows = int64([numbers[part.name] for part in parts])
    sums = of_parts.new_zeros(len(named), 2).index_add_(0, rows, of_parts)
    if groups.world > 1:
        all_reduce_(sums, groups.parent)
    return list(named), sums


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each under its first name."""
    saved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, each in module.named_modules()
        for name in each._buffers.keys() - each._non_persistent_buffers_set
    }
    buffers = ((name, b) for name, b in module.named_buffers() if name in saved)
    return {plain_name(name): t for name, t in (*module.named_parameters(), *buffers)}


def _part(name: str, kind: str, value: Any, groups: Groups) -> Iterator[_Part]:
    """The part of a value that this rank counts: none in other replicas, or with copies."""
    if isinstance(value, DTensor) and (type(value) is DTensor or value.outer is not None):
        raise NotImplementedError(
            f"{groups.where}fingerprint(): '{name}' is a DTensor on another dimension of a mesh, "
            "whose parts are not compared here. Compare zero_ext.full_tensor() of it."
        )
    if isinstance(value, ShardTensor):
        if groups.rank < value.device_mesh.size():
            begin, counted = value.held_range[0], groups.rank == 0
            strides = None if value.is_contiguous() else value.stride()
            yield _Part(name, kind, value.to_local(), begin, value.shape, counted, strides)
    elif groups.rank == 0:
        if isinstance(value, Number):
            value = torch.tensor(float(value), device="cpu")
        if isinstance(value, Tensor):
            flat = value.detach().contiguous().reshape(-1)
            yield _Part(name, kind, flat, 0, value.shape)


def _states(
    optimizer: torch.optim.Optimizer, names: dict[int, str], groups: Groups
) -> Iterator[_Part]:
    core = optimizer.zero_core if isinstance(optimizer, Sharded) else None
    owners = core.owners if core is not None and isinstance(core.states, Whole) else None
    for parameter in parameters_of(optimizer.param_groups):
        if id(parameter) not in names:
            raise ValueError(
                f"{groups.where}fingerprint(): a parameter of shape {tuple(parameter.shape)} of"
                f" the {type(optimizer).__name__} is not one of the module's. Pass the module "
                "that has it."
            )
        state = optimizer.state.get(parameter, {})
        if state and owners and not _counts_for_owner(owners, find(parameter)[1], groups):
            continue
        where = groups._replace(rank=0) if owners and owners.group else groups
        for kind in sorted(state, key=str):
            yield from _part(names[id(parameter)], str(kind), state[kind], where)


def _counts_for_owner(owners: Owners, i: int, groups: Groups) -> bool:
    """Each replica has an owner of a parameter: that of the first one counts."""
    ranks = groups.world if owners.group is None else dist.get_world_size(owners.group)
    return owners.owns(i) and groups.rank < ranks


def tensor_sums(name: str, kind: str, value: Tensor) -> tuple[int, int]:
    """The sums of one whole value."""
    [sums] = hash_sums([_Part(name, kind, value.contiguous().reshape(-1), 0, value.shape)])
    return sums[0] & _MASK, sums[1] & _MASK


def hash_sums(parts: list[_Part]) -> list[tuple[int, int]]:
    """Both sums of each part, which count modulo 2^64."""
    words = [_words(part.flat) for part in parts]
    keys = [_key(part.name, part.kind, part.shape, _width(part)) for part in parts]
    firsts = [part.first * (_width(part) // 4) for part in parts]
    by_kernel = [
        k for k, part in enumerate(parts) if words[k].device.type == "cpu" and part.strides is None
    ]
    arguments = [[of_all[k] for k in by_kernel] for of_all in (words, keys, firsts)]
    found = dict(zip(by_kernel, _C.hash_sums(*arguments).tolist(), strict=True))
    for k, part in enumerate(parts):
        if k not in found:
            places = None if part.strides is None else _places(part)
            found[k] = sums_by_torch(words[k], keys[k], firsts[k], places).tolist()
        if part.counted:
            low, high = found[k]
            found[k] = low + keys[k], high + keys[k] * _STRIDE
    return [found[k] for k in range(len(parts))]


def sums_by_torch(words: Tensor, key: int, first: int, places: Tensor | None = None) -> Tensor:
    """The kernel's two sums by torch's operations: int64 [2].

    Args:
        words: int32 or float32, 1-D.
        places: Of each word. Default: from ``first`` on.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    start, stride = _signed(key, _STRIDE)
    for at in range(0, words.numel(), _CHUNK_NUMEL):
        word = words[at : at + _CHUNK_NUMEL].view(torch.int32).long() & _HALF
        if places is None:
            place = torch.arange(first + at, first + at + word.numel(), device=words.device)
        else:
            place = places[at : at + _CHUNK_NUMEL]
        p = place * stride + start
        q = (p & _HALF) * (p >> 32 & _HALF)
        sums[0] += (word * ((p ^ q) | 1)).sum()
        sums[1] += (word * (((q << 32 | q >> 32 & _HALF) - p) | 1)).sum()
    return sums


def _signed(*numbers: int) -> list[int]:
    """The int64 with the same bits."""
    return [(number + 2**63) % 2**64 - 2**63 for number in numbers]


@functools.lru_cache(maxsize=65536)
def _key(name: str, kind: str, shape: torch.Size, width: int) -> int:
    text = f"{name}\0{kind}\0{tuple(shape)}\0{width}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _width(part: _Part) -> int:
    """Bytes of an element as it is hashed."""
    return 4 if part.flat.is_floating_point() and part.flat.itemsize <= 4 else 8


def _words(flat: Tensor) -> Tensor:
    """The 32-bit words of a 1-D tensor, as int32."""
    if flat.is_complex():
        flat = torch.view_as_real(flat.to(torch.complex128)).reshape(-1)
    elif flat.is_floating_point():
        flat = flat.float() if flat.itemsize < 4 else flat
    else:
        flat = flat.long()
    return flat.detach().contiguous().view(torch.int32)


def _places(part: _Part) -> Tensor:
    """The position of each word of fp32 values in the parameter's own order: int64."""
    device = part.flat.device
    own = torch.arange(part.shape.numel(), device=device).view(part.shape)
    stored = torch.empty_strided(part.shape, part.strides, dtype=own.dtype, device=device)
    flat = stored.copy_(own).as_strided((own.numel(),), (1,))
    return flat[part.first : part.first + part.flat.numel()]
