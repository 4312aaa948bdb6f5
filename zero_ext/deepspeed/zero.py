"""``deepspeed.zero``: what scripts call to reach parameters that stage 3 has released."""

import contextlib
import functools
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from zero_ext.deepspeed import names
from zero_ext.deepspeed.construction import Init as Init
from zero_ext.deepspeed.construction import gathered
from zero_ext.deepspeed.status import ZeroParamStatus as ZeroParamStatus
from zero_ext.deepspeed.status import available
from zero_ext.ranks.groups import rank_and_world

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
    with gathered(parameters, modifier_rank), available(parameters):
        yield


def _check_rank(rank: int | None) -> None:
    _, world = rank_and_world()
    if rank is not None and not 0 <= rank < world:
        raise ValueError(
            f"zero_ext: GatheredParameters(modifier_rank={rank!r}): choose a rank below {world}."
        )


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
