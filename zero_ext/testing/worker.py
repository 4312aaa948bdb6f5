"""A process of ``Ranks``: runs what it is sent, in a process group of its own for each run."""

import faulthandler
import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from zero_ext.testing.faults import Fault

READY = b"ready"
STACKS = signal.SIGUSR1  # asks a process for the stacks of its threads


def serve(rank: int, world: int, port: int, timeout_s: float, stacks: str, link: Connection):
    """Say ``READY``, then answer tasks until the link is closed.

    A task is ``(run, pickled function and arguments, fault)``. The answer is ``(result, None)`` or
    ``(None, (type, message, traceback))``.

    Args:
        port: Of the TCPStore that the runs meet in.
        stacks: File for the stacks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    with open(stacks, "w") as file:
        faulthandler.register(STACKS, file=file)
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, timeout=timeout)
        make_group = functools.partial(_make_group, store, rank, world, timeout)
        link.send_bytes(READY)
        while True:
            try:
                task = pickle.loads(link.recv_bytes())
            except EOFError:
                return
            link.send_bytes(_answer(make_group, rank, *task))


def _answer(
    make_group: Callable[[int], None],
    rank: int,
    run: int,
    pickled: bytes,
    fault: Fault | None,
) -> bytes:
    try:
        function, args, kwargs = pickle.loads(pickled)
        make_group(run)
        try:
            with fault.injected() if fault is not None and fault.rank == rank else nullcontext():
                result = function(*args, **kwargs)
        finally:
            dist.destroy_process_group()
            sys.stdout.flush()  # or what was printed is lost when the process is killed
        # A function from cloudpickle may return objects of classes that a notebook's cells define.
        pickler = sys.modules.get("cloudpickle", pickle)
        return pickler.dumps((result, None))  # here: a result that cannot be is this rank's error
    except BaseException as error:
        failure = (type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((None, failure))


def _make_group(store: dist.Store, rank: int, world: int, timeout: timedelta, run: int) -> None:
    """Make the default group of this run. Ends when every rank has made it."""
    prefixed = dist.PrefixStore(f"run{run}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=timeout)
    # Gloo lets one rank go on while another one is still connecting, which then finds the end of a
    # group that was destroyed at once.
    dist.barrier()
