"""scripts/changed_tests.py: from the files that have changed to the folders of their tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from changed_tests import FOLDERS, affected_folders


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("README.md", {"project"}),
        ("scripts/gpu_suite.sh", {"project"}),
        ("tests/norm/test_norm.py", FOLDERS),  # of no room
        ("tests/step/test_norm.py", {"step"}),
        ("tests/conftest.py", FOLDERS),
        ("tests/support/harness.py", FOLDERS),
        ("setup.py", FOLDERS),
        ("zero_ext/info.py", {"data", "device", "integrations", "properties"}),
        (
            "zero_ext/deepspeed/config.py",
            {"data", "deepspeed", "device", "integrations", "properties"},
        ),
    ],
)
def test_what_one_file_affects(file, folders):
    assert affected_folders([file]) == folders


def test_rooms_above_a_changed_room_are_affected_and_rooms_below_are_not():
    of_gather = affected_folders(["csrc/gather/residency.h"])
    assert {"gather", "engine", "optim", "module", "checkpoint"} <= of_gather
    assert not {"units", "reduce", "comm", "ops", "tensor", "kernels"} & of_gather
    of_tensor = affected_folders(["zero_ext/tensor/boxes.py"])
    assert {"tensor", "engine", "state", "deepspeed"} <= of_tensor
    assert not {"ops", "gather", "kernels"} & of_tensor


def test_the_bindings_affect_all_of_python():
    assert {"ops", "tensor", "engine", "state"} <= affected_folders(["csrc/python/bindings.cpp"])


def test_folders_of_several_files_add_up():
    both = affected_folders(["README.md", "zero_ext/integrations/accelerate.py"])
    assert both == {"project", "integrations", "device", "properties"}
