"""zero_ext.testing: functions on several ranks, with and without a fault."""

import os
import signal
import sys
import threading
import time
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import MLP, mean_square, rank_data

import zero_ext
from zero_ext.testing import Fault, Ranks, RanksError, assert_bits, reference_gradients, worker

pytest_plugins = ["zero_ext.testing.plugin"]
WORLD = 2


def gradients(stage: int) -> dict[str, torch.Tensor]:
    model = zero_ext.shard(MLP(13), stage)
    mean_square(model, rank_data((3, 5), dist.get_rank())).backward()
    return {name: zero_ext.full_grad(p) for name, p in model.named_parameters()}


def expected_gradients() -> dict[str, torch.Tensor]:
    batches = [[rank_data((3, 5), rank) for rank in range(WORLD)]]
    return reference_gradients(lambda: MLP(13), batches, mean_square, scale=1 / WORLD)


def step_twice(seconds: float = 0) -> tuple[int, list[str]]:
    """Two steps; the errors of backwards, after which the ranks go on."""
    model = zero_ext.shard(MLP(13), 2)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for step in range(2):
        try:
            mean_square(model, rank_data((3, 5), dist.get_rank(), step)).backward()
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
            optimizer.zero_grad()
    return os.getpid(), errors


def fail_in_three_ways() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    elif dist.get_rank() == 2:
        raise KeyError("a word")
    torch.zeros(1, requires_grad=True).sum().backward()


class LateStore(dist.Store):
    """A store that answers late: this rank is still connecting when the others have connected."""

    inner = dist.PrefixStore

    def __init__(self, prefix: str, store: dist.Store):
        super().__init__()
        self.store = LateStore.inner(prefix, store)

    def get(self, key: str) -> bytes:
        time.sleep(0.05)
        return self.store.get(key)

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)

    def has_extended_api(self) -> bool:
        return False


def connect_late(rank: int) -> None:
    if dist.get_rank() == rank:
        worker.dist.PrefixStore = LateStore


def not_picklable():
    return lambda: None


def test_runs_share_their_processes_and_have_the_bits_of_one_process(zero_ext_ranks):
    ranks = zero_ext_ranks(WORLD)
    expected = expected_gradients()
    for stage in (2, 3):
        for found in ranks.run(gradients, stage):
            assert_bits(found, expected)
    (one, _), (other, _) = ranks.run(step_twice)
    assert one != other and os.getpid() not in (one, other)
    assert [pid for pid, _ in ranks.run(step_twice)] == [one, other]
    # One rank's backward fails and tells the others; all go on, in the same processes.
    fault = Fault(rank=1, action="raise", at="torch.Tensor.backward")
    (pid, told), (_, raised) = ranks.run(step_twice, fault=fault)
    assert pid == one and len(told) == 1 and "rank 1" in told[0]
    assert raised == ["rank 1, before call 1 of torch.Tensor.backward"]
    late = Fault(rank=0, action="delay", at="zero_ext.optim.SGD.step", call=2, seconds=0.3)
    start = time.monotonic()
    assert [errors for _, errors in ranks.run(step_twice, fault=late)] == [[], []]
    assert time.monotonic() - start >= 0.3


def test_every_rank_s_failure_is_told_and_the_next_run_has_new_processes():
    with Ranks(3) as ranks:
        ranks.run(connect_late, 0)
        for _ in range(2):  # no rank waits for another one in the function
            assert_bits(ranks.run(torch.ones, 2), 3 * [torch.ones(2)])
        ranks.timeout_s = 4  # waited for below: the processes have started
        fault = Fault(rank=1, action="kill", at="torch.Tensor.backward")
        with pytest.raises(RanksError, match="rank 1: died: by signal SIGKILL") as raised:
            ranks.run(fail_in_three_ways, fault=fault)
        failures = raised.value.failures
        assert [failures[rank].kind for rank in range(3)] == ["hung", "died", "KeyError"]
        assert "fail_in_three_ways" in failures[0].details, "the stack of the rank that hung"
        assert failures[0].details.endswith("in <module>\n"), "to its end"
        assert "a word" in failures[2].details and raised.value.results == {}
    with Ranks(1) as ranks:
        with pytest.raises(RanksError, match="lambda"):
            ranks.run(not_picklable)
        assert_bits(ranks.run(torch.ones, 2), [torch.ones(2)])


