"""``python -m zero_ext.doctor``: what the machines let zero_ext do, before the first training.

torchrun starts it on the ranks that a training would have. Without torchrun it is one process. It
works in three steps: ``gather`` asks the system and measures, ``judge`` names what is wrong with
the facts, and ``page`` prints. Exit code 0: no error; 1: an error; 2: the ranks have not met.
"""

import argparse
import itertools
import json
import os
import re
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_ext import _C, info
from zero_ext.fingerprints import fingerprint
from zero_ext.module.sharding import shard
from zero_ext.optim import AdamW
from zero_ext.ranks import environment
from zero_ext.ranks.groups import CPU

_MEASURED_BYTES = 2**26
_SLOW = 0.25  # of a copy's speed
_MIB = 2**20
# Remarks on torch's versions, and the drivers that versions of CUDA need.
_TORCH = {
    "2.11": "zero_ext is compiled with it, and tested with 2.13.",
    "2.13": "",
    "2.15": "zero_ext has not run over its NCCL. TORCH_DIST_USE_NCCL2=0 takes the former one.",
}
_DRIVERS = {"12": "525.60", "13": "580.65"}


@dataclass(frozen=True)
class Facts:
    """The facts about one rank, in types of JSON.

    Attributes:
        system: The kernel that runs it; ``process_space``: where its process number counts.
        devices: How many of kind ``device`` it sees; 0: it computes on the CPU.
        shm_bytes, open_files: The size of /dev/shm, and the most files that may be open; -1: none.
        reached: Ranks whose memory this one reads, and that read this one's.
        gb_per_s: 10^9 bytes per second, by what was measured.
        equal_bits: By stage, whether a small model has the bits of one process.
        failure: The error that has ended the measurements, or "".
    """

    rank: int
    local_rank: int
    info: dict[str, str]
    host: str
    system: str
    process_space: str
    user: int
    device: str
    devices: int
    cores: int
    threads: int
    memory_host: int
    ptrace_scope: int
    shm_bytes: int
    open_files: int
    reached: Sequence[int] = ()
    gb_per_s: dict[str, float] = field(default_factory=dict)
    equal_bits: dict[str, bool] = field(default_factory=dict)
    failure: str = ""


class Finding(NamedTuple):
    level: str  # error, warning or note
    ranks: list[int]
    text: str


