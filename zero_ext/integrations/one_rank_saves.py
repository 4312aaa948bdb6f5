"""``torch.save`` of an optimizer's state on one rank alone, see ddp.py.

Note [One rank saves]
A rank posts its parts of the states, which the other ranks of the host then read from its memory
while it computes. What they read are the states after as many steps and loads as they have made
themselves: a rank counts these in memory that it has posted, too. The next step or load changes
nothing before all ranks have come to it, and a rank that saves has not.
At the end of the script a rank waits for the others, which may still read.
"""

import contextlib
import copy
import itertools
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.optim.core import Core
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import of_all_ranks
from zero_ext.ranks.comm_groups import timeout_of
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.shard_tensor import ShardTensor

_POLL_S = 0.002
_CHANGES = 0  # the tag of a rank's count of steps and loads
_ENDED = -1  # that count, at the end of the script
_shared: "weakref.WeakSet[SharedStates]" = weakref.WeakSet()

Place = tuple[Any, str]  # the number of a parameter, and the name of a state


class _Posted(NamedTuple):
    """This rank's part of a state. The newest message with a tag counts."""

    tag: int
    address: int
    messages: list[Any]  # which hold the part


class SharedStates:
    """The states of one optimizer that shards.

    Owner: the optimizer, by its hook.
    Invariant: all ranks give the same tag to the same state.
    """

    def __init__(self, optimizer: Sharded, memory: _C.SharedHostTransport, groups: Groups):
        self.optimizer = optimizer
        self._memory, self._groups = memory, groups
        self._others = [rank for rank in range(groups.world) if rank != groups.rank]
        self._changes = torch.zeros(1, dtype=torch.int64)
        self._counters = [memory.post(self._changes, to=r, tag=_CHANGES) for r in self._others]
        self._posted: dict[Place, _Posted] = {}
        optimizer.register_step_post_hook(lambda *_: self._count())
        optimizer.register_load_state_dict_post_hook(lambda _: self._count())

    def _count(self) -> None:
        """After each step and load. States that are new, or in another place, are posted."""
        for place, part in slices_of(self.optimizer.state_dict()).items():
            known, address = self._posted.get(place), part.local.data_ptr()
            if known is None or known.address != address:
                tag = _CHANGES + 1 + len(self._posted) if known is None else known.tag
                messages = [self._memory.post(part.local, rank, tag) for rank in self._others]
                self._posted[place] = _Posted(tag, address, messages)
        self._changes += 1

    def has(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether these are its states, as they are now on this rank, and are posted."""
        now, given = slices_of(self.optimizer.state_dict()), slices_of(state_dict)
        return now.keys() == given.keys() <= self._posted.keys() and all(
            self._posted[place].address == part.local.data_ptr()
            and part.bounds == given[place].bounds
            and torch.equal(part.local, given[place].local)
            for place, part in now.items()
        )

    def whole(self, place: Place, part: ShardTensor) -> Tensor:
        """Waits until the other ranks have made this rank's last step or load."""
        for rank in self._others:
            while self._changes_of(rank) not in (self._changes.item(), _ENDED):
                time.sleep(_POLL_S)
        result = part.local.new_empty(part.bounds[-1])
        for rank, (begin, end) in enumerate(itertools.pairwise(part.bounds)):
            if rank == self._groups.rank:
                result[begin:end] = part.local
            elif begin < end:
                self._receive(result[begin:end], rank, self._posted[place].tag)
        return result.as_strided(part.part_shape, part.part_stride)

    def _changes_of(self, rank: int) -> int:
        changes = torch.empty(1, dtype=torch.int64)
        self._receive(changes, rank, _CHANGES)
        return int(changes)

    def _receive(self, into: Tensor, rank: int, tag: int) -> None:
        try:
            self._memory.receive(into, from_rank=rank, tag=tag).wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._groups.where}torch.save() needs what rank "
                f"{self._groups.global_ranks[rank]} holds of the optimizer's state: {error} Read "
                "the output of that rank for the first error."
            ) from error

    def end(self) -> None:
        self._changes.fill_(_ENDED)

    def wait_for_ends(self) -> None:
        """Until the other ranks have ended the script, too, or are gone."""
        for rank in self._others:
            with contextlib.suppress(RuntimeError):  # the rank's process or its optimizer is gone
                while self._changes_of(rank) != _ENDED:
                    time.sleep(_POLL_S)


def share_states(optimizer: Sharded) -> None:
    """Collective. Does nothing where a rank cannot read the memory of all others, nor for states
    that are whole at owners."""
    core: Core = optimizer.zero_core
    groups = core.handle.groups
    if core.owners is not None or groups.world == 1 or groups.device.type != "cpu":
        return

    def all_gather(values: Tensor) -> Tensor:
        return torch.tensor(of_all_ranks(values.tolist(), groups, "sharing optimizer states"))

    memory = _C.SharedHostTransport.connect(
        groups.rank,
        groups.world,
        timeout_ms=round(1000 * timeout_of(groups).total_seconds()),
        host=environment.host_of_this_rank(),
        all_gather=all_gather,
    )
    reached = memory is not None and all(
        rank == groups.rank or memory.reaches(rank) for rank in range(groups.world)
    )
    if all(of_all_ranks(reached, groups, "sharing optimizer states")):
        _shared.add(SharedStates(optimizer, memory, groups))


def end_script() -> None:
    for shared in _shared:
        shared.end()
    for shared in _shared:
        shared.wait_for_ends()
    _shared.clear()


def slices_of(state_dict: Mapping[str, Any]) -> dict[Place, ShardTensor]:
    """The states of an optimizer's ``state_dict()`` of which this rank has a part."""
    return {
        (number, name): value
        for number, states in _by_number(state_dict).items()
        for name, value in states.items()
        if isinstance(value, ShardTensor)
    }


def _by_number(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Its states by the number of a parameter, which is its place in the groups. torch's
    ``get_optimizer_state_dict`` has names in place of numbers."""
    keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return {n: state_dict["state"][key] for n, key in enumerate(keys) if key in state_dict["state"]}


def with_whole_states(obj: Any) -> Any:
    """``obj``, with whole tensors in each ``state_dict()`` of an optimizer of ``share_states``."""
    if isinstance(obj, Mapping) and isinstance(obj.get("state"), Mapping) and "param_groups" in obj:
        shared = next((each for each in _shared if each.has(obj)), None) if slices_of(obj) else None
        if shared is not None:
            state = {key: dict(states) for key, states in obj["state"].items()}
            whole = {**obj, "state": state}
            states = _by_number(whole)
            for (number, name), part in slices_of(obj).items():
                states[number][name] = shared.whole((number, name), part)
            return whole
    if isinstance(obj, dict):
        result = copy.copy(obj)
        result.update((key, with_whole_states(value)) for key, value in obj.items())
        return result
    if type(obj) in (list, tuple):
        return type(obj)(map(with_whole_states, obj))
    return obj
