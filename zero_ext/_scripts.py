"""Runs a user's script inside of this process, as a command that prepares it does."""

import os
import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock


def add_script(parser: ArgumentParser) -> None:
    """Add the arguments of ``run_script``. The rest is left to the script, as ``arguments``."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs="...", metavar="args")


def run_script(script: str, arguments: Sequence[str], is_module: bool) -> dict[str, Any]:
    """As ``python SCRIPT`` does, or ``python -m SCRIPT``. Returns its global names."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [script, *arguments]))
        if is_module:
            return runpy.run_module(script, run_name="__main__", alter_sys=True)
        folder = os.path.dirname(os.path.abspath(script))
        stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path[1:]]))
        return runpy.run_path(script, run_name="__main__")
