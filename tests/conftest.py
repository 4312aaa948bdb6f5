"""How multi-rank tests run: as one program on all ranks, under torchrun.

    torchrun --nproc-per-node 2 -m pytest tests -m dist

Every rank runs the same tests in the same order. After each one the ranks tell each other how it
went, through the TCPStore and not through a process group, which a failed test may have left out of
step. A test fails on all ranks if it failed on one, and rank 0 prints every rank's traceback; the
other ranks print nothing. A rank that dies or hangs is named by the others. Limits, from the
shortest to the longest, so that each reports before the next one strikes: a collective of `group`,
the test (pytest-timeout), the wait for other ranks' answers, the watchdog.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import time
import warnings
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import hypothesis
import numpy
import pytest
import torch
import torch.distributed as dist
from _pytest.runner import runtestprotocol
from harness import SHARDS, Team
from kernel_data import WALKS
from quick_choice import unneeded
from torch.distributed.device_mesh import DeviceMesh

# Torch keeps the stacks of its last 2,000 collectives. Tests that count bytes would see them.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ

# Where tests make their tensors: "cpu", "cuda", or "lagged", which needs no GPU and whose work is
# late.
DEVICE = os.environ.get("ZERO_EXT_TEST_DEVICE", "cpu")

# gloo carries a device's tensors through host memory; "cpu:gloo,lagged:lccl" does not.
BACKENDS = os.environ.get("ZERO_EXT_TEST_BACKENDS", "cpu:gloo" if DEVICE == "lagged" else "gloo")

# As on so many hosts: only ranks of the same one read each other's memory.
if "ZERO_EXT_TEST_HOSTS" in os.environ:
    _host = RANK * int(os.environ["ZERO_EXT_TEST_HOSTS"]) // WORLD
    os.environ["ZERO_EXT_CROSS_MEMORY"] = str(1 + _host)

COLLECTIVE_TIMEOUT_S = 25
TEST_TIMEOUT_S = 60
ANSWER_MARGIN_S = 10
WATCHDOG_MARGIN_S = 25

# A rank that closes a group breaks the connections of collectives that other ranks' devices still
# run, until they have aborted the group, too.
ABORTS = "lccl" in BACKENDS
CLOSES_AFTER_S = 1 if ABORTS else 0

# Ranks must draw the same examples; shrinking would replay collectives on one rank alone.
hypothesis.settings.register_profile(
    "spmd",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.load_profile("spmd")


class Ranks:
    """This rank's end of the conversation between ranks, and the owner of the process groups."""

    def __init__(self):
        timeout = timedelta(seconds=TEST_TIMEOUT_S)
        # Two connections: a store that waits for an answer would block the process groups' own use
        # of it.
        self.group_store = next(dist.rendezvous("env://", timeout=timeout))[0]
        self.store = dist.PrefixStore("tests", next(dist.rendezvous("env://", timeout=timeout))[0])
        self.generation = 0
        self.tests_done = 0
        self.out_of_step = ""
        self.closing = Closing()

    def connect(self) -> None:
        """Make a default group that shares nothing with earlier ones, not even names."""
        self.generation += 1
        dist.init_process_group(
            BACKENDS,
            store=dist.PrefixStore(f"groups{self.generation}", self.group_store),
            rank=RANK,
            world_size=WORLD,
            timeout=timedelta(seconds=TEST_TIMEOUT_S),
        )

    def disconnect(self) -> None:
        """Close every group, which wakes the ranks that wait for this one in a collective.

        Gloo closes a group's sockets with the last reference to it; those of a failed test hang on
        its traceback.
        """
        self.closing.wait()
        sys.last_exc = sys.last_value = sys.last_traceback = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def exchange(self, answer: dict, timeout_s: float) -> dict[int, dict]:
        """All ranks' answers by rank; a rank that gives none in time is absent."""
        self.tests_done += 1
        self.store.set(f"{self.tests_done}/{RANK}", pickle.dumps(answer))
        answers = {RANK: answer}
        deadline = time.monotonic() + timeout_s
        for rank in range(WORLD):
            key = f"{self.tests_done}/{rank}"
            if rank != RANK and self.wait(key, deadline):
                answers[rank] = pickle.loads(self.store.get(key))
        return answers

    def wait(self, key: str, deadline: float) -> bool:
        # In short waits, because signals are handled only between them. The first is made even
        # after the deadline: the wait for an earlier rank may have used it up.
        while True:
            left_s = max(deadline - time.monotonic(), 0.2)
            try:
                self.store.wait([key], timedelta(seconds=min(left_s, 1.0)))
                return True
            except dist.DistNetworkError:  # the store's host has died
                return False
            except dist.DistStoreError:
                if time.monotonic() >= deadline:
                    return False


