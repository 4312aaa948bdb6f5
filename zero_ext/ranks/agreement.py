"""Comparisons between ranks, and errors that all ranks raise together."""

import contextlib
import hashlib
import itertools
import pickle
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_ext import _C
from zero_ext.ranks.collectives import wait_for
from zero_ext.ranks.groups import CPU, Experts, Groups, make_group

# How an error of this package begins, with its type.
_OWN_ERROR = re.compile(r"^\w+: zero_ext( \[rank \d+\])?: ")
# Backends' messages when the process at the other end has ended.
_ENDED = re.compile(r"(closed|reset) by peer|[Bb]roken pipe|remote process exited")


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Errors of waits inside name ``name``, the call that the user made, and so do those of other
    ranks that wait for this one. Inside another call it changes nothing."""
    outermost = _C.enter_call(name)
    try:
        yield
    finally:
        if outermost:
            _C.leave_call()


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of collectives inside name this rank and ``what``, the call that waited, or the call
    around it. Backends name neither.

    Raises:
        RuntimeError: in place of any RuntimeError.
    """
    with calling(what):
        try:
            yield
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            others = _C.calls_of_local_peers()
            remedy = f"{others and f'Now {others}. '}Call it on every rank."
            if _ENDED.search(cause):
                remedy = "Another rank has ended: read its output, and start all ranks again."
            raise RuntimeError(
                f"zero_ext [rank {dist.get_rank()}]: {_C.current_call()} waited for the other "
                f"ranks: {cause}. {remedy}"
            ) from error


def of_all_ranks(value: Any, groups: Groups, what: str) -> list:
    """Every rank's ``value``, in rank order. Collective.

    As ``dist.all_gather_object``. But on the host Ctrl-C ends the wait, and NCCL carries values
    through our device, which need not be the current one.
    """
    kinds = [device.type for device in groups.parent._device_types]
    device = groups.device if groups.device.type in kinds else torch.device(kinds[0])
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    with naming(what):
        own = own.to(CPU if "cpu" in kinds else device)
        sizes = _all_gather(torch.tensor([own.numel()], device=own.device), groups).flatten()
        padded = own.new_zeros(int(sizes.max()))
        padded[: own.numel()] = own
        rows = _all_gather(padded, groups).cpu()
    return [
        pickle.loads(row[:size].numpy().tobytes())
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


def _all_gather(own: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[ranks, elements]."""
    rows = own.new_empty(groups.world, own.numel())
    wait_for(dist.all_gather(list(rows), own, groups.parent, async_op=True), own)
    return rows


def with_experts(groups: Groups, mesh: DeviceMesh) -> Groups:
    """``groups``, in which ``mesh`` cuts experts. Collective.

    Raises:
        ValueError, TypeError: ``mesh`` is no dimension inside ``groups``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"zero_ext: expert_mesh must be a DeviceMesh, not a {type(mesh).__name__}. Pass the "
            "dimension that cuts the experts, such as mesh['ep']."
        )
    ranks = mesh.mesh.flatten().tolist()
    inside = mesh.ndim == 1 and groups.world > 1 and set(ranks) <= set(groups.global_ranks)
    if not inside or mesh.get_coordinate() is None or groups.shards < groups.world:
        raise ValueError(
            f"{groups.where}expert_mesh={ranks} must be one dimension with this rank, among the "
            f"ranks {list(groups.global_ranks)} that are sharded over in one dimension. Pass "
            "mesh= all ranks whose gradients are averaged, and expert_mesh= the dimension among "
            "them that cuts the experts."
        )
    coordinates = of_all_ranks(mesh.get_local_rank(), groups, "comparing expert_mesh")
    places = tuple(r for r, each in enumerate(coordinates) if each == mesh.get_local_rank())
    if len(places) * mesh.size() != groups.world:
        raise ValueError(
            f"{groups.where}expert_mesh={ranks}: the ranks {list(groups.global_ranks)} are at its "
            f"places {coordinates}, which are not all as often there. Make all meshes from one "
            "init_device_mesh()."
        )
    alike = make_group([groups.global_ranks[place] for place in places])
    made = DeviceMesh.from_group(alike, groups.device.type)
    return groups._replace(experts=Experts(mesh, made, places))


def check_same_on_all_ranks(
    groups: Groups,
    description: list[str],
    what: str,
    remedy: str,
) -> None:
    """Raise on every rank if the lines of ``description`` differ, naming the first two that do.

    Raises:
        ValueError: on all ranks.
    """
    if groups.world == 1:
        return
    comparing = f"comparing {what}"
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()
    if len(set(of_all_ranks(digest, groups, comparing))) == 1:
        return
    everyone = of_all_ranks(description, groups, comparing)
    other = next(r for r in range(groups.world) if everyone[r] != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[other], fillvalue="nothing")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"{groups.where}{what} differ between ranks: '{first}' on rank {groups.global_ranks[0]}, "
        f"'{second}' on rank {groups.global_ranks[other]}. {remedy}"
    )


def _of_other_rank(groups: Groups, rank: int, text: str, what: str) -> str:
    """The message of an error with ``text`` on another rank, with one beginning and one path."""
    own = _OWN_ERROR.sub("", text)
    paths = re.findall(r"'[^']+'", what)
    if own != text and paths and all(path in own for path in paths):
        return f"{groups.where}on rank {rank}: {own}"
    return f"{groups.where}{what}: rank {rank}: {own}"


@contextlib.contextmanager
def all_or_none(groups: Groups, what: str) -> Iterator[dict[Any, Any]]:
    """Raise on every rank if the body raised on one. Collective.

    Yields:
        A dict for what the body finds out. Afterwards it also has the entries of the other ranks
        under keys that this rank did not set, those of the first such rank.
    Raises:
        RuntimeError: on the ranks where it did not, naming the first rank where it did.
    """
    failure, found = None, {}
    try:
        yield found
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = of_all_ranks((text, found), groups, what) if groups.world > 1 else [(text, found)]
    if failure is not None:
        raise failure
    for rank, (text, others) in enumerate(everyone):
        if text is not None:
            raise RuntimeError(_of_other_rank(groups, groups.global_ranks[rank], text, what))
        for key, value in others.items():
            found.setdefault(key, value)
