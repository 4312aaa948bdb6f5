"""The names that torch's pipelines read of a stage that is an FSDPModule, beside its methods.

After the last micro-batch they end the backward of each state of ``fully_shard`` in the stage. Here
every backward has ended by itself: there are no such states.
"""

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from zero_ext._torch import STATES_OF_MODULE
from zero_ext.engine.carried import Carried

_KEY = fully_shard.__wrapped__


def _state() -> SimpleNamespace:
    return SimpleNamespace(
        _state_ctx=SimpleNamespace(all_states=()),
        _root_post_backward_final_callback=lambda: None,
    )


class _States(Carried, dict):
    """A module's states by the function that made them, with one of ``fully_shard``."""

    def replaced(self) -> dict[Any, Any] | None:
        return {key: state for key, state in self.items() if key is not _KEY} or None

    def __reduce_ex__(self, protocol: int) -> tuple:
        return dict, (self.replaced() or {},)


def attach(module: nn.Module) -> None:
    others = module.__dict__.get(STATES_OF_MODULE, {})
    module.__dict__[STATES_OF_MODULE] = _States({**others, _KEY: _state()})
