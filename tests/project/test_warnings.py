"""zero_ext/_warnings.py: which line a warning names."""

import contextlib
from pathlib import Path

import pytest
import torch

import zero_ext
from zero_ext import _warnings


def inside(package) -> dict:
    """Functions as if a file of ``package`` had them."""
    names = {"warn": _warnings.warn, "contextlib": contextlib}
    code = """
@contextlib.contextmanager
def context():
    yield

def one(text): return warn(text)

def many(text): return [one(each) for each in [text]]

@context()
def decorated(text): return many(text)
"""
    exec(compile(code, str(Path(package.__file__).with_name("of_it.py")), "exec"), names)
    return names


@pytest.mark.parametrize("package", [zero_ext, torch], ids=lambda package: package.__name__)
@pytest.mark.parametrize("name", ["one", "many", "decorated"])
def test_a_warning_names_the_user_s_line(package, name):
    function = inside(package)[name]
    with pytest.warns(UserWarning, match="^said$") as told:
        function("said")
    assert told[0].filename == __file__
    assert "function(" in Path(__file__).read_text().splitlines()[told[0].lineno - 1]
