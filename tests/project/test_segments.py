"""The table of tests/support/segments.py names what there is."""

import re
from collections import Counter

import pytest
import segments
from segments import ALL, ALONE, QUICK, ROOT, SLICES

SEGMENTS = QUICK | ALL | ALONE | SLICES


def targets(variable: str) -> list[str]:
    """What a variable of the Makefile lists after a prefix."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    prefix, names = re.search(rf"^{variable} := \$\(addprefix (\S+),([^)]*)\)", text, re.M).groups()
    return [prefix + name for name in names.split()]


def test_the_makefile_has_a_target_for_each_segment():
    assert targets("SEGMENTS") == list(QUICK)
    assert sorted(targets("ALL_SEGMENTS")) == sorted(ALL)


def test_every_test_file_is_in_a_quick_and_in_a_complete_segment():
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py")}
    for table in (QUICK, ALL):
        run = {path for segment in table.values() for path in segment.tests}
        left = there - run
        assert not left or "tests" in run, left


def test_each_test_file_has_a_name_of_its_own():
    """pytest imports it under this name: of two in one run it would collect none."""
    names = Counter(path.name for path in ROOT.glob("tests/*/test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("name", SEGMENTS)
def test_every_test_that_a_segment_names_is_there(name):
    for named in SEGMENTS[name].tests:
        path, _, test = named.partition("::")
        test, _, _ = test.partition("[")
        assert (ROOT / path).exists(), named
        assert not test or f"def {test}(" in (ROOT / path).read_text(), named


def test_a_segment_runs_its_tests_on_its_ranks():
    command = segments.command("test-3-ranks", QUICK["test-3-ranks"])
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert "tests/step/test_norm.py" in command and "dist and not slow" in command
    command = segments.command("all-one-rank", ALL["all-one-rank"])
    assert "not dist" in command and "torch.distributed.run" not in command
