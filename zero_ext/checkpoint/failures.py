"""Errors of saving and loading: each names the path, the rank and one remedy."""

import contextlib
import errno
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from zero_ext.ranks.agreement import all_or_none, naming
from zero_ext.ranks.groups import Groups

_FREE_SPACE = "Free space there, or use another file system"
_GET_ACCESS = "Use a folder that this user may read and write"
_LEAVE_FILES = "Choose a path of which no part is a file"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EACCES: _GET_ACCESS,
    errno.EPERM: _GET_ACCESS,
    errno.EROFS: _GET_ACCESS,
    errno.ENOTDIR: _LEAVE_FILES,
    errno.EEXIST: _LEAVE_FILES,
    errno.ENAMETOOLONG: "Choose a shorter name",
}


@contextlib.contextmanager
def named(groups: Groups | None, what: str) -> Iterator[None]:
    """Errors of the file system and of torch become errors like their neighbours.

    Raises:
        RuntimeError: in place of an OSError and of torch's CheckpointException, which
            `except Exception` does not catch.
    """
    where = "zero_ext: " if groups is None else groups.where
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if groups is not None:
            what = f"{what}: rank {groups.global_ranks[rank]}"
        raise RuntimeError(f"{where}{what}: {_told(cause)}") from error
    except OSError as error:
        raise RuntimeError(f"{where}{what}: {_told(error)}") from error
    except (ValueError, TypeError, RuntimeError) as error:
        # Functions that are not collective do not know their rank.
        text = str(error)
        if groups is not None and groups.world > 1 and text.startswith("zero_ext: "):
            error.args = (where + text.removeprefix("zero_ext: "),)
        raise


@contextlib.contextmanager
def together(groups: Groups, what: str) -> Iterator[None]:
    """As ``all_or_none``, whose errors are ``named``. Collective."""
    with named(groups, what), all_or_none(groups, what):
        try:
            yield
        except OSError as error:  # the other ranks tell the remedy as well
            raise type(error)(_with_remedy(error)) from error


@contextlib.contextmanager
def of_torchs_ranks(groups: Groups, what: str) -> Iterator[None]:
    """Names errors of torch.distributed.checkpoint, where it waits for other ranks as well."""
    waiting = naming(what) if groups.world > 1 else contextlib.nullcontext()
    with named(groups, what), waiting:
        yield


def of_the_file_system(error: BaseException) -> BaseException:
    """The OSError that ``error`` came from, if there is one: torch's zip files hide it."""
    each: BaseException | None = error
    while each is not None and not isinstance(each, OSError):
        each = each.__cause__ or each.__context__
    return each or error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_with_remedy(error)}"


def _with_remedy(error: BaseException) -> str:
    remedy = _REMEDIES.get(error.errno) if isinstance(error, OSError) else None
    return str(error) if remedy is None else f"{error}. {remedy}."
