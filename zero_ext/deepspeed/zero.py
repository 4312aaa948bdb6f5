"""``deepspeed.zero``: what scripts call to reach parameters that stage 3 has released."""

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_ext.deepspeed import names
from zero_ext.deepspeed.construction import Init as Init
from zero_ext.deepspeed.construction import gathered, piece_of
from zero_ext.deepspeed.status import ZeroParamStatus as ZeroParamStatus
from zero_ext.deepspeed.status import available
from zero_ext.engine.registry import find
from zero_ext.ranks.agreement import all_or_none
from zero_ext.ranks.collectives import broadcast_
from zero_ext.ranks.groups import rank_and_world
from zero_ext.state.model_state import full_value
from zero_ext.state.values import set_full_param

__getattr__ = functools.partial(names.child, __name__)


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name
    params: Iterable[Tensor] | Tensor,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make ``params`` whole inside the context, on every rank. Collective.

    Only these parameters are gathered. Do not run a forward that uses them inside the context.

    Args:
        modifier_rank: The rank of the default process group whose changes every rank gets in the
            end. None: changes are lost with stage 3, and stay on the rank that made them otherwise.
        fwd_module: Not needed here: every forward gathers what it uses.
    Raises:
        ValueError: there is no such rank.
        RuntimeError: with ``modifier_rank``, another rank raised an error inside the context.
    """
    if not enabled:
        yield
        return
    _check_rank(modifier_rank)
    parameters = [params] if isinstance(params, Tensor) else list(params)
    unique = list({id(p): p for p in parameters}.values())
    others = [p for p in unique if piece_of(p) is None]
    with (
        gathered(unique, modifier_rank),
        _gathered_by_engines(others, modifier_rank),
        available(unique),
    ):
        yield


@contextlib.contextmanager
def _gathered_by_engines(unique: list[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Gather parameters of sharded modules, and plain ones."""
    rank, _ = rank_and_world()
    released = [p for p in unique if _is_released(p)]
    nothing = [p.data for p in released]
    whole = [full_value(p).clone() for p in released]
    groups = next((entry.handle.groups for entry in map(find, unique) if entry is not None), None)
    told = modifier_rank is not None and groups is not None  # so that no rank waits in vain
    try:
        with all_or_none(groups, "GatheredParameters()") if told else contextlib.nullcontext():
            for p, data in zip(released, whole, strict=True):
                p.data = data
            before = [p.detach().clone() for p in unique] if modifier_rank == rank else []
            yield
    finally:
        after = [p.data for p in unique]
        for p, data in zip(released, nothing, strict=True):
            p.data = data
    if modifier_rank is not None:
        with torch.no_grad():
            _share(unique, before, after, modifier_rank)


def _check_rank(rank: int | None) -> None:
    _, world = rank_and_world()
    if rank is not None and not 0 <= rank < world:
        raise ValueError(
            f"zero_ext: GatheredParameters(modifier_rank={rank!r}): choose a rank below {world}."
        )


def _is_released(parameter: Tensor) -> bool:
    entry = find(parameter)
    if entry is None or not entry.handle.engine.releases:
        return False
    try:
        parameter.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def _share(
    parameters: list[Tensor], before: list[Tensor], after: list[Tensor], source: int
) -> None:
    """Give every rank what ``source``, which alone knows ``before``, has changed. The masters of
    others keep all bits."""
    device = after[0].device if after else torch.device("cpu")
    changed = torch.zeros(len(parameters), dtype=torch.uint8, device=device)
    for k, (old, new) in enumerate(zip(before, after, strict=False)):
        changed[k] = not torch.equal(old, new)
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        broadcast_(changed, group, source)
    for is_changed, p, value in zip(changed.tolist(), parameters, after, strict=True):
        if not is_changed:
            continue
        value = value.contiguous()
        if group is not None:
            broadcast_(value, group, source)
        if find(p) is None:
            p.data.copy_(value)
        else:
            set_full_param(p, value)


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The module of an engine, whole inside the context: ranks may run it as often as they like.
    Collective. Writes are lost with stage 3."""
    module = getattr(model, "module", model)
    with module.summon_full_params(writeback=False):
        yield module


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Not needed here: a parameter that another module uses is gathered with its own unit, or with
    the root if several units share it."""


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """See ``register_external_parameter``."""