class Closing:
    """Closes the groups that a test leaves behind while the next ones run.

    gloo takes 10 ms to close a connection, in which nothing happens: with the groups of every
    engine that was a third of the time of the tests on two ranks. Until then each group's thread
    asks for news 100 times a second, so that many close at once.
    """

    def __init__(self):
        self.at_once = False
        self.of_test: list[dist.ProcessGroup] = []
        self.to_close: list[tuple[float, dist.ProcessGroup]] = []  # since when
        self.threads = ThreadPoolExecutor(16, thread_name_prefix="closing")
        self.under_way: list[Future] = []
        c10d = torch._C._distributed_c10d
        register = c10d._register_process_group

        def keep(name: str, group: dist.ProcessGroup) -> None:
            register(name, group)
            if not self.at_once:
                self.of_test.append(group)

        c10d._register_process_group = keep  # as engines call it

    def start(self, older_than_s: float = CLOSES_AFTER_S) -> None:
        """Of groups that had their last test so long ago."""
        now = time.monotonic()
        while self.of_test:
            self.to_close.append((now, self.of_test.pop()))
            if ABORTS:
                with contextlib.suppress(RuntimeError):  # a group of the host's alone
                    self.to_close[-1][1]._get_backend(torch.device(DEVICE)).abort()
        self.under_way = [each for each in self.under_way if not each.done()]
        while self.to_close and self.to_close[0][0] <= now - older_than_s:
            self.under_way.append(self.threads.submit([self.to_close.pop(0)[1]].clear))

    def wait(self) -> None:
        self.start(0)
        for each in self.under_way:
            each.result()


ranks: Ranks | None = None
# The real stderr, of every rank: pytest captures the descriptor during tests.
emergency = sys.stderr


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="seed of every test, instead of one by its name")
    parser.addoption(
        "--answer-timeout",
        type=float,
        help="seconds to wait for other ranks after a test (default: its timeout + 10)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if RANK > 0:
        config.option.xmlpath = None  # rank 0 writes --junitxml


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "dist: runs on all ranks, under torchrun")
    config.addinivalue_line("markers", "host: of the CPU alone, not for ZERO_EXT_TEST_DEVICE")
    config.addinivalue_line("markers", "real_device: with something that 'lagged' lacks")
    config.addinivalue_line("markers", "device: for a ZERO_EXT_TEST_DEVICE, not for the CPU")
    config.addinivalue_line("markers", "lagged: for ZERO_EXT_TEST_DEVICE=lagged alone")
    config.addinivalue_line(
        "markers", "world(size) or world(min=, max=): the numbers of ranks that a dist test is for"
    )
    global emergency
    if not UNDER_TORCHRUN:
        return
    emergency = open(os.dup(2), "w")  # noqa: SIM115
    if RANK > 0:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
    # torchrun stops all ranks when one has died: say what this rank was doing, then let pytest
    # print its summary.
    signal.signal(signal.SIGTERM, _stopped_by_torchrun)
    faulthandler.register(signal.SIGTERM, file=emergency, chain=True)


def _stopped_by_torchrun(signum, frame):
    pytest.exit(f"[rank {RANK}] stopped by torchrun, because another rank died", returncode=1)


