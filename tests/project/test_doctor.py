"""``python -m zero_ext.doctor``: what it makes of facts, and two runs of it."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from launching import run_on_ranks

from zero_ext import doctor, info
from zero_ext.doctor import Facts, Meeting, judge, page

INFO = {
    **{"zero_ext": "0.1.0", "torch": "2.13.0", "torch's CUDA": "13.0, 2 devices", "GPU": "H200"},
    **{"NCCL": "2.28.9", "torch's NCCL": "2.28.9", "NVIDIA driver": "580.82.07"},
    **{"python": "3.11.7", "instruction set": "AVX512", "platform": "Linux"},
}
FIRST = Facts(
    rank=0,
    local_rank=0,
    info=INFO,
    host="a",
    system="one",
    process_space="pid:[1]",
    user=1000,
    device="cuda",
    devices=2,
    cores=16,
    threads=8,
    memory_host=1,
    ptrace_scope=1,
    shm_bytes=2**34,
    open_files=1024,
    reached=[1],
    gb_per_s={"copy": 10.0, "peers' memory": 8.0, "device copy": 1000.0, "collectives": 100.0},
    equal_bits={"1": True, "2": True, "3": True},
)
SECOND = replace(FIRST, rank=1, local_rank=1, reached=[0])
APART = {"reached": []}


def test_healthy_ranks_have_no_findings():
    assert judge([FIRST, SECOND]) == []
    assert judge([FIRST, replace(SECOND, system="another", reached=[])]) == []  # two hosts
    assert judge([replace(FIRST, reached=[], ptrace_scope=3)]) == []  # nobody to read


@pytest.mark.parametrize(
    ("first", "second", "level", "ranks", "text"),
    [
        (APART, {**APART, "ptrace_scope": 3}, "warning", [0, 1], "ptrace_scope 3.*sysctl"),
        (APART, APART, "warning", [0, 1], "ptrace_scope 1.*one torchrun"),
        ({**APART, "ptrace_scope": 0}, {**APART, "ptrace_scope": 0}, "warning", [0, 1], "SYS_PTR"),
        (APART, {**APART, "memory_host": 0}, "warning", [0, 1], "CROSS_MEMORY=0. Unset"),
        (APART, {**APART, "memory_host": 2}, "warning", [0, 1], "other ZERO_EXT_CROSS_MEMORY"),
        (APART, {**APART, "user": 0}, "warning", [0, 1], "other users"),
        (APART, {**APART, "process_space": "pid:[2]"}, "warning", [0, 1], "other containers"),
        ({}, {"shm_bytes": 2**26}, "warning", [1], "/dev/shm has 64 MiB.*--shm-size"),
        ({"open_files": 256}, {}, "warning", [0], "256 files may be open. Call ulimit -n 288"),
        ({"threads": 9}, {}, "warning", [0], "OMP_NUM_THREADS=8"),
        ({"equal_bits": {"3": False}}, {}, "error", [0], "Stage 3 has other bits"),
        ({}, {"failure": "collectives: no route"}, "error", [1], "collectives: no route"),
    ],
)
def test_a_finding(first, second, level, ranks, text):
    (finding,) = judge([replace(FIRST, **first), replace(SECOND, **second)])
    assert (finding.level, finding.ranks) == (level, ranks)
    assert re.search(text, finding.text), finding.text


@pytest.mark.parametrize(
    ("first", "second", "level", "ranks", "text"),
    [
        ({"NCCL": "2.27.7"}, {"NCCL": "2.27.7"}, "warning", [0, 1], "built with 2.28.9"),
        ({}, {"NCCL": "2.29.2"}, "error", [1], "NCCL: 2.29.2, and 2.28.9 on rank 0"),
        ({}, {"torch": "2.13.1"}, "error", [1], "torch: 2.13.1, and 2.13.0 on rank 0"),
        ({}, {"zero_ext": "0.2.0"}, "error", [1], "zero_ext: 0.2.0, and 0.1.0 on rank 0"),
        ({}, {"instruction set": "AVX2"}, "warning", [1], "AVX2, and AVX512 on rank 0"),
        ({}, {"NVIDIA driver": "590.1"}, "warning", [1], "driver: 590.1, and 580.82.07 on rank 0"),
        ({"torch": "2.11.0"}, {"torch": "2.11.0"}, "note", [0, 1], "2.11: zero_ext is compiled"),
        ({}, {"python": "3.12.1"}, "warning", [1], "python: 3.12.1, and 3.11.7 on rank 0"),
        ({"torch": "2.15.0"}, {"torch": "2.15.0"}, "note", [0, 1], "TORCH_DIST_USE_NCCL2=0"),
        ({"torch": "2.99.0"}, {"torch": "2.99.0"}, "note", [0, 1], "tested with 2.13"),
        (
            *2 * ({"NVIDIA driver": "570.86.15"},),
            *("warning", [0, 1], "570.86.15: CUDA 13 needs 580.65. Upgrade"),
        ),
    ],
)
def test_a_finding_about_versions(first, second, level, ranks, text):
    everyone = [
        replace(facts, info=INFO | own) for facts, own in ((FIRST, first), (SECOND, second))
    ]
    (finding,) = judge(everyone)
    assert (finding.level, finding.ranks) == (level, ranks)
    assert re.search(text, finding.text), finding.text


def test_slow_ranks_are_found():
    slow = replace(FIRST, gb_per_s={"copy": 10.0, "peers' memory": 2.4, "collectives": 49.0})
    third = replace(SECOND, rank=2, system="another", reached=[])
    texts = [finding.text for finding in judge([slow, SECOND, third]) if finding.ranks == [0]]
    assert len(texts) == 3
    assert "peers' memory: less than 25% of the speed of a copy." in texts
    assert sum("less than half of the median" in text for text in texts) == 2


def test_a_process_without_a_gpu_of_its_own():
    on_cpu = replace(FIRST, device="cpu", devices=0)
    assert [f.level for f in judge([on_cpu])] == ["warning"]
    assert judge([replace(on_cpu, info=INFO | {"NVIDIA driver": "no"})]) == []


def test_the_page_fits_and_names_ranks():
    everyone = [
        replace(FIRST, rank=r, reached=[p for p in range(8) if p not in (r, 3)], shm_bytes=2**26)
        for r in range(8)
    ]
    findings = judge([*everyone[:3], replace(everyone[3], reached=[]), *everyone[4:]])
    text = page(everyone, findings)
    assert len(text.splitlines()) < 30
    assert re.search(r"rank 0 +\. m m g m m m m\n", text)
    assert re.search(r"warning +ranks 0-7: /dev/shm has 64 MiB", text)
    assert re.search(r"peers' memory +8.0 GB/s on the slowest rank, 80% of a copy", text)
    assert re.search(r"collectives +100.0 GB/s on the slowest rank, 10% of a copy", text)
    assert re.search(r"stage 2 +the bits of one process", text)
    one = replace(everyone[5], equal_bits={"2": False})
    assert re.search(r"stage 2 +NOT the bits", page([*everyone[:5], one], []))


def test_the_driver_is_read_from_its_text():
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build"
    assert list(map(info.driver_in, (closed, opened, ""))) == ["550.54.15", "580.82.07", "no"]


def test_a_rank_that_does_not_come_is_named(monkeypatch, capsys):
    meeting = Meeting(timedelta(seconds=0.2), dist.HashStore(), 0, 4)
    meeting.store.set("zero_ext.doctor/the start/2", '"cpu"')
    monkeypatch.setattr(doctor, "meet", lambda timeout: meeting)
    assert doctor.main([]) == 2
    message = r"\[rank 0\]: ranks 1, 3 did not come to 'the start' in 0.2 s"
    assert re.search(message, capsys.readouterr().err)


def test_one_process_without_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    facts = doctor.gather(doctor.meet(timedelta(seconds=9)))
    assert (facts.failure, facts.reached, set(facts.gb_per_s)) == ("", [], {"copy"})
    assert facts.equal_bits == {"1": True, "2": True, "3": True}
    assert not {finding.level for finding in judge([facts])} & {"error"}
    assert "stage 3   the bits of one process" in page([facts], [])


def test_a_measurement_that_fails_ends_the_others(monkeypatch):
    def fail(*_):
        raise RuntimeError("no\nroute")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(doctor, "_measure_collectives", fail)
    facts = doctor.gather(doctor.meet(timedelta(seconds=9)))
    assert facts.failure == "collectives: RuntimeError: no route"
    assert set(facts.gb_per_s) == {"copy"} and not facts.equal_bits
    assert "\nerror " in page([facts], judge([facts]))


def test_ranks_of_a_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", "0")
    script = tmp_path / "small_messages.py"
    script.write_text(
        "from zero_ext import doctor\ndoctor._MEASURED_BYTES = 2**16\nexit(doctor.main([]))\n"
    )
    done = run_on_ranks(2, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rank 1 +g \.\n", done.stdout), done.stdout
    assert re.search(r"warning +ranks 0-1: .*ZERO_EXT_CROSS_MEMORY=0", done.stdout), done.stdout
    assert done.stdout.count("the bits of one process") == 3


@pytest.fixture
def met(rank, world, monkeypatch, request):
    """The ranks of the tests meet, and send small messages."""
    store = dist.PrefixStore(request.node.name, dist.distributed_c10d._get_default_store())
    meeting = Meeting(timedelta(seconds=20), store, rank, world)
    monkeypatch.setattr(doctor, "meet", lambda timeout: meeting)
    monkeypatch.setattr(doctor, "_MEASURED_BYTES", 2**16)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # it is the tests'


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_what_one_rank_lacks_is_on_the_page(met, rank, world, monkeypatch, capsys):
    """No ptrace, a small tmpfs and an old NCCL, as the system says it, and another torch."""
    nowhere = SimpleNamespace(connect=lambda *_, **__: None)
    monkeypatch.setattr(doctor, "_C", SimpleNamespace(SharedHostTransport=nowhere))
    monkeypatch.setattr(doctor, "_measure_collectives", lambda *_: {})
    monkeypatch.setattr(doctor, "_equal_bits", lambda *_: {})
    last = world - 1
    if rank == last:
        text_of, small = doctor._text_of, SimpleNamespace(f_blocks=2**14, f_frsize=2**12)
        others = {"torch": "2.12.0", "NCCL": "2.20.5", "torch's NCCL": "2.28.9"}
        about = info.collect() | others
        monkeypatch.setattr(info, "collect", lambda: about)
        monkeypatch.setattr(doctor.os.path, "ismount", lambda path: True)
        monkeypatch.setattr(doctor.os, "statvfs", lambda path: small)
        monkeypatch.setattr(
            doctor, "_text_of", lambda path: "3" if "ptrace" in path else text_of(path)
        )
    assert doctor.main([]) == 1  # on every rank: other versions are an error
    printed = capsys.readouterr().out
    assert (printed != "") == (rank == 0)
    for line in (
        rf"error +rank {last}: torch: 2\.12\.0, and .* on rank 0",
        rf"warning +ranks 0[-,].*{last}: Messages of one host .* ptrace_scope 3\. Call sysctl",
        rf"warning +rank {last}: /dev/shm has 64 MiB",
        rf"warning +rank {last}: NCCL 2\.20\.5: torch was built with 2\.28\.9",
    ):
        assert rank > 0 or re.search(line, printed), printed


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_ranks_are_measured(met, rank, capsys):
    code = doctor.main(["--json"])
    assert code == 0
    if rank > 0:
        assert capsys.readouterr().out == ""
        return
    about = json.loads(capsys.readouterr().out)
    everyone = [Facts(**each) for each in about["ranks"]]
    assert about["findings"] == [list(finding) for finding in judge(everyone)]
    for facts in everyone:
        assert (facts.failure, facts.equal_bits) == ("", dict.fromkeys("123", True))
        measured = {"copy", "collectives", *(["peers' memory"] if facts.reached else [])}
        measured |= {"device copy"} if facts.devices else set()
        assert set(facts.gb_per_s) == measured and min(facts.gb_per_s.values()) > 0
        assert all(facts.rank in everyone[peer].reached for peer in facts.reached)
