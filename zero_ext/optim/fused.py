"""Optimizers whose state is sharded: real ``torch.optim.Optimizer``s with torch's own arguments.

On the parameters of a module that ``shard`` has sharded they use its engine; plain parameters they
shard by themselves, so that a script changes one line::

    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-3)

``optimizer.state[p]`` has torch's names and the parameter's shape; the values are ShardTensors over
this rank's part (plain tensors where every rank holds all), fp32 unless ``state_dtype`` says bf16.
"""

import functools
from typing import Any, Literal

import torch

from zero_ext import _C
from zero_ext.engine.checks import check_state_dtype
from zero_ext.optim.arguments import Sharding, check_params
from zero_ext.optim.core import Core
from zero_ext.optim.groups import Group
from zero_ext.optim.sharded import Sharded, shard_states
from zero_ext.optim.states import FusedStates, Layout

# Settings of groups that C++ reads as they are.
_OF_ADAM = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


class Fused(Sharded):
    """An optimizer whose states lie in C++."""

    _zero_layout: Layout
    _zero_stored_as = "fp32"

    def __init__(self, params, *args: Any, **kwargs: Any):
        sharding = Sharding.taken_from(kwargs)
        super().__init__(check_params(params), *args, **kwargs)
        self.shard_fused(sharding)

    def shard_fused(self, sharding: Sharding) -> None:
        """Shard what its constructor has made, or it had when it was adopted."""
        kind = type(self).__name__
        shard_states(
            self, sharding, f"{kind} states={self._zero_stored_as}", self._zero_make_states
        )

    def _zero_make_states(self, core: Core) -> None:
        layout, kind = self._zero_layout, type(self).__name__
        held = max(map(layout.count_of, self.param_groups))
        core.state = _C.OptimizerState(core.handle.engine, held, self._zero_stored_as)
        core.states = FusedStates(layout, kind, core.handle, core.state, held)


class _FusedAdam(Fused):
    def __init__(
        self,
        params,
        *args: Any,
        state_dtype: Literal["fp32", "bf16", "int8"] = "fp32",
        **kwargs: Any,
    ):
        check_state_dtype(state_dtype)
        self._zero_stored_as = state_dtype
        super().__init__(params, *args, **kwargs)

    @property
    def state_dtype(self) -> str:
        """The constructor's argument."""
        return self._zero_stored_as

    @property
    def _zero_layout(self) -> Layout:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return Layout(names, functools.partial(_moments_of, self._zero_stored_as))

    def _zero_update(self) -> None:
        groups = []
        for group in self.param_groups:
            betas, decoupled = group["betas"], group["decoupled_weight_decay"]
            others = {name: group[name] for name in _OF_ADAM}
            groups.append(
                _C.AdamGroup(beta1=betas[0], beta2=betas[1], decoupled=decoupled, **others)
            )
        self.zero_core.state.apply_adam(groups)


def _moments_of(stored_as: str, group: Group) -> int:
    if group["amsgrad"] and stored_as != "fp32":
        raise ValueError(
            f"zero_ext: amsgrad=True needs state_dtype='fp32', not '{stored_as}': a "
            "maximum over steps would keep the largest error of rounding."
        )
    return 3 if group["amsgrad"] else 2


class AdamW(_FusedAdam, torch.optim.AdamW):
    """torch.optim.AdamW with sharded state and fp32 masters (Loshchilov & Hutter 2019).

    Arguments as in torch; ``foreach``, ``capturable`` and ``fused`` choose between torch's
    implementations and are ignored here, there is one fused kernel. See ``Sharded`` for the keyword
    arguments that torch does not have.

    Args:
        state_dtype: How both moments are stored: ``"fp32"``, ``"bf16"`` (rounded up or down at
            random, so that the mean over steps is the value) or ``"int8"`` (256 levels between
            zero and the largest of a block of 256 elements; parameters of fewer than 4,096
            elements keep fp32). The bits do not depend on the number of ranks.
    Raises:
        ValueError: another ``state_dtype``, or ``amsgrad`` with one that is not ``"fp32"``.
    """


class Adam(_FusedAdam, torch.optim.Adam):
    """torch.optim.Adam with sharded fp32 state and fp32 masters (Kingma & Ba 2015).

    As ``AdamW``, with the weight decay inside the gradient unless ``decoupled_weight_decay``.
    """


class SGD(Fused, torch.optim.SGD):
    """torch.optim.SGD with sharded fp32 momentum and fp32 masters.

    Arguments as in torch; ``foreach`` and ``fused`` are ignored. See ``Sharded`` for the keyword
    arguments that torch does not have.
    """

    _zero_layout = Layout(("momentum_buffer",), lambda group: 1 if group["momentum"] else 0)

    def _zero_update(self) -> None:
        groups = [{name: group[name] for name in _OF_SGD} for group in self.param_groups]
        self.zero_core.state.apply_sgd([_C.SgdGroup(**group) for group in groups])
