"""Errors of saving and loading: each names the path, the rank and one remedy."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from zero_ext.engine.checks import check_module
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import groups_of, handles_of

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
def together(groups: Groups, what: str) -> Iterator[dict[Any, Any]]:
    """As ``all_or_none``, whose errors are ``named``. Collective."""
    with named(groups, what), all_or_none(groups, what) as found:
        try:
            yield found
        except OSError as error:  # the other ranks tell the remedy as well
            raise type(error)(_with_remedy(error)) from error


def checked(what: str, model: nn.Module, check: Callable[[], Any]) -> tuple[Groups, Any]:
    """The ranks of ``model``, and what ``check`` returns of the other arguments. Collective.

    Raises:
        TypeError, ValueError: on every rank, where an argument is wrong or only some models are
            sharded. RuntimeError: an argument of another rank is wrong.
    """
    # A rank without a model of the others' kind knows the default group alone.
    groups = groups_of(model if isinstance(model, nn.Module) else nn.Module())
    with together(groups, what) as found:
        result = check()
        check_module(model, "a checkpoint")
        found["sharded" if handles_of(model) else "plain"] = groups.global_rank
    if len(found) > 1:
        raise ValueError(
            f"{groups.where}{what}: the model is sharded on rank {found['sharded']}, and not on "
            f"rank {found['plain']}. Call zero_ext.shard() on every rank."
        )
    return groups, result


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
