"""Threads that meet at the engine's lock: none waits for it with the GIL, and none for itself."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import MLP, gather_objects, mean_square, needs_one_host, rank_data
from setups import MLP_INPUT
from torch import Tensor, nn

import zero_ext
from zero_ext import _C
from zero_ext.engine.registry import find


class Subclass(Tensor):
    @staticmethod
    def __new__(cls, value: Tensor):
        return Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@contextmanager
def lock_is_held(engine: _C.Engine, i: int, like: Tensor) -> Iterator[None]:
    """A thread holds the engine's lock without the GIL: it reads a gradient by a slow reader."""
    held, free = threading.Event(), threading.Event()

    def read(_grad: Tensor) -> tuple[Tensor, _C.Edits]:
        held.set()
        free.wait(10)
        return torch.zeros(like.numel()), _C.Edits()

    engine.set_local_reader(read)
    holder = threading.Thread(target=engine.write_gradient, args=(i, Subclass(like.detach())))
    holder.start()
    try:
        assert held.wait(10)
        yield
    finally:
        free.set()
        holder.join()


def model_and_engine() -> tuple[nn.Module, _C.Engine]:
    model = zero_ext.shard(MLP(13), 3)
    model.optimizer = zero_ext.optim.AdamW(model.parameters())
    return model, find(model.layers[0].weight)[0].engine


CALLS: dict[str, Callable[[nn.Module, _C.Engine], object]] = {
    "add_hook_site": lambda _, e: e.add_hook_site([0], root=False, first=True, last=True),
    "add_inner_site": lambda _, e: e.add_inner_site([]),
    "set_view_maker": lambda _, e: e.set_view_maker(lambda _i, local: (local, None)),
    "a property": lambda _, e: e.held_by_user,
    "a step": lambda m, _: m.optimizer.step(),
    "a norm": lambda m, _: m.optimizer.clip_grad_norm_(1.0),
    "unshard": lambda _, e: e.unshard(),
    "stats": lambda _, e: e.stats(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_thread_that_waits_for_the_lock_has_released_the_gil(call):
    model, engine = model_and_engine()
    returned = []
    waiting = threading.Thread(target=lambda: returned.append(call(model, engine)))
    with lock_is_held(engine, 0, model.layers[0].weight):
        waiting.start()
        time.sleep(0.01)  # this thread goes on, and gives the lock back
        assert not returned
    waiting.join(10)
    assert returned


def test_a_lock_whose_holder_may_ask_for_the_gil_is_not_taken_with_it():
    _C.take_owned_mutex(release_gil=True, twice=False)
    for twice in (False, True):
        with pytest.raises(RuntimeError, match="thread that holds the GIL would wait"):
            _C.take_owned_mutex(release_gil=False, twice=twice)
    with pytest.raises(RuntimeError, match="inside another call of the same model"):
        _C.take_owned_mutex(release_gil=True, twice=True)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
@pytest.mark.parametrize("use", ["step", "forward", "state_dict"])
def test_a_signal_handler_that_uses_the_waiting_model_raises(mesh, rank, use):
    """The handler runs inside the wait. It would wait for its own thread for ever."""
    needs_one_host("a rank that gives up a wait cannot go on")
    model = zero_ext.shard(MLP(13), 3, mesh=mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    calls = {
        "step": optimizer.step,
        "forward": lambda: model(torch.ones(1, 5)),
        "state_dict": model.state_dict,
    }
    mean_square(model, rank_data(MLP_INPUT, rank)).backward()
    before = signal.signal(signal.SIGUSR1, lambda *_: calls[use]())
    try:
        if rank == 0:
            me = threading.get_ident()
            threading.Timer(0.1, lambda: signal.pthread_kill(me, signal.SIGUSR1)).start()
            with pytest.raises(RuntimeError, match=r"inside another call|in the same thread"):
                optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    gather_objects(rank)
    optimizer.step()
    norms = gather_objects([float(zero_ext.full_tensor(p).norm()) for p in model.parameters()])
    assert all(n == norms[0] for n in norms)


@pytest.mark.dist
@pytest.mark.host
@pytest.mark.world(min=2)
def test_between_hosts_a_rank_that_has_given_up_a_wait_says_so(mesh, rank, monkeypatch):
    """Its next message would meet another rank's later one, and gloo would end the process."""
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    monkeypatch.setenv("ZERO_EXT_TIMEOUT_S", "2")
    model = zero_ext.shard(MLP(13), 3, mesh=mesh)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    mean_square(model, rank_data(MLP_INPUT, rank)).backward()
    before = signal.signal(signal.SIGUSR1, lambda *_: optimizer.step())
    if rank == 0:
        me = threading.get_ident()
        threading.Timer(0.1, lambda: signal.pthread_kill(me, signal.SIGUSR1)).start()
        with pytest.raises(RuntimeError, match=r"inside another call|in the same thread"):
            optimizer.step()
    signal.signal(signal.SIGUSR1, before)
    gather_objects(rank)
    error = "an earlier wait has failed. Start all" if rank == 0 else "waiting for rank 0"
    with pytest.raises(RuntimeError, match=error):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_threads_run_backwards_of_models_of_their_own(stage):
    """For `make tsan`: without the GIL, and without a lock that both models share."""
    batches = [rank_data(MLP_INPUT, i) for i in range(2)]
    models = [zero_ext.shard(MLP(), stage, mesh="alone") for _ in batches]

    def train(model: nn.Module, batch: Tensor) -> None:
        for _ in range(5):
            mean_square(model, batch).backward()

    threads = [
        threading.Thread(target=train, args=pair) for pair in zip(models, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, batch in zip(models, batches, strict=True):
        plain = MLP()
        train(plain, batch)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(zero_ext.full_grad(p), q.grad)
