"""examples/first_steps.ipynb: its cells alone, and in a kernel where Jupyter is installed."""

import json
import sys
import types

import matplotlib.pyplot as plt
import pytest
from code_blocks import ROOT

NOTEBOOK = ROOT / "examples/first_steps.ipynb"


def code_cells() -> list[dict]:
    return [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_the_notebook_has_no_outputs():
    """They would change with each run. Editors of notebooks clear them."""
    assert [c for c in code_cells() if c["outputs"] or c["execution_count"] is not None] == []


def test_the_cells_run_where_main_is_no_file(monkeypatch, capsys):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(plt, "show", lambda: None)
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), vars(main))
    printed = capsys.readouterr().out
    assert printed.count("60 losses, equal to those of one process") == 4
    assert "ValueError: no samples left" in printed and main.expected[-1] < main.expected[0] / 10
    left, right = main.figure.axes
    alone, of_ranks = (line.get_ydata() for line in left.lines)
    assert list(alone) == list(of_ranks) and len(alone) == 30
    mebibytes = sum(bar.get_height() for bar in right.patches)
    persistent = sum(estimate["persistent"] for estimate in main.estimates.values())
    assert mebibytes == pytest.approx(persistent / 2**20)
    plt.close(main.figure)


def test_a_kernel_runs_it():
    nbclient = pytest.importorskip("nbclient", reason="make test-packages")
    import nbformat

    nbclient.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=200).execute()
