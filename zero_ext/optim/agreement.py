"""What the optimizers of all ranks must have in common: parameters at first, settings in steps."""

from numbers import Number
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zero_ext.optim.groups import sharded_in
from zero_ext.ranks.groups import check_same_on_all_ranks

if TYPE_CHECKING:
    from zero_ext.optim.sharded_optimizer import ShardedOptimizer

# These choose between torch's implementations and change no value of an update.
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable"))


def check_same_optimizers(optimizer: "ShardedOptimizer") -> None:
    """Raise if ranks make different optimizers. Collective.

    Each rank may list the parameters of a group in an order of its own.
    """
    kind = getattr(optimizer, "_optimizer_class", type(optimizer))  # the wrapped one, any callable
    handle = optimizer._handle
    check_same_on_all_ranks(
        handle.groups,
        [
            f"{getattr(kind, '__name__', '')} nonfinite={optimizer.nonfinite!r} "
            f"clips={optimizer.max_grad_norm is not None} "
            f"scales={optimizer.loss_scaler is not None}",
            *(
                f"group {g}: {handle.engine.parameter_name(i)}"
                for g, group in enumerate(optimizer.param_groups)
                for i in sorted(i for _, i in sharded_in(group))
            ),
        ],
        "the optimizers",
        remedy="Make the same optimizers in the same order on every rank.",
    )


class StepSettings:
    """The settings that an update multiplies with. Each step compares their hash between ranks."""

    def __init__(self, defaults: dict[str, Any]):
        self._names = [name for name in defaults if name not in _SWITCHES]

    def hash(self, optimizer: "ShardedOptimizer") -> int:
        """Equal on ranks where all settings are equal."""
        if optimizer._handle.groups.world == 1:
            return 0
        return hash(tuple(map(_number_of, self._values(optimizer))))

    def check_same(self, optimizer: "ShardedOptimizer") -> None:
        """Raise for the first setting that differs. Collective."""
        labels = ["max_grad_norm={}", "gradient divide factor={}"]
        for g in range(len(optimizer.param_groups)):
            labels.extend(f"{name}={{}} of group {g}" for name in self._names)
        numbers = map(_number_of, self._values(optimizer))
        check_same_on_all_ranks(
            optimizer._handle.groups,
            [label.format(number) for label, number in zip(labels, numbers, strict=True)],
            "the settings of the optimizers",
            remedy="Give every rank the same, and repeat step(): nothing was updated.",
        )

    def _values(self, optimizer: "ShardedOptimizer") -> list[Any]:
        values = [optimizer.max_grad_norm, optimizer._handle.engine.divide_factor]
        for group in optimizer.param_groups:
            values.extend(map(group.get, self._names))
        return values


def _number_of(setting: Any) -> Any:
    """A number, or a tuple of them, with the same hash on every rank; 0 where it is no number."""
    if isinstance(setting, Number):  # bool is one, and so are numpy's
        return setting if setting == setting else 0  # every NaN has another hash
    if isinstance(setting, tuple | list):
        return tuple(map(_number_of, setting))
    if isinstance(setting, Tensor) and setting.device.type == "cpu" and setting.numel() == 1:
        return _number_of(setting.item())  # one on a device would have to be waited for
    return 0