def pytest_sessionstart(session):
    global ranks
    torch.set_num_threads(1)
    _spare_every_test_what_torch_does()
    if DEVICE == "lagged":
        import lagged_device

        import zero_ext

        lagged_device.load()
        zero_ext._C.set_kernels(torch.device(DEVICE), lagged_device.kernels_address())
        if os.environ.get("ZERO_EXT_TEST_DIRECT") == "1":
            lagged_device.share_memory()
        # A rank's messages are late for the others, too.
        lagged_device.set_lag(50_000 if WORLD == 1 else 5_000)
    if DEVICE == "cuda":
        _warm_up_cuda()
        if "gccl" in BACKENDS:
            import device_gloo

            device_gloo.register()
    if UNDER_TORCHRUN:
        ranks = Ranks()
        ranks.connect()


def _spare_every_test_what_torch_does() -> None:
    # manual_seed() keeps the stack for each kind of device that may come later: 2 ms.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
    # Pytest adds its handlers to every logger that does not propagate, six times in each test.
    for logger in [*logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def _warm_up_cuda() -> None:
    """What happens once in a process must not happen in a test: memory that cuBLAS keeps for each
    thread, and warnings (of the first product in autograd's thread), which some take for errors."""
    torch.backends.cudnn.deterministic = True  # equal convolutions have equal bits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.Linear(2, 2, device=DEVICE)(torch.ones(2, 2, device=DEVICE)).sum().backward()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if ranks is None:
        return
    # A rank that ends with an error makes torchrun stop the others. Rank 0 must have printed
    # everything first, and every rank ends with its own exit status.
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if RANK == 0:
        sys.stdout.flush()
        ranks.store.set("printed", b"")
    else:
        ranks.wait("printed", time.monotonic() + 30)
    if not ranks.out_of_step:
        ranks.disconnect()


def pytest_collection_finish(session):
    # Modules and tests stay: each full collection would visit them for longer than a test takes.
    gc.collect()
    gc.freeze()


# Before pytest drops what `-m` excludes.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    candidates = []
    for item in items:
        is_dist = item.get_closest_marker("dist") is not None
        reason = _skip_reason(item) if is_dist else ""
        if is_dist and not UNDER_TORCHRUN:
            reason = "needs ranks: torchrun --nproc-per-node 2 -m pytest tests -m dist"
        elif not is_dist and UNDER_TORCHRUN:
            reason = "for one process: pytest tests -m 'not dist'"
        if DEVICE != "cpu" and item.get_closest_marker("host"):
            reason = "of the CPU alone"
        if DEVICE == "cpu" and item.get_closest_marker("device"):
            reason = "for another device: ZERO_EXT_TEST_DEVICE=lagged"
        if DEVICE != "lagged" and item.get_closest_marker("lagged"):
            reason = "for ZERO_EXT_TEST_DEVICE=lagged"
        if DEVICE == "lagged" and item.get_closest_marker("real_device"):
            reason = "what it compares with does not run on this device"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason), append=False)
        elif not item.get_closest_marker("slow"):
            candidates.append(item)
        if is_dist and not item.get_closest_marker("timeout") and not config.getoption("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, method="signal"))
    size = 1 if UNDER_TORCHRUN or DEVICE != "cpu" else 2
    for item in unneeded(candidates, size, salt=f"{WORLD} ranks, {DEVICE}"):
        item.add_marker(pytest.mark.slow)


def _skip_reason(item) -> str:
    marker = item.get_closest_marker("world")
    if marker is None:
        return ""
    least = marker.args[0] if marker.args else marker.kwargs.get("min", 1)
    most = marker.args[0] if marker.args else marker.kwargs.get("max", WORLD)
    return "" if least <= WORLD <= most else f"for {least} to {most} ranks, here are {WORLD}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Runs a dist test and logs it only when all ranks have said how it went."""
    if ranks is None or item.get_closest_marker("dist") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    limit_s = _timeout_of(item)
    answer_s = item.config.getoption("answer_timeout") or limit_s + ANSWER_MARGIN_S
    faulthandler.dump_traceback_later(limit_s + WATCHDOG_MARGIN_S, exit=True, file=emergency)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    # Both would strike while this rank waits for the others, which has a limit of its own.
    faulthandler.cancel_dump_traceback_later()
    item.ihook.pytest_timeout_cancel_timer(item=item)
    if any(report.failed for report in reports):
        ranks.disconnect()
    answers = ranks.exchange(_describe(item, reports), answer_s)
    problems = _compare(answers, answer_s)
    if problems:
        _fail(reports, problems)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if ranks.out_of_step:
        print(f"\n[rank {RANK}] {item.nodeid}: {ranks.out_of_step}", file=emergency, flush=True)
        item.session.shouldfail = ranks.out_of_step
    elif problems:
        ranks.disconnect()
        ranks.connect()
    else:
        # Not at the end of the test: another rank may still have been in a collective then.
        # All but the default group.
        for group in list(dist.distributed_c10d._world.pg_map)[1:]:
            ranks.closing.of_test.append(group)
            dist.destroy_process_group(group)
            if torch.__version__ < "2.13":
                forget_placements()  # as `no_stale_meshes`
        ranks.closing.start()
    return True


def _timeout_of(item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return item.config.getoption("timeout") or TEST_TIMEOUT_S
    return marker.args[0] if marker.args else marker.kwargs.get("timeout", TEST_TIMEOUT_S)


def _describe(item, reports) -> dict:
    """What the other ranks need to know of this rank's reports."""
    skipped = any(report.skipped and not hasattr(report, "wasxfail") for report in reports)
    failures = [
        "\n".join(
            [report.longreprtext]
            + [
                f"{'-' * 20} {title} {'-' * 20}\n{text}"
                for title, text in report.sections
                if "log" not in title
            ]
        )
        for report in reports
        if report.failed
    ]
    return {"nodeid": item.nodeid, "skipped": skipped, "failures": failures}


def _compare(answers: dict[int, dict], answer_s: float) -> list[str]:
    """All ranks' problems with one test, each with its rank; none if it passed everywhere."""
    problems = [
        f"{'=' * 20} rank {rank} of {WORLD} {'=' * 20}\n{failure}"
        for rank, answer in sorted(answers.items())
        for failure in answer["failures"]
    ]
    absent = [str(rank) for rank in range(WORLD) if rank not in answers]
    if absent:
        ranks.out_of_step = (
            f"rank {', '.join(absent)} did not answer within {answer_s:g} s: hanging or dead"
        )
    elif len({answer["nodeid"] for answer in answers.values()}) > 1:
        at = ", ".join(f"rank {rank}: {answers[rank]['nodeid']}" for rank in sorted(answers))
        ranks.out_of_step = f"the ranks ran different tests ({at})"
    elif not problems and len({answer["skipped"] for answer in answers.values()}) > 1:
        who = ", ".join(str(rank) for rank in sorted(answers) if answers[rank]["skipped"])
        problems.append(f"rank {who} skipped the test, the others ran it")
    if ranks.out_of_step:
        problems.append(ranks.out_of_step)
    return problems


def _fail(reports, problems: list[str]) -> None:
    """Turn this rank's report of the test into a failure that shows all ranks' problems."""
    failed = [report for report in reports if report.failed]
    called = [report for report in reports if report.when == "call"]
    target = (failed or called or reports)[0]
    for report in reports:
        if report is not target and report.failed:
            report.outcome = "passed"
    target.outcome = "failed"
    target.longrepr = "\n\n".join(problems)
    target.sections = []


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Seeds every generator by the test's name: equal on all ranks, whatever ran before."""
    given = request.config.getoption("seed")
    value = zlib.crc32(request.node.nodeid.encode()) if given is None else given
    print(f"seed {value} (again: pytest --seed {value})")
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def device():
    """The device on which this test makes its tensors unless it says otherwise."""
    if DEVICE == "cpu":  # as it is, and without the mode's cost for every call of torch
        yield torch.device(DEVICE)
        return
    with torch.device(DEVICE):
        yield torch.device(DEVICE)


@pytest.fixture
def rank() -> int:
    return RANK


@pytest.fixture
def world() -> int:
    return WORLD


@pytest.fixture
def group():
    """A process group of all ranks for this test alone: no test meets another's messages."""
    return dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))


