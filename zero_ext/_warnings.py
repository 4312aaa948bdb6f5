"""Warnings that name the user's own line."""

import contextlib
import os
import sys
import warnings

import torch

# Folders of the code between the user's call and ours. Contexts that decorate a function are in
# contextlib.
_FOLDERS = [os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__)]
_BETWEEN = (*_FOLDERS, contextlib.__file__)


def warn(message: str) -> None:
    """A UserWarning at the line that called us, however many calls lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