class Meeting(NamedTuple):
    """The ranks, which exchange values in ``store``; without one this rank is alone."""

    timeout: timedelta
    store: dist.Store | None = None
    rank: int = 0
    world: int = 1

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value``, which JSON can hold, in rank order. Each ``what`` once.

        Raises:
            TimeoutError: names the ranks that have not come to ``what``.
        """
        if self.store is None:
            return [value]
        keys = [f"zero_ext.doctor/{what}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, self.timeout)
        except RuntimeError as error:
            late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise TimeoutError(
                f"zero_ext.doctor [rank {self.rank}]: {_named(late)} did not come to '{what}' in "
                f"{self.timeout.total_seconds():g} s. Look at the first error in their output."
            ) from error
        return [json.loads(self.store.get(key)) for key in keys]


def meet(timeout: timedelta) -> Meeting:
    """The ranks of torchrun, or this process alone."""
    if "RANK" not in os.environ:
        return Meeting(timeout)
    return Meeting(timeout, *next(dist.rendezvous("env://", timeout=timeout)))


# Facts


def gather(meeting: Meeting) -> Facts:
    """The facts of this rank. Collective; ends with the first measurement that fails on a rank."""
    facts = ask_system(meeting.rank)
    if len(set(meeting.exchange("the start", facts.device))) > 1:  # some have no GPU of their own
        facts = replace(facts, device="cpu", devices=0)
    device = torch.device(facts.device, facts.local_rank) if facts.devices else CPU
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "reading peers' memory": lambda: _measure_memory(meeting),
        "collectives": lambda: _measure_collectives(meeting, device),
        "a small model": lambda: {"equal_bits": _equal_bits(meeting, device)},
    }
    for what, measure in measurements.items():
        if any(meeting.exchange(what, facts.failure)):
            break
        try:
            found = measure()
        except Exception as error:  # whatever it is, the other facts are worth printing
            text = " ".join(str(error).split())[:400]
            found = {"failure": f"{what}: {type(error).__name__}: {text}"}
        rates = facts.gb_per_s | found.pop("gb_per_s", {})
        facts = replace(facts, gb_per_s=rates, **found)
    return facts


def ask_system(rank: int) -> Facts:
    """The facts that need no other rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    kind = torch.accelerator.current_accelerator(check_available=True)
    devices = torch.accelerator.device_count() if kind else 0
    if kind is None or local_rank >= devices:  # no two processes on one device
        kind, devices = CPU, 0
    shm = os.statvfs("/dev/shm") if os.path.ismount("/dev/shm") else None
    return Facts(
        rank=rank,
        local_rank=local_rank,
        info=info.collect(),
        host=socket.gethostname(),
        system=_text_of("/proc/sys/kernel/random/boot_id") or socket.gethostname(),
        process_space=os.readlink("/proc/self/ns/pid"),
        user=os.getuid(),
        device=kind.type,
        devices=devices,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_host=environment.host_of_this_rank(),
        ptrace_scope=int(_text_of("/proc/sys/kernel/yama/ptrace_scope") or 0),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else -1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _text_of(path: str) -> str:
    return Path(path).read_text().strip() if Path(path).exists() else ""


def _measure_memory(meeting: Meeting) -> dict[str, Any]:
    numbers = itertools.count(1)

    def all_gather(values: Tensor) -> Tensor:
        what = f"introduction {next(numbers)} of local peers"
        return torch.tensor(meeting.exchange(what, values.tolist()), device=CPU)

    source = torch.ones(_MEASURED_BYTES, dtype=torch.uint8, device=CPU)
    into = torch.zeros_like(source)
    rates = {"copy": _gb_per_s(source.nbytes, lambda: into.copy_(source))}
    memory = _C.SharedHostTransport.connect(
        meeting.rank,
        meeting.world,
        timeout_ms=round(1000 * meeting.timeout.total_seconds()),
        host=environment.host_of_this_rank(),
        all_gather=all_gather,
    )
    others = [r for r in range(meeting.world) if r != meeting.rank and memory and memory.reaches(r)]
    posted = [memory.post(source, to=peer, tag=0) for peer in others]
    meeting.exchange("messages in memory", len(posted))
    if others:
        peer = next((r for r in others if r > meeting.rank), others[0])
        receive = lambda: memory.receive(into, from_rank=peer, tag=0).wait()  # noqa: E731
        rates["peers' memory"] = _gb_per_s(into.nbytes, receive)
    meeting.exchange("the end of messages in memory", None)
    return {"reached": others, "gb_per_s": rates}


def _measure_collectives(meeting: Meeting, device: torch.device) -> dict[str, Any]:
    if meeting.world == 1:
        return {}
    backend, rates = "gloo", {}
    if device != CPU:
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    if not dist.is_initialized():
        timeout, store, rank, world = meeting
        dist.init_process_group(backend, None, timeout, world, rank, store)
    shape = (meeting.world, _MEASURED_BYTES // meeting.world)
    sent, into = torch.ones(2, *shape, dtype=torch.uint8, device=device)
    if device != CPU:
        rates["device copy"] = _gb_per_s(sent.nbytes, lambda: into.copy_(sent), device)
    exchange = lambda: dist.all_to_all_single(into, sent)  # noqa: E731
    rates["collectives"] = _gb_per_s(sent.nbytes - sent[0].nbytes, exchange, device)
    return {"gb_per_s": rates}


def _gb_per_s(nbytes: int, action: Callable[[], object], device: torch.device = CPU) -> float:
    """The best of eight calls."""
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        action()
        if device != CPU:
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


def _equal_bits(meeting: Meeting, device: torch.device) -> dict[str, bool]:
    """Whether a model on all ranks has the bits of one that this rank trains with their data."""

    def trained(stage: int, mesh: Any, ranks: Sequence[int]) -> str:
        data = torch.Generator().manual_seed(0)
        with CPU, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 5))
        shard(model.to(device), stage, mesh=mesh, reduction="exchange", bucket_mb=1e-4)
        model.set_gradient_divide_factor(1.0)  # sums, which the step divides once
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            batches = torch.randn(meeting.world, 3, 13, generator=data, device=CPU).to(device)
            for rank in ranks:
                model(batches[rank]).square().mean().backward()
            optimizer.step(divide_by=len(ranks))
            optimizer.zero_grad()
        return fingerprint(model, optimizer)

    expected = trained(1, "alone", range(meeting.world))
    return {str(stage): trained(stage, None, [meeting.rank]) == expected for stage in (1, 2, 3)}


