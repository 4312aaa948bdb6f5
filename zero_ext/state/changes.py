"""``iter_changed_params``: what has changed since an earlier time, for copies elsewhere.

A token is such a time. While it lives, updates mark what they change: one bit for each element of
this rank's part (csrc/engine/changes.h).
"""

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.engine.checks import check_module, check_positive
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.state.iteration import iterate_whole
from zero_ext.state.model_state import groups_of, handles_of, plain_name
from zero_ext.state.receiving import ChangedParam, digest_of

_INDEX_BYTES = 8  # at most, of a changed element
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ChangeToken:
    """A time in the life of a model. See ``change_token``.

    Attributes:
        number: How many tokens this process has made. Errors of ``apply_changes`` name it.
    """

    number: int
    of_engines: weakref.WeakKeyDictionary[Handle, _C.ChangeToken]
    digests: dict[str, int]  # of parameters that no engine knows
    module: weakref.ref[nn.Module]


def change_token(module: nn.Module) -> ChangeToken:
    """The present time, for ``iter_changed_params(module, since=token)`` at a later one.

    Call it on every rank, after the same steps. Until you drop the token, this rank keeps a bit for
    each element of its part of the model, and for each later token another one.

    Raises:
        TypeError: ``module`` is no module.
        RuntimeError: inside a backward, or where ``offload_states`` has moved parameters or
            masters.
    """
    check_module(module, "change_token()")
    of_engines = {handle: handle.engine.change_token() for handle in handles_of(module)}
    tokens = weakref.WeakKeyDictionary(of_engines)
    plain = {name: digest_of(p) for name, p in _named(module) if find(p) is None and _has_digest(p)}
    return ChangeToken(next(_numbers), tokens, plain, weakref.ref(module))


def iter_changed_params(
    module: nn.Module,
    *,
    since: ChangeToken | None,
    bucket_mb: float = 25.0,
    rank0_only: bool = False,
) -> Iterator[ChangedParam]:
    """The parameters of ``module`` that changed since a token: what a copy needs to be equal again.

    Take the next token before you send the changes. Then nothing is lost, whatever happens in
    between::

        sent = None
        while training:
            train(model)
            token = zero_ext.change_token(model)
            for change in zero_ext.iter_changed_params(model, since=sent, rank0_only=True):
                server.send(change)  # there: zero_ext.apply_changes(model, [change])
            sent = token

    On the host, updates mark which elements of half-precision parameters change. These alone are
    sent between ranks, and yielded. Other parameters are yielded whole where any element has
    changed: those in fp32, frozen, on a GPU, DTensors. So is a parameter of which so much has
    changed that all of it is smaller. Every rank must iterate, to the end or until it closes the
    iterator. Finish one iterator before you begin another one, and change no parameter meanwhile.

    Args:
        module: Sharded by ``shard()``, or its parameters by an optimizer of this package.
        since: From ``change_token(module)``. None: all parameters, whole.
        bucket_mb: Size in MiB of what is gathered at once, the same on every rank.
        rank0_only: Only the first of the ranks that the module is sharded over yields changes.
    Yields:
        A ``ChangedParam`` for each parameter that may have changed, in no particular order. Only
        read its tensors.
    Raises:
        TypeError, ValueError: an argument is wrong, or the token is one of another module.
        RuntimeError: while iterating, inside a backward, or where ``offload_states`` has moved
            parameters or masters; or ranks have other tokens; or another iterator has begun.
    """
    check_module(module, "iter_changed_params()")
    check_positive("bucket_mb", bucket_mb, finite=True)
    if since is not None and not isinstance(since, ChangeToken):
        raise TypeError(f"zero_ext: since must be a change_token(), or None, not {since!r}.")
    if since is not None and since.module() is not module:
        raise ValueError("zero_ext: since is a token of another module. Pass one of this module.")
    wanted = not rank0_only or groups_of(module).rank == 0
    return _iterate(module, since, int(bucket_mb * 2**20), wanted)


def _iterate(
    module: nn.Module, since: ChangeToken | None, bucket_bytes: int, wanted: bool
) -> Iterator[ChangedParam]:
    tokens, number = ({}, None) if since is None else (since.of_engines, since.number)
    with torch.inference_mode(False):
        changes = {
            handle: handle.engine.count_changes(tokens.get(handle), wanted)
            for handle in handles_of(module)
        }
    some: list[_Changed] = []
    whole: list[tuple[str, Tensor]] = []
    digests: dict[str, int | None] = {}
    for name, parameter in _named(module):
        entry = find(parameter)
        if entry is None:
            digests[name] = digest_of(parameter) if _has_digest(parameter) else None
            before = None if since is None else since.digests.get(name)
            if before is None or before != digests[name]:
                whole.append((name, parameter))
            continue
        handle, i = entry
        change = changes[handle][i]
        digests[name] = change.digest if _has_digest(parameter) else None
        if change.of_all:
            whole.append((name, parameter))
        elif change.numel > 0:
            nbytes = change.numel * (parameter.itemsize + _INDEX_BYTES)
            some.append(_Changed(name, handle, i, nbytes))
    counts = {handle: handle.engine.change_counts for handle in changes}
    buckets = iter(_cut(some, bucket_bytes))
    try:
        for bucket in buckets:
            for name, indices, values in _gather(bucket, counts):
                yield ChangedParam(name, indices, values, digests[name], number)
    except GeneratorExit:  # the loop was left early: take part in the gathers of the others
        for bucket in buckets:
            _gather(bucket, counts)
        [*iterate_whole(whole, None, bucket_bytes, wanted=False)]
        raise
    for name, values in iterate_whole(whole, None, bucket_bytes, wanted):
        yield ChangedParam(name, None, values, digests[name], number)


class _Changed(NamedTuple):
    """A parameter some of whose elements have changed. ``nbytes``: of what is sent of it."""

    name: str
    handle: Handle
    index: int
    nbytes: int


def _cut(some: list[_Changed], bucket_bytes: int) -> list[list[_Changed]]:
    """Buckets of parameters of one engine."""
    buckets: list[list[_Changed]] = []
    nbytes = 0
    for each in some:
        nbytes += each.nbytes
        if not buckets or buckets[-1][0].handle is not each.handle or nbytes > bucket_bytes:
            buckets.append([])
            nbytes = each.nbytes
        buckets[-1].append(each)
    return buckets


def _gather(
    bucket: list[_Changed], counts: dict[Handle, int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, indices and values; nothing on a rank that wants none."""
    handle = bucket[0].handle
    with torch.inference_mode(False):
        gathered = handle.engine.gather_changes([each.index for each in bucket], counts[handle])
    return ((each.name, *of_one) for each, of_one in zip(bucket, gathered, strict=False))


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((plain_name(name), p) for name, p in module.named_parameters())


def _has_digest(parameter: Tensor) -> bool:
    return not isinstance(parameter, DTensor) and parameter.is_contiguous()
