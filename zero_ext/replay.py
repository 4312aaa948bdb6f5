"""Replay: another rank runs a micro-batch again, and the gradients must have the same bits.

A processor that computes wrongly leaves no other trace. Each rank runs one micro-batch of the rank
before it. What is compared are the gradients of one rank, before ranks add theirs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext import _C
from zero_ext.fingerprints import tensor_sums
from zero_ext.ranks.agreement import of_all_ranks
from zero_ext.ranks.groups import Groups

Sums = dict[str, tuple[int, int]]  # of each parameter's gradient
_Buffers = dict[str, dict[str, Tensor | None]]  # by the module's name, by their own


class Replay:
    """The comparison of one step.

    Args:
        loss_of: Of a micro-batch, as in the loop.
        batch_of: Of micro-batch k of the step, with its seed: a context.
        own, other: The micro-batches that are run twice: this rank's, and that of the rank before.
        from_rank_0: Whether forwards begin with rank 0's buffers.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], Tensor],
        batch_of: Callable[[int], contextlib.AbstractContextManager[Any]],
        model: nn.Module,
        groups: Groups,
        own: int,
        other: int,
        from_rank_0: bool,
    ):
        self._loss_of, self._batch_of, self._groups = loss_of, batch_of, groups
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._model, self._from_rank_0 = model, from_rank_0
        self._began_with: _Buffers = {}
        self._own, self._other = own, other
        self._sums: Sums = {}

    @contextlib.contextmanager
    def watching(self, k: int) -> Iterator[None]:
        """Inside it the loop runs micro-batch ``k``."""
        if k == self._own:
            self._began_with = _copies(_buffers_of(self._model))
        with contextlib.ExitStack() as stack:
            for name, parameter in self._parameters.items() if k == self._own else ():
                hook = functools.partial(self._add, name)
                stack.enter_context(parameter.register_hook(hook))
            yield

    def _add(self, name: str, gradient: Tensor) -> None:
        self._sums[name] = _sums_of(name, gradient)

    def compare(self, step: int) -> None:
        """After the rank's own micro-batches. Collective.

        Raises:
            RuntimeError: on every rank, where gradients differ.
        """
        again = self._run_again()
        what, world = f"the replay of step {step}", self._groups.world
        digests = [_C.digest(repr(sorted(each.items())).encode()) for each in (self._sums, again)]
        everyone = of_all_ranks(digests, self._groups, what)
        if all(everyone[rank - 1][0] == everyone[rank][1] for rank in range(world)):
            return
        found = of_all_ranks((self._own, self._sums, again), self._groups, what)
        told = ""
        for rank, (k, own, _) in enumerate(found):
            next_rank = (rank + 1) % world
            again = found[next_rank][2]
            names = [name for name in [*own, *again] if own.get(name) != again.get(name)]
            if names:
                one, other = (self._groups.global_ranks[r] for r in (rank, next_rank))
                told += (
                    f"the gradient of '{names[0]}' in micro-batch {k} differs between rank {one} "
                    f"and rank {other}. "
                )
        raise RuntimeError(
            f"{self._groups.where}{what}: {told}One of the ranks of a pair computes wrongly, and "
            "the step was not made. Test their processors, and go on without them."
        )

    def _run_again(self) -> Sums:
        """The backward of a micro-batch, without a trace in the model."""
        with (
            _with_buffers(self._model, self._buffers_of_other()),
            self._batch_of(self._other) as batch,
        ):
            loss = self._loss_of(batch)
            gradients = torch.autograd.grad(loss, [*self._parameters.values()], allow_unused=True)
        pairs = zip(self._parameters, gradients, strict=True)
        return {name: _sums_of(name, g) for name, g in pairs if g is not None}

    def _buffers_of_other(self) -> _Buffers:
        """With which the rank before began its micro-batch. Only those that differ travel."""
        own, what = self._began_with, "comparing buffers for a replay"
        if self._from_rank_0:
            return own
        sums = {
            name: [(k, b if b is None else tensor_sums(k, "buffer", b)) for k, b in table.items()]
            for name, table in own.items()
        }
        everyone = of_all_ranks(sums, self._groups, what)
        differing = [name for name in own if any(each[name] != sums[name] for each in everyone)]
        host = _copies({name: own[name] for name in differing}, torch.device("cpu"))
        found = of_all_ranks(host, self._groups, what)[self._groups.rank - 1]
        return {**own, **_copies(found, self._groups.device)}


def _buffers_of(model: nn.Module) -> _Buffers:
    return {name: module._buffers for name, module in model.named_modules()}


def _copies(buffers: _Buffers, device: torch.device | None = None) -> _Buffers:
    """A tensor in two places is one in both."""
    every = {id(b): b for table in buffers.values() for b in table.values()}
    copies = {i: None if b is None else b.detach().to(device, copy=True) for i, b in every.items()}
    return {name: {k: copies[id(b)] for k, b in t.items()} for name, t in buffers.items()}


@contextlib.contextmanager
def _with_buffers(model: nn.Module, buffers: _Buffers) -> Iterator[None]:
    """Inside it the model has these, afterwards its own, which nothing has changed."""
    tables = _buffers_of(model)
    own = {name: {**table} for name, table in tables.items()}
    try:
        _put(tables, buffers)
        yield
    finally:
        _put(tables, own)


def _put(tables: _Buffers, buffers: _Buffers) -> None:
    for name, table in tables.items():
        for key in [key for key in table.keys() if key not in buffers[name]]:  # noqa: SIM118
            del table[key]
        for key, value in buffers[name].items():  # a scripted module's table has no update()
            table[key] = value


def _sums_of(name: str, gradient: Tensor) -> tuple[int, int]:
    return tensor_sums(name, "grad", gradient.detach())