# Judgement


def judge(everyone: Sequence[Facts]) -> list[Finding]:
    """Errors, then warnings. ``everyone``: the facts of all ranks, in rank order."""
    found: dict[tuple[str, str], set[int]] = {}
    for facts in everyone:
        for check in (_results, _versions, _limits, _speed):
            for level, text in check(facts, everyone):
                found.setdefault((level, text), set()).add(facts.rank)
    for one, other in itertools.combinations(everyone, 2):
        measured = one.system == other.system and "copy" in one.gb_per_s.keys() & other.gb_per_s
        if measured and other.rank not in one.reached:
            text = f"Messages of one host go through the process group: {_why_not(one, other)}"
            found.setdefault(("warning", text), set()).update((one.rank, other.rank))
    findings = [Finding(level, sorted(ranks), text) for (level, text), ranks in found.items()]
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))


Checked = Iterator[tuple[str, str]]  # levels and texts


def _results(facts: Facts, everyone: Sequence[Facts]) -> Checked:
    if facts.failure:
        yield "error", facts.failure
    for stage, equal in facts.equal_bits.items():
        if not equal:
            yield "error", f"Stage {stage} has other bits than one process. Compare the processors."


def _versions(facts: Facts, everyone: Sequence[Facts]) -> Checked:
    own, first = facts.info, everyone[0].info
    for name in ("zero_ext", "torch", "NCCL", "python", "NVIDIA driver", "instruction set"):
        if own[name] != first[name]:
            level = "error" if name in ("zero_ext", "torch", "NCCL") else "warning"
            yield level, f"{name}: {own[name]}, and {first[name]} on rank 0. Install the same."
    minor = ".".join(own["torch"].split(".")[:2])
    if known := _TORCH.get(minor, "zero_ext is tested with 2.13."):
        yield "note", f"torch {minor}: {known}"
    nccl, built, driver = own["NCCL"], own["torch's NCCL"], own["NVIDIA driver"]
    if _older(nccl, built):
        yield "warning", f"NCCL {nccl}: torch was built with {built}. Look at LD_LIBRARY_PATH."
    cuda = own["torch's CUDA"].split(".")[0]
    if _older(driver, _DRIVERS.get(cuda, "")):
        yield "warning", f"NVIDIA driver {driver}: CUDA {cuda} needs {_DRIVERS[cuda]}. Upgrade it."
    elif facts.device == "cpu" and driver[0].isdigit():
        yield "warning", "No GPU for this rank. Start one for each GPU, with torch for CUDA."


def _older(version: str, than: str) -> bool:
    own, other = (list(map(int, re.findall(r"\d+", text))) for text in (version, than))
    return bool(own) and own < other