@pytest.fixture(params=["alone", pytest.param("ranks", marks=pytest.mark.dist)])
def team(request) -> Team:
    """Runs the test twice: in one process without a process group, and on all ranks."""
    if request.param == "alone":
        return Team(0, 1, None)
    return Team(RANK, WORLD, request.getfixturevalue("group"))


@pytest.fixture
def groups_close_at_once():
    """For a test that looks at how they close, or counts what is left."""
    # What is garbage on one rank and gone on another one would close only when both have let go.
    gc.collect()
    if ranks is not None:
        ranks.closing.wait()
        ranks.closing.at_once = True
    yield
    if ranks is not None:
        ranks.closing.at_once = False


@pytest.fixture(params=WALKS, ids=lambda walk: f"{walk[0]} {walk[1]} ahead")
def instruction_set(request):
    name, ahead = request.param
    previous = torch.ops.zero_ext._use_instruction_set(name)
    previous_ahead = torch.ops.zero_ext._use_fetch_ahead(ahead)
    yield name
    torch.ops.zero_ext._use_instruction_set(previous)
    torch.ops.zero_ext._use_fetch_ahead(previous_ahead)


@pytest.fixture
def threads():
    """Sets the number of threads; the old one comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_stale_meshes():
    """For tests with DTensors: torch's cache of their placements takes the mesh of an earlier
    test's group, which is closed, for this test's. Before torch 2.13 other tests' too."""
    forget_placements()


