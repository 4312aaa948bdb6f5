"""checkpoint.latest: the newest whole checkpoint in a folder."""

import pytest
from torch import nn

from zero_ext import checkpoint


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["step9", "step10", "step2"], "step10"),
        (["run-1", "run-007", "epoch5"], "run-007"),
        (["last", "9 of 10, best"], None),
        ([], None),
    ],
)
def test_the_largest_number_at_the_end(tmp_path, names, newest):
    for name in names:
        checkpoint.save(tmp_path / name, nn.Linear(2, 1))
    assert checkpoint.latest(tmp_path) == (newest and tmp_path / newest)
    assert checkpoint.latest(str(tmp_path / "nothing")) is None


def test_what_is_not_whole(tmp_path):
    checkpoint.save(tmp_path / "step3", nn.Linear(2, 1))
    for name in ("step4", ".step3.zero_ext-incomplete-5", "6"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step3.zero_ext-incomplete-5" / ".metadata").touch()
    (tmp_path / "7").touch()
    assert checkpoint.latest(tmp_path) == tmp_path / "step3"
