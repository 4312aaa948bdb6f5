"""Ranks are killed, stopped, ended and joined at random. The training has the bits of one that
nobody has disturbed, and no finished step is made again.

EVENTS=300 .venv/bin/python -m pytest tests/elastic/test_events.py -m slow
"""

import collections
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from elastic_training import TIMEOUT_S, Training
from launching import HOST, OUTER, forks

pytestmark = pytest.mark.host  # the processes are on it, whatever device the tests are on
STEPS, MOST = 14, 6
STOPPED_S = TIMEOUT_S + 2.0  # longer than the process groups wait
PROGRAM = str(Path(__file__).parents[1] / "support/elastic_training.py")
EVENTS = int(os.environ.get("EVENTS", 300))
KINDS = ("kill", "kill", "terminate", "stop", "join")


class Processes:
    """Those that take part in one training."""

    def __init__(self, folder: Path, stage: int):
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.report, self._folder, self._stage = folder / "report", folder, stage
        self._running: list = []
        self._stopped: dict[int, float] = {}  # by pid, when it goes on
        self._leaving: set[int] = set()
        self._errors = (folder / "errors").open("w+")

    def start(self) -> None:
        copies = self._folder / "copies"
        copies.mkdir(exist_ok=True)
        arguments = (PROGRAM, self._store.port, copies, self._stage, STEPS, self.report)
        env = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
        errors = self._errors.fileno()
        fork = forks().start([*map(str, arguments)], self._folder, env, errors, errors)
        self._running.append(fork)

    def wait_for_step(self, step: int, deadline: float) -> None:
        while self.last_step() < step and self._alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def last_step(self) -> int:
        return max((fact["step"] for fact in self.facts() if "step" in fact), default=0)

    def facts(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError):
            whole = self.report.read_text().rpartition("\n")[0]
            return [json.loads(line) for line in whole.splitlines()]
        return []

    def disturb(self, kind: str, draw: random.Random) -> bool:
        """Whether it could be done: one rank has to go on."""
        alive = [each for each in self._alive() if each.pid not in self._leaving]
        if kind == "join":
            joins = len(self._alive()) < MOST
            if joins:
                self.start()
            return joins
        if len(alive) < 2:
            return False
        chosen = draw.choice(alive)
        self._leaving.add(chosen.pid)
        numbers = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
        chosen.send_signal(numbers[kind])
        if kind == "stop":
            self._stopped[chosen.pid] = time.monotonic() + STOPPED_S
        return True

    def _alive(self) -> list:
        for each in self._running:
            if time.monotonic() > self._stopped.get(each.pid, float("inf")):
                del self._stopped[each.pid]
                self._leaving.discard(each.pid)
                each.send_signal(signal.SIGCONT)
        return [each for each in self._running if not each.has_ended()]

    def end(self, deadline: float) -> str:
        """Wait for all. Returns what they have written to the standard error."""
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        late = self._alive()
        for each in late:
            each.send_signal(signal.SIGKILL)
        for each in self._running:
            each.wait()
        self._errors.seek(0)
        text = self._errors.read()
        self._errors.close()
        return f"{len(late)} have not ended\n{text}" if late else ""


def check_steps(facts: list[dict]) -> None:
    """No round makes a step again that all ranks had finished when it began."""
    rounds = collections.defaultdict(list)
    for fact in facts:
        if "step" in fact:
            rounds[fact["era"]].append(fact)
    begins = {fact["begins"]: fact["time"] for fact in reversed(facts) if "begins" in fact}
    for era, told in rounds.items():
        first = min(fact["step"] for fact in told)
        for others in rounds.values():
            before = [fact["step"] for fact in others if fact["time"] < begins[era]]
            counts = collections.Counter(before)
            whole = [step for step, count in counts.items() if count == others[0]["world"]]
            assert max(whole, default=0) < first, facts


@pytest.fixture(scope="module")
def undisturbed() -> str:
    training = Training(2, 0, 1, mesh="alone")
    for _ in range(STEPS):
        training.step()
    return training.fingerprint()


def train_with_events(seed: int, folder: Path, expected: str) -> int:
    """Returns the number of events."""
    draw = random.Random(seed)
    processes = Processes(folder, stage=draw.randint(1, 3))
    for _ in range(draw.randint(2, 5)):
        processes.start()
    deadline = time.monotonic() + 100
    events = sorted((draw.randrange(STEPS), draw.choice(KINDS)) for _ in range(draw.randint(1, 4)))
    happened = []
    for step, kind in events:
        processes.wait_for_step(step, deadline)
        time.sleep(draw.random() * 0.02)
        if processes.disturb(kind, draw):
            happened.append((kind, processes.last_step()))
    errors = processes.end(deadline)
    facts = processes.facts()
    found = {fact["fingerprint"] for fact in facts if "fingerprint" in fact}
    assert found == {expected} and not errors, f"seed {seed}, {happened}: {found}\n{errors}"
    check_steps(facts)
    return len(happened)


@pytest.mark.parametrize("seed", [3, 5])
def test_a_disturbed_training_has_the_bits_of_an_undisturbed_one(seed, tmp_path, undisturbed):
    assert train_with_events(seed, tmp_path, undisturbed) > 0


@pytest.mark.slow
@pytest.mark.timeout(60 * 60)
def test_many_disturbed_trainings_have_the_bits_of_an_undisturbed_one(tmp_path, undisturbed):
    seed, events = 1000, 0
    while events < EVENTS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        events += train_with_events(seed, folder, undisturbed)
        seed += 1
