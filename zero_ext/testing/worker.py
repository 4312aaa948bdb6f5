"""A process of ``Ranks``: runs what it is sent, in a process group of its own for each run."""

import faulthandler
import os
import pickle
import signal
import traceback
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

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
        link.send_bytes(READY)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        while True:
            try:
                task = pickle.loads(link.recv_bytes())
            except EOFError:
                return
            link.send_bytes(_answer(rank, world, port, timeout_s, *task))


def _answer(rank: int, world: int, port: int, timeout_s: float, run: int, *task: Any) -> bytes:
    try:
        # Pickled here: a result that cannot be is this rank's error.
        return pickle.dumps((_run(rank, world, port, timeout_s, run, *task), None))
    except BaseException as error:
        failure = (type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((None, failure))


def _run(rank, world, port, timeout_s, run, pickled, fault) -> Any:
    function, args, kwargs = pickle.loads(pickled)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run{run}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        with fault.injected() if fault is not None and fault.rank == rank else nullcontext():
            return function(*args, **kwargs)
    finally:
        dist.destroy_process_group()
