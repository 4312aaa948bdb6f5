"""Optimizers whose state is sharded: real ``torch.optim.Optimizer``s with torch's own arguments.

On the parameters of a module that ``shard`` has sharded they use its engine; plain parameters they
shard by themselves, so that a script changes one line::

    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-3)

``optimizer.state[p]`` has torch's names and the parameter's shape; the values are ShardTensors over
this rank's part (plain tensors where every rank holds all), fp32 unless ``state_dtype`` says bf16.
"""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from zero_ext import _C
from zero_ext.engine.checks import check_state_dtype
from zero_ext.optim.arguments import ShardingArguments, check_differentiable
from zero_ext.optim.groups import Group
from zero_ext.optim.loading import SavedState
from zero_ext.optim.sharded_optimizer import ShardedOptimizer


class AdamW(ShardedOptimizer):
    """torch.optim.AdamW with sharded state and fp32 masters (Loshchilov & Hutter 2019).

    Arguments as in torch; ``foreach``, ``capturable`` and ``fused`` choose between torch's
    implementations and are ignored here, there is one fused kernel. See ``ShardedOptimizer`` for
    the keyword arguments that torch does not have.

    Args:
        state_dtype: How both moments are stored: ``"fp32"``, ``"bf16"`` (rounded up or down at
            random, so that the mean over steps is the value) or ``"int8"`` (256 levels between
            zero and the largest of a block of 256 elements; parameters of fewer than 4,096
            elements keep fp32). The bits do not depend on the number of ranks.
    Raises:
        ValueError: another ``state_dtype``, or ``amsgrad`` with one that is not ``"fp32"``.
    """

    _state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _decoupled_by_default = True

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: Literal["fp32", "bf16", "int8"] = "fp32",
        **sharding: Unpack[ShardingArguments],
    ):
        check_differentiable(differentiable)
        check_state_dtype(state_dtype)
        self._stored_as = state_dtype
        # torch checks the values, with messages of its own.
        torchs = torch.optim.AdamW([torch.zeros(1)], lr, betas, eps, weight_decay, amsgrad)
        defaults = torchs.defaults | {
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "decoupled_weight_decay": self._decoupled_by_default,
        }
        super().__init__(params, defaults, **sharding)

    @property
    def state_dtype(self) -> str:
        """As given to the constructor."""
        return self._stored_as

    def _states_of(self, group: Group) -> int:
        if group["amsgrad"] and self._stored_as != "fp32":
            raise ValueError(
                f"zero_ext: amsgrad=True needs state_dtype='fp32', not '{self._stored_as}': a "
                "maximum over steps would keep the largest error of rounding."
            )
        return 3 if group["amsgrad"] else 2

    def _update(self, verdict: _C.StepVerdict) -> None:
        self._sharded_state.apply_adam(
            [
                _C.AdamGroup(
                    lr=float(group["lr"]),
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    amsgrad=group["amsgrad"],
                    maximize=group["maximize"],
                    decoupled=group["decoupled_weight_decay"],
                )
                for group in self.param_groups
            ]
        )


class Adam(AdamW):
    """torch.optim.Adam with sharded fp32 state and fp32 masters (Kingma & Ba 2015).

    As ``AdamW``, with the weight decay inside the gradient unless ``decoupled_weight_decay``.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **kwargs,
    ):
        self._decoupled_by_default = decoupled_weight_decay
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)


class SGD(ShardedOptimizer):
    """torch.optim.SGD with sharded fp32 momentum and fp32 masters.

    Arguments as in torch; ``foreach`` and ``fused`` are ignored. See ``ShardedOptimizer`` for the
    keyword arguments that torch does not have.
    """

    _state_names = ("momentum_buffer",)

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **sharding: Unpack[ShardingArguments],
    ):
        check_differentiable(differentiable)
        arguments = (lr, momentum, dampening, weight_decay, nesterov)
        torchs = torch.optim.SGD([torch.zeros(1)], *arguments)
        defaults = torchs.defaults | {"maximize": maximize, "foreach": foreach, "fused": fused}
        super().__init__(params, defaults, **sharding)

    def _states_of(self, group: Group) -> int:
        return 1 if group["momentum"] else 0

    def _completed(self, saved: SavedState) -> SavedState:
        saved = super()._completed(saved)
        # torch counts no steps of SGD: a buffer that exists holds something.
        if "momentum_buffer" in saved.values and "step" not in saved.values:
            return saved._replace(values={**saved.values, "step": 1})
        return saved

    def _update(self, verdict: _C.StepVerdict) -> None:
        self._sharded_state.apply_sgd(
            [
                _C.SgdGroup(
                    lr=float(group["lr"]),
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    weight_decay=group["weight_decay"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                )
                for group in self.param_groups
            ]
        )