def _limits(facts: Facts, everyone: Sequence[Facts]) -> Checked:
    mates = [other for other in everyone if other.system == facts.system]
    if 0 <= facts.shm_bytes < 1024 * _MIB:
        mib = facts.shm_bytes // _MIB
        yield "warning", f"/dev/shm has {mib} MiB. Start the container with --shm-size=16g."
    files = 256 + 16 * len(everyone)  # of the two groups of each model, with a socket per rank
    if 0 <= facts.open_files < files:
        yield "warning", f"{facts.open_files} files may be open. Call ulimit -n {files}."
    threads = max(1, facts.cores // len(mates))
    if len(mates) > 1 and facts.threads > threads:
        yield "warning", f"Threads share cores. Call export OMP_NUM_THREADS={threads}."


def _speed(facts: Facts, everyone: Sequence[Facts]) -> Checked:
    for way, rate in facts.gb_per_s.items():
        rates = [other.gb_per_s[way] for other in everyone if way in other.gb_per_s]
        if rate < statistics.median(rates) / 2:
            yield "warning", f"{way}: less than half of the median of the ranks' speeds."
        if way == "peers' memory" and rate < _SLOW * facts.gb_per_s["copy"]:
            yield "warning", f"{way}: less than {_SLOW:.0%} of the speed of a copy."


def _why_not(one: Facts, other: Facts) -> str:
    scope = max(one.ptrace_scope, other.ptrace_scope)
    reasons = {
        "ZERO_EXT_CROSS_MEMORY=0. Unset it.": 0 in (one.memory_host, other.memory_host),
        "other ZERO_EXT_CROSS_MEMORY. Unset it.": one.memory_host != other.memory_host,
        "other users. Start all ranks as one.": one.user != other.user,
        "other containers. Start one on each host.": one.process_space != other.process_space,
        f"ptrace_scope {scope}. Call sysctl kernel.yama.ptrace_scope=1.": scope > 1,
        "ptrace_scope 1. Start the ranks with one torchrun.": scope == 1,
        "no process_vm_readv. Start the container with --cap-add=SYS_PTRACE.": True,
    }
    return next(reason for reason, holds in reasons.items() if holds)


# Text


def page(everyone: Sequence[Facts], findings: Sequence[Finding]) -> str:
    names = ("zero_ext", "torch", "torch's CUDA", "GPU", "NCCL", "NVIDIA driver", "platform")
    rows = [("versions", ", ".join(f"{name} {everyone[0].info[name]}" for name in names))]
    for system in dict.fromkeys(facts.system for facts in everyone):
        mates = [facts for facts in everyone if facts.system == system]
        of = mates[0]
        shm = f"{max(0, of.shm_bytes) // _MIB} MiB in /dev/shm"
        about = f"{_named([facts.rank for facts in mates])} on {of.device}, {of.cores} cores, "
        about += f"{of.threads} threads each, {shm}, {of.open_files} open files, "
        about += f"ptrace_scope {of.ptrace_scope}"
        rows.append((of.host, about))
    ranks = range(len(everyone)) if 1 < len(everyone) <= 32 else ()
    if ranks:
        rows.append(("between", "m: messages through peers' memory, g: through the process group"))
    for facts in everyone if ranks else ():
        reached = {facts.rank: ".", **dict.fromkeys(facts.reached, "m")}
        rows.append((f"rank {facts.rank}", " ".join(reached.get(r, "g") for r in ranks)))
    for way in dict.fromkeys(way for facts in everyone for way in facts.gb_per_s):
        rates = [facts.gb_per_s for facts in everyone if way in facts.gb_per_s]
        slow = min(rates, key=lambda of_rank: of_rank[way])
        limit = slow["copy"] if way == "peers' memory" else slow.get("device copy", slow["copy"])
        share = "" if "copy" in way else f", {slow[way] / limit:.0%} of a copy's speed"
        rows.append((way, f"{slow[way]:,.1f} GB/s on the slowest rank{share}"))
    for stage in everyone[0].equal_bits:
        same = all(facts.equal_bits.get(stage, False) for facts in everyone)
        rows.append((f"stage {stage}", f"{'the' if same else 'NOT the'} bits of one process"))
    rows += [(level, f"{_named(ranks)}: {text}") for level, ranks, text in findings]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _named(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 5``."""
    runs = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    parts = [[rank for _, rank in run] for _, run in runs]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    does = "What the machines let zero_ext do. Exit code 1: an error; 2: ranks have not met."
    parser = argparse.ArgumentParser(prog="python -m zero_ext.doctor", description=does)
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of waits for other ranks")
    given = parser.parse_args(arguments)
    try:
        meeting = meet(timedelta(seconds=given.timeout_s))
        facts = gather(meeting)
        everyone = [Facts(**each) for each in meeting.exchange("the end", asdict(facts))]
    except (TimeoutError, ValueError, dist.DistError) as error:
        print(error, file=sys.stderr)
        return 2
    findings = judge(everyone)
    if meeting.rank == 0:
        about = {"ranks": [asdict(facts) for facts in everyone], "findings": findings}
        print(json.dumps(about, indent=1) if given.json else page(everyone, findings))
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
