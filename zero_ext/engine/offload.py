"""``offload_states`` and ``reload_states``: states in host memory between two phases of a program.

A model on the CPU has all states in host memory already. For it the calls keep their rules and move
nothing.
"""

from collections.abc import Iterable

from zero_ext.engine.registry import handle_of

# As in ``stats()["bytes_<name>"]``; stage 3's shards, "full" while released, go with "full".
STATES = ("full", "master", "grad", "optimizer_state")


def offload_states(sharded, include: Iterable[str] | None = None) -> None:
    """Move states out of device memory until ``reload_states``, between two phases of a program.

    While anything is offloaded, ``backward()`` and ``step()`` raise. Without ``"full"`` the forward
    still runs, for evaluation and generation. States that are offloaded already stay so. States of
    a wrapped optimizer, which are torch's, move as well; ``stats()`` does not count them.

    Args:
        sharded: A sharded module, or an optimizer of this package.
        include: Some of ``"full"`` (the parameters themselves), ``"master"``, ``"grad"`` and
            ``"optimizer_state"``; default all. Where stage 3 keeps parameters in their masters
            alone, ``"master"`` without ``"full"`` leaves this rank's part of them on the device. A
            part that other devices read in place stays there as well.
    Raises:
        ValueError, TypeError: ``sharded`` is not sharded, or a name does not exist.
        RuntimeError: inside a backward.
        torch.OutOfMemoryError: no host memory is left. What has been moved by then stays there,
            all of it counts as offloaded; ``reload_states`` brings it back.
    """
    handle = handle_of(sharded)
    names = STATES if include is None else include
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"zero_ext: offload_states(): include must hold names, as ['grad'] does, not {names!r}."
        )
    names = list(names)
    unknown = sorted(repr(name) for name in names if name not in STATES)
    if unknown:
        raise ValueError(
            f"zero_ext: offload_states(): there is no state {', '.join(unknown)}; there are "
            f"{', '.join(map(repr, STATES))}."
        )
    handle.set_offloaded(handle.engine.offloaded() | set(names))


def reload_states(sharded) -> None:
    """Bring back what ``offload_states`` has moved, if it has moved anything.

    Raises:
        ValueError, TypeError: ``sharded`` is not sharded.
        torch.OutOfMemoryError: there is not enough device memory. All states still count as
            offloaded. Free some memory and call this again.
    """
    handle_of(sharded).set_offloaded(frozenset())
