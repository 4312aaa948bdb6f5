"""The environment variables that are read at run time. Each is read in one place."""

import datetime
import os
import sys

from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.groups import Groups

_LONGEST_S = 1e9  # that deadlines in ns can hold


def timeout() -> datetime.timedelta | None:
    """How long a rank waits for another one. None: as long as the user's process group says."""
    text = os.environ.get("ZERO_EXT_TIMEOUT_S")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= _LONGEST_S:
        raise ValueError(
            f"zero_ext: ZERO_EXT_TIMEOUT_S={text!r} is not a number of seconds from 0.001 to "
            f"{_LONGEST_S:g}."
        )
    return datetime.timedelta(seconds=seconds)


def host_of_this_rank() -> int:
    """Ranks with the same number may read each other's memory instead of sending messages. 0: this
    one does not."""
    text = os.environ.get("ZERO_EXT_CROSS_MEMORY", "1")
    if not (text.isascii() and text.isdigit() and int(text) < 2**62):
        raise ValueError(
            f"zero_ext: ZERO_EXT_CROSS_MEMORY={text!r} is neither 0 nor the number of a host."
        )
    return int(text)


def limit_bytes() -> int:
    """The most that an engine may hold."""
    text = os.environ.get("ZERO_EXT_LIMIT_BYTES")
    if text is None:
        return sys.maxsize
    if not text.isdigit():
        raise ValueError(f"zero_ext: ZERO_EXT_LIMIT_BYTES={text!r} is not a number of bytes.")
    return int(text)


def stage(given: int | None) -> int:
    """The stage of an integration. A script may leave it to the command that starts it."""
    text = os.environ.get("ZERO_EXT_STAGE", "2")
    if given is not None:
        return given
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"zero_ext: ZERO_EXT_STAGE={text!r} is none of the stages 0, 1, 2 and 3.")
    return int(text)


def check(groups: Groups) -> None:
    """Raise on every rank where a variable is wrong on one: an engine would find it among
    collectives."""
    with all_or_none(groups, "sharding"):
        timeout()
        host_of_this_rank()
        limit_bytes()