CELLS = """
import dataclasses, enum
import torch.distributed as dist

class Word(enum.Enum):
    ONE = 1

@dataclasses.dataclass
class Answer:
    rank: int
    word: Word

def answer(word):
    return Answer(dist.get_rank() + offset, word)

offset = 10
"""


@pytest.fixture
def notebook(monkeypatch):
    """As the module ``__main__`` of a notebook's kernel, which is no file."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(CELLS, vars(main))
    return main


def test_what_cells_of_a_notebook_define_goes_to_the_ranks_and_comes_back(zero_ext_ranks, notebook):
    ranks = zero_ext_ranks(WORLD)
    for offset in (10, 20):
        notebook.offset = offset
        found = ranks.run(notebook.answer, word=notebook.Word.ONE)
        assert found == [notebook.Answer(rank + offset, notebook.Word.ONE) for rank in range(WORLD)]
    assert ranks.run(eval("lambda: offset + dist.get_rank()", vars(notebook))) == [20, 21]


def test_a_notebook_without_cloudpickle_is_told_so(notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        Ranks(WORLD).run(notebook.answer)


def test_ctrl_c_ends_the_processes(zero_ext_ranks):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with Ranks(1) as ranks:
            ranks.run(time.sleep, 0)
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                ranks.run(time.sleep, 60)
            assert ranks._processes == [], "the next run would get the answer to this one"
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)


def test_what_cannot_be_sent_is_refused_before_a_process_starts(monkeypatch):
    # Where pytest-xdist runs tests, the main module has no file either, as in a notebook.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "main.py", raising=False)
    with Ranks(2) as ranks:
        for arguments in ((lambda: None,), (gradients, lambda: 3), (gradients, threading.Lock())):
            with pytest.raises(TypeError, match=r"cannot be sent to other processes: .* top of a"):
                ranks.run(*arguments)
        assert ranks._processes == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "explode"}, "'explode': choose one of"),
        ({"at": "torch.Tensor.backwards"}, "'torch.Tensor.backwards' is not a function"),
        ({"at": "no_such.place"}, "'no_such.place' is in no module"),
        ({"call": 0}, "call is 0"),
        ({"seconds": float("nan")}, "delay is nan s"),
    ],
)
def test_faults_that_cannot_happen(arguments, message):
    with pytest.raises(ValueError, match=message):
        Fault(**{"rank": 0, "action": "raise", "at": "torch.Tensor.backward", **arguments})


def test_bad_arguments_start_nothing():
    fault = Fault(rank=2, action="kill", at="torch.Tensor.backward")
    with pytest.raises(ValueError, match="on rank 2 of 2"):
        Ranks(2).run(step_twice, fault=fault)
    for world, timeout_s in ((0, 1), ("2", 1), (2, 0)):
        with pytest.raises(ValueError, match=r"number of ranks|timeout"):
            Ranks(world, timeout_s)


def test_what_differs_is_named():
    same = {"a": [torch.tensor([1.0, float("nan")])], "b": 3}
    assert_bits(same, {"a": [torch.tensor([1.0, float("nan")])], "b": 3})
    with pytest.raises(AssertionError, match=r"tensor 'a'\[0\]: 1 of 2 elements .* at \[0\]: 1.0"):
        assert_bits(same, {"a": [torch.tensor([2.0, float("nan")])], "b": 3})
    with pytest.raises(AssertionError, match="tensor 'b': 3, expected 4"):
        assert_bits(same, {"a": same["a"], "b": 4})
