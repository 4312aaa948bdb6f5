"""Which tests run together, on how many ranks, and where: what ``make test`` and ``make test-all``
consist of.

    python tests/support/segments.py test-2-ranks
    python tests/support/segments.py test-changed tests/optim tests/step
    python tests/support/segments.py --tests test-3-ranks     # prints them

Each segment is a target of the Makefile, with this name. The quick ones leave out slow tests, and
combinations of a test's values (quick_choice.py). It needs no package: make runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = ("tests",)


def files(*names: str) -> tuple[str, ...]:
    """Test files, whichever room they are in."""
    return tuple(_file(name) for name in names)


def some_of(name: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"{_file(name)}::test_{test}" for test in tests)


def _file(name: str) -> str:
    (path,) = ROOT.glob(f"tests/*/test_{name}.py")
    return path.relative_to(ROOT).as_posix()


def all_but(rooms: Sequence[str], *names: str) -> tuple[str, ...]:
    left_out = {_file(name) for name in names}
    found = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/*/test_*.py")))
    return tuple(f for f in found if f not in left_out and f.split("/")[1] not in rooms)


@dataclass(frozen=True)
class Segment:
    """``ranks`` 0: the tests of one process, two at a time. ``slow``: slow ones as well."""

    ranks: int
    tests: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False


# The device that tests/support/lagged_device makes: its work is late, and it rejects what CUDA
# rejects. Messages go through host memory.
LAGGED = {"ZERO_EXT_TEST_DEVICE": "lagged"}
# The same with messages of its own backend.
LCCL = {**LAGGED, "ZERO_EXT_TEST_BACKENDS": "cpu:gloo,lagged:lccl"}
# The same where the ranks' devices read each other's memory.
DIRECT = {**LCCL, "ZERO_EXT_TEST_DIRECT": "1"}
# As ranks on different hosts: messages go through the process group.
ONLY_GROUP = {"ZERO_EXT_CROSS_MEMORY": "0"}
# As two hosts with several ranks each.
TWO_HOSTS = {"ZERO_EXT_TEST_HOSTS": "2"}
# Hybrid sharding, wherever tests shard over a mesh.
REPLICAS = {"ZERO_EXT_TEST_SHARDS": "2"}

STAGE3 = some_of(
    "stage3",
    "gradients_are_one_process_s_bits",
    "ranks_take_different_branches",
    "ranks_may_enter_a_unit_more_or_less_often",
    "the_order_may_change_from_step_to_step",
    "generation_holds_nothing_afterwards",
    "at_most_two_gathers_per_unit_and_micro_batch",
    "one_rank_of_a_host_evaluates_and_saves_alone",
)
# What depends on the number of ranks: sums in rank order, padding, straddling, passes.
ON_THREE = (
    *files(
        "shared_host_transport",
        "host_routes",
        "host_copies",
        "equivalence",
        "order",
        "comm_ops",
        "memory_stage3",
        "norm",
    ),
    *STAGE3,
    *some_of(
        "checkpoint",
        "training_goes_on_with_the_same_bits",
        "one_rank_goes_on_from_several_and_several_from_one",
        "plain_torch_reads_it_and_it_reads_plain_torchs",
        "an_export_is_the_plain_models_state",
        "some_ranks_save_meanwhile_whatever_groups_each_is_in",
    ),
    *some_of("doctor", "ranks_are_measured"),
    *some_of("fsdp", "gradients_are_one_process_s_bits", "a_unit_is_gathered_alone"),
    *some_of("low_precision", "gradients_are_one_process_s_bits", "training_is_fsdp2s"),
)
MESHES = some_of(
    "meshes",
    "training_has_the_bits_of_the_plan_alone",
    "owners_of_one_matrix_are_alike_over_the_plan",
    "a_step_is_skipped_on_all_ranks_or_on_none",
    "data_ranks_may_run_different_numbers_of_backwards",
    "what_no_dimension_reduces_is_named",
)
EXPERTS = some_of(
    "experts",
    "training_has_the_bits_of_experts_alone",
    "fully_shard_takes_experts_on_their_own_mesh",
    "training_goes_on_from_a_checkpoint_with_the_same_bits",
    "ranks_may_run_different_numbers_of_backwards",
    "what_users_write_is_compared_between_ranks_with_the_same_experts",
    "other_meshes_and_placements_are_rejected",
)
ON_FOUR = (
    *files("equivalence", "comm_ops", "host_copies", "host_routes", "hybrid", "norm", "parallel"),
    *STAGE3,
    *some_of("stage3", "ranks_of_a_host_may_differ_more_than_those_of_two"),
    *MESHES,
    *EXPERTS,
    *some_of("state_dict_options", "checkpoints_go_both_ways_with_fsdp2_and_tensor_parallelism"),
)
# Whatever runs on a device at all.
ON_A_DEVICE = all_but(
    ("project", "kernels", "ops", "integrations", "testing", "fsdp"),
    *("comm_ops", "config", "construction", "damage", "dead_hosts", "deepspeed_checkpoints"),
    *("failures", "folders", "found_configurations", "lagged_device", "layout", "low_precision"),
    *("pass_order", "pipeline"),
    *("plan", "residency", "schedules", "scripts", "torch_modules"),
)
RANKS_ON_A_DEVICE = files("devices", "out_of_memory", "recovery", "scenarios_c")
OVER_ITS_BACKEND = tuple(
    sorted(
        {
            *RANKS_ON_A_DEVICE,
            *files("backends", "devices", "inner_backwards", "low_precision", "peer_memory"),
            *files("uneven_on_a_backend", "zeroed_on_a_backend"),
        }
    )
)
# Where devices read each other's memory, ranks may also take different branches. Of three ranks:
# two run whatever runs on a device.
IN_PLACE = (
    *OVER_ITS_BACKEND,
    *files("stage3", "unfreezing", "fingerprint", "global_batches", "clipping_uneven"),
)
# Without those whose formulas have one dimension.
WITH_REPLICAS = all_but((), "experts", "memory", "memory_stage3", "meta", "shard_tensor")

QUICK = {
    "test-2-ranks": Segment(2, EVERYTHING),
    "test-one-rank": Segment(0, EVERYTHING),
    "test-lagged-one-rank": Segment(0, ON_A_DEVICE, LAGGED),
    "test-3-ranks": Segment(3, ON_THREE),
    "test-hosts-4-ranks": Segment(4, ON_FOUR, TWO_HOSTS),
    "test-lagged-2-ranks": Segment(2, RANKS_ON_A_DEVICE, LAGGED),
    "test-lccl-2-ranks": Segment(
        2,
        files("backends", "devices", "uneven_on_a_backend", "zeroed_on_a_backend")
        + MESHES
        + some_of("inner_backwards", "a_rank_throws_while_another_has_late_gradients")
        + some_of("doctor", "ranks_are_measured"),
        LCCL,
    ),
    "test-direct-3-ranks": Segment(3, files("peer_memory") + STAGE3, DIRECT),
    "test-lccl-4-ranks": Segment(
        4,
        files("hybrid")
        + some_of(
            "experts",
            "training_has_the_bits_of_experts_alone[1]",
            "training_has_the_bits_of_experts_alone[3]",
            "collectives_sum_over_the_ranks_with_the_same_experts",
            "what_users_write_is_compared_between_ranks_with_the_same_experts",
        ),
        LCCL,
    ),
}
ALL = {
    "all-direct-2-ranks": Segment(2, (*ON_A_DEVICE, *files("low_precision")), DIRECT, slow=True),
    "all-direct-3-ranks": Segment(3, IN_PLACE, DIRECT, slow=True),
    "all-one-rank": Segment(0, EVERYTHING, slow=True),
    "all-lagged-one-rank": Segment(0, ON_A_DEVICE, LAGGED, slow=True),
    **{f"all-{n}-ranks": Segment(n, EVERYTHING, slow=True) for n in (2, 3, 4)},
    **{f"all-group-{n}-ranks": Segment(n, EVERYTHING, ONLY_GROUP, slow=True) for n in (2, 3)},
    **{f"all-lagged-{n}-ranks": Segment(n, ON_A_DEVICE, LAGGED, slow=True) for n in (2, 3)},
    **{f"all-lccl-{n}-ranks": Segment(n, OVER_ITS_BACKEND, LCCL, slow=True) for n in (2, 3)},
    "all-hosts-4-ranks": Segment(4, EVERYTHING, TWO_HOSTS, slow=True),
    "all-replicas-4-ranks": Segment(4, WITH_REPLICAS, REPLICAS),
    "all-lagged-4-ranks": Segment(4, files("hybrid"), LAGGED, slow=True),
}
# Neither quick nor complete: what has a target of its own.
ALONE = {"mutations": Segment(2, files("mutations"), slow=True)}
# Slices that the Makefile's other builds run.
SLICES = {
    "sanitize-one-rank": Segment(
        0,
        (
            *("tests/autograd", "tests/comm", "tests/engine", "tests/gather", "tests/memory"),
            *("tests/ops", "tests/reduce", "tests/step", "tests/tensor", "tests/units"),
            *files("kernels"),
        ),
    ),
    "sanitize-2-ranks": Segment(
        2,
        files(
            *("comm_ops", "shared_host_transport", "hooks", "inner_backwards", "lifetime"),
            *("stage3", "memory_stage3", "kept_gradients", "norm", "equivalence", "order"),
            "scenarios_c",
        ),
    ),
    "tsan-one-rank": Segment(0, ("tests/autograd", "tests/comm", "tests/engine")),
    "tsan-2-ranks": Segment(
        2,
        files(
            *("comm_ops", "inner_backwards", "interrupts", "lifetime", "shared_host_transport"),
            *("threads", "uneven"),
        ),
    ),
}


def command(name: str, segment: Segment) -> list[str]:
    """What pytest is started with; each rank the same."""
    tests = [
        *segment.tests,
        *("-m", ("dist" if segment.ranks else "not dist") + " and not slow" * (not segment.slow)),
        *("--durations", "25", "--junitxml", f"build/junit/{name}.xml"),  # rank 0 writes it
    ]
    if segment.ranks == 0:
        return [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *tests]
    # Rank 0 writes to the terminal, the others to files, which are shown when something failed.
    redirects = ",".join(f"{rank}:3" for rank in range(1, segment.ranks))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    logs = ["--log-dir", str(logs_of(name)), "--redirects", redirects]
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", *tests]
    return [sys.executable, *torchrun, str(segment.ranks), *logs, *pytest]


def logs_of(name: str) -> Path:
    return Path("build/test-logs", name)


def run(name: str, segment: Segment) -> int:
    print(f"== {name}", flush=True)
    logs = ROOT / logs_of(name)
    for old in logs.rglob("*.log"):
        old.unlink()
    logs.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command(name, segment), cwd=ROOT, env={**os.environ, **segment.environment}, check=False
    )
    for log in sorted(logs.rglob("*.log")) if done.returncode else ():
        text = log.read_text(errors="replace")
        print(f"== {log}", *text.splitlines()[-80:], sep="\n")
    return done.returncode


def main(name: str, *tests: str) -> int:
    if name == "--tests":
        print(*(SLICES | QUICK | ALL)[tests[0]].tests)
        return 0
    if name == "test-changed":
        segments = {f"changed-{ranks}": Segment(ranks, tests) for ranks in (0, 2)}
        return max(run(each, segment) for each, segment in segments.items())
    return run(name, {**QUICK, **ALL, **ALONE}[name])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
