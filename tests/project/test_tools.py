"""``zero-ext TOOL``: the tools by one name."""

import sys
from pathlib import Path

import pytest

from zero_ext.__main__ import TOOLS, main


def test_a_tool_runs_as_by_its_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero-ext", "info"])
    main()
    assert "instruction set" in capsys.readouterr().out


@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_has_help_of_its_own(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero-ext", tool, "--help"])
    if tool == "info":  # it has no arguments
        return main()
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert f"usage: python -m zero_ext.{tool} " in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["bogus"], 2), (["--help"], 0)])
def test_other_names_show_the_tools(arguments, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero-ext", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == code
    assert "{checkpoint,diff,doctor,info,plan,profile}" in capsys.readouterr().err


def test_the_command_is_installed():
    """Beside the Python that runs the tests."""
    command = Path(sys.executable).parent / "zero-ext"
    assert "from zero_ext.__main__ import main" in command.read_text()
