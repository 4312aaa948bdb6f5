"""conftest.py's rules for multi-rank tests, each shown under a torchrun of its own."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    MLP,
    ManyLayers,
    Odd,
    Tied,
    assert_bits,
    gather_objects,
    mean_square,
    rank_batches,
    rank_data,
    reference_gradients,
)
from hypothesis import given
from hypothesis import strategies as st
from launching import run_on_ranks

HEAD = """
import os, signal, sys, time
import pytest, torch
import torch.distributed as dist
pytestmark = pytest.mark.dist
"""


PYTEST = ("-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-q", "-rs", "test_inner.py")


def module_path() -> str:
    tests = Path(__file__).parents[1]
    return os.pathsep.join([str(tests), str(tests / "support"), os.environ.get("PYTHONPATH", "")])


def under_torchrun(tmp_path: Path, body: str) -> subprocess.CompletedProcess:
    """Run ``body`` as a test file on two ranks, with both output streams in one."""
    (tmp_path / "test_inner.py").write_text(HEAD + textwrap.dedent(body))
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))
    }
    environment |= {"PYTHONPATH": module_path(), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*torchrun, "--nproc-per-node=2", *PYTEST],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )


def test_failures_of_one_rank_fail_their_tests_everywhere_and_spare_the_next(tmp_path):
    """Rank 0 prints rank 1's traceback and output once; its own collective is woken."""
    result = under_torchrun(
        tmp_path,
        """
        def test_broken(group, rank):
            if rank == 1:
                print("printed by rank 1")
                raise ValueError("rank 1 has had enough")
            dist.all_reduce(torch.ones(1), group=group)

        def test_after_it(group, world, rank):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            dist.all_reduce(total)
            assert total.item() == world * world

        @pytest.mark.timeout(2, method="signal")
        def test_slow(rank):
            if rank == 1:
                time.sleep(40)

        def test_after_slow(group):
            pass

        @pytest.fixture
        def fragile(rank):
            assert rank == 0, "setup of rank 1"

        def test_setup(fragile):
            pass

        def test_skip(rank):
            if rank == 0:
                pytest.skip("only here")

        @pytest.mark.world(3)
        def test_for_three(world):
            assert False

        @pytest.mark.world(min=2, max=3)
        def test_for_two_or_three(world):
            assert world == 2

        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        def test_expected():
            1 / 0
        """,
    )
    out = result.stdout
    assert result.returncode == 1, out
    assert 'raise ValueError("rank 1 has had enough")' in out
    assert "rank 1 of 2" in out and "printed by rank 1" in out and "pytest --seed" in out
    assert "Timeout" in out and "time.sleep(40)" in out, "stack of the slow rank"
    assert "setup of rank 1" in out
    assert "rank 0 skipped the test, the others ran it" in out
    assert "for 3 to 3 ranks, here are 2" in out
    assert "4 failed, 3 passed, 1 skipped, 1 xfailed" in out
    assert out.count(" passed, ") == 1, "only rank 0 may print a summary"
    assert set(re.findall(r"exitcode *: *(-?\d+)", out)) == {"1"}, "all ranks end alike"


def test_hanging_rank_is_named(tmp_path, monkeypatch):
    body = """
        def test_hangs(rank):
            if rank == 1:
                time.sleep(40)

        def test_never_reached(rank):
            pass
        """
    (tmp_path / "test_inner.py").write_text(HEAD + textwrap.dedent(body))
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", module_path())
    result = run_on_ranks(2, *PYTEST, "--answer-timeout=2", cwd=tmp_path, timeout_s=50)
    said = result.stdout + result.stderr
    assert result.returncode == 1, said
    assert "rank 1 did not answer within 2 s" in said
    assert "time.sleep" in said or "in test_hangs" in said, "stack of the hanging rank"
    assert "1 failed" in result.stdout and "passed" not in result.stdout


def test_dead_rank_ends_the_session(tmp_path):
    result = under_torchrun(
        tmp_path,
        """
        def test_dies(rank):
            if rank == 1:
                os._exit(7)
            time.sleep(40)
        """,
    )
    assert result.returncode == 1, result.stdout
    assert "[rank 0] stopped by torchrun, because another rank died" in result.stdout
    assert re.search(r"rank *: 1 .*\n *exitcode *: 7", result.stdout), result.stdout


@pytest.mark.dist
@given(st.lists(st.integers(), max_size=5))
def test_all_ranks_draw_the_same_examples(group, example):
    assert all(each == example for each in gather_objects(example, group))


@pytest.mark.dist
def test_all_ranks_have_the_same_seed(group, seed):
    assert len(set(gather_objects((seed, torch.rand(1).item()), group))) == 1


@pytest.mark.dist
def test_all_ranks_share_a_path(group, rank, world, shared_path):
    (shared_path / str(rank)).write_text("here")
    dist.barrier(group)
    assert len(list(shared_path.iterdir())) == world


@pytest.mark.dist
def test_gather_objects_is_in_rank_order(group, rank, world):
    assert gather_objects(rank * 10, group) == [r * 10 for r in range(world)]


def test_rank_data_differs_by_every_coordinate():
    keys = [(rank, step, micro) for rank in range(3) for step in range(3) for micro in range(3)]
    values = {tuple(rank_data((4,), *key).tolist()) for key in keys}
    assert len(values) == len(keys)
    assert_bits(rank_data((4,), 1, 2, 0), rank_data((4,), 1, 2, 0))


def test_reference_adds_micro_batches_in_order():
    batches = rank_batches((4, 5), world=2, micros=3, dtype=torch.bfloat16)
    sums = reference_gradients(lambda: MLP(dtype=torch.bfloat16), batches, world=2, scale=0.5)

    total = torch.zeros(5)
    for batch in [batch for micro in batches for batch in micro]:
        model = MLP(dtype=torch.bfloat16)
        mean_square(model, batch).backward()
        total += 0.5 * model.layers[2].bias.grad.float()
    assert_bits(sums["layers.2.bias"], total, "layers.2.bias")


def test_models_reach_the_parameters_that_they_say():
    model = ManyLayers()
    assert sum(1 for _ in model.parameters()) == 1083
    mean_square(model, (rank_data((2, 64), 0), range(5, 26))).backward()
    assert sum(p.grad is not None for p in model.parameters()) == 63

    tied = Tied()
    mean_square(tied, torch.tensor([[1, 2, 3]])).backward()
    assert all(p.grad is not None for p in tied.parameters())

    odd = Odd()
    mean_square(odd, rank_data((2, 3, 4, 4), 0)).backward()
    assert [n for n, p in odd.named_parameters() if p.grad is None] == ["frozen", "unused"]


def test_assert_bits_says_what_differs():
    expected = torch.arange(6.0).view(2, 3)
    actual = expected.clone()
    actual[1, 1] = 7
    with pytest.raises(
        AssertionError, match=r"w: 1 of 6 elements differ, first at \[1, 1\]: 7.0, expected 4.0"
    ):
        assert_bits(actual, expected, "w")
    nan = torch.tensor([torch.nan])
    assert_bits(nan, nan.clone())