def forget_placements() -> None:
    # Imported here: it takes almost as long as torch, and test_harness.py's ranks shard nothing.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@pytest.fixture
def mesh(group) -> DeviceMesh:
    """The one-dimensional mesh of ``group``, or with ZERO_EXT_TEST_SHARDS that of its replicas."""
    if not SHARDS:
        return DeviceMesh.from_group(group, DEVICE)
    replicas = make_replicas(SHARDS)
    of_dimension = replicas.get_group
    # Tests that were written for one dimension ask for all ranks.
    replicas.get_group = lambda dimension=None: (
        group if dimension is None else of_dimension(dimension)
    )
    return replicas


@pytest.fixture
def replicas_of():
    """Makes a mesh of all ranks as replicas of so many."""
    return make_replicas


def make_replicas(shards: int) -> DeviceMesh:
    # Its groups are this test's alone.
    grid = torch.arange(WORLD, device="cpu").view(-1, shards)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    mine = []
    for dimension in (grid.T, grid):  # across the replicas, then within them
        groups = [dist.new_group(members, timeout) for members in dimension.tolist()]
        mine.append(next(g for g in groups if dist.get_rank(g) >= 0))
    return DeviceMesh.from_group(mine, DEVICE, grid, mesh_dim_names=("replicate", "shard"))


@pytest.fixture(params=["alone", pytest.param("ranks", marks=pytest.mark.dist)])
def anywhere(request) -> DeviceMesh | None:
    """Makes two tests of one: in a single process (None), and on the mesh of all ranks."""
    return None if request.param == "alone" else request.getfixturevalue("mesh")


@pytest.fixture
def on_one_rank(anywhere, rank, device):
    """A mesh of this rank alone."""
    if anywhere is None:
        yield None
        return
    groups = [dist.new_group([r]) for r in range(anywhere.size())]
    yield DeviceMesh.from_group(groups[rank], device.type)
    dist.barrier(anywhere.get_group())
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.fixture
def shared_path(request, tmp_path):
    """A directory of this test that all ranks see: rank 0's ``tmp_path``."""
    key = f"path/{ranks.tests_done}"
    if RANK == 0:
        ranks.store.set(key, str(tmp_path))
    assert ranks.wait(key, time.monotonic() + COLLECTIVE_TIMEOUT_S), "rank 0 made no directory"
    return type(tmp_path)(ranks.store.get(key).decode())


@pytest.fixture
def path(request, anywhere, tmp_path):
    """Of a checkpoint that does not exist yet, for all ranks that ``anywhere`` has."""
    folder = tmp_path if anywhere is None else request.getfixturevalue("shared_path")
    return folder / "saved" / "checkpoint"
