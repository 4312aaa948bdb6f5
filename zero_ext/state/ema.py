"""EMA: averages of the weights of a sharded model, kept beside this rank's masters."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero_ext.engine.checks import check_module
from zero_ext.engine.registry import find
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.model_state import (
    ModelState,
    entry_with_master,
    groups_of,
    handles_of,
    held_value,
    write_held,
)
from zero_ext.tensor.meshes import local_of


class EMA:
    """Exponential moving averages of the trained parameters of ``module``.

    As ``torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))`` of
    the whole fp32 parameters, but each rank holds the averages of its own masters alone::

        ema = zero_ext.EMA(module, 0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.swap():
            evaluate(module)

    The formula is that of ``torch.lerp``, without fused multiply-adds. So stages and numbers of
    ranks agree in all bits, and ``AveragedModel`` differs by roundings:

        average + (master - average) · (1 - decay)    decay > 0.5
        master + (average - master) · decay           otherwise

    Frozen parameters have no average and stay as they are. A parameter that is unfrozen later is
    averaged from the next ``update()`` on, which copies it. Trained ``ignored_params`` are averaged
    whole, in fp32 at least. Buffers are the module's own, as ``AveragedModel`` copies them.

    The averages are saved and loaded in any stage and on any number of ranks, by ``extra`` of
    ``zero_ext.checkpoint.save`` or by ``torch.distributed.checkpoint``::

        torch.distributed.checkpoint.save(ema.state_dict(), checkpoint_id=folder)

        state = ema.state_dict()
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        ema.load_state_dict(state)

    Args:
        module: Sharded by ``shard()``, or its parameters by an optimizer of this package.
        decay: From 0 to 1: the weight of the old average.
    Raises:
        TypeError: ``module`` is no module.
        ValueError: it is not sharded, its parts are sharded over different ranks, or ``decay`` is
            no number from 0 to 1.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999):
        check_module(module, "EMA()")
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"zero_ext: EMA() takes a decay from 0 to 1, not {decay!r}.")
        if not handles_of(module):
            raise ValueError(
                f"zero_ext: EMA(): this {type(module).__name__} is not sharded. Call "
                "zero_ext.shard(), or make the optimizer, before EMA()."
            )
        self._module, self._decay = module, float(decay)
        self._groups = groups_of(module)
        self._swapped = False
        self._updates = 0
        self._averages: dict[Tensor, Tensor] = {}
        with _plain_mode():
            for parameter in module.parameters():
                if _is_trained(parameter):
                    self._averages[parameter] = _present(parameter)

    def update(self) -> None:
        """Take in the present masters: call it after each step. Sends nothing.

        The first call copies them.

        Raises:
            RuntimeError: inside ``swap()`` or a backward, or ``offload_states`` has moved
                parameters or masters.
        """
        self._refuse_swapped("update()")
        with _plain_mode():
            for parameter in self._module.parameters():
                average = self._averages.get(parameter)
                if average is not None:
                    self._average(local_of(average), local_of(_present(parameter)))
                elif _is_trained(parameter):
                    self._averages[parameter] = _present(parameter)
        self._updates += 1

    def _average(self, average: Tensor, present: Tensor) -> None:
        """``present`` is overwritten."""
        if self._updates == 0:
            average.copy_(present)
        elif self._decay > 0.5:  # as lerp: from the nearer end, which a weight of 0 returns
            average.add_(present.sub_(average).mul_(1 - self._decay))
        else:
            average.sub_(present).mul_(self._decay).add_(present)

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Let the module compute with the averages inside the context. Collective.

        Afterwards parameters and masters are back bit for bit; what was written or stepped inside
        is forgotten. Each parameter is sent whole, one at a time, when the context begins and when
        it ends. Inside, each rank holds a second copy of its masters.

        Raises:
            RuntimeError: inside another ``swap()``, a backward or
                ``summon_full_params(writeback=False)``; or ``offload_states`` has moved parameters
                or masters. Nothing is changed then.
        """
        with all_or_none(self._groups, "EMA.swap()"), _plain_mode():
            self._refuse_swapped("swap()")
            for handle in handles_of(self._module):
                handle.refuse_forgotten_writes("EMA.swap()")
            trained = {parameter: _present(parameter) for parameter in self._averages}
        self._swapped = True
        try:
            _write(self._averages)
            yield
        finally:
            _write(trained)
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """The averages themselves, no copies.

        Returns:
            ``"averages"``: by the names of ``module.state_dict()``, fp32 ShardTensors; plain
            tensors where each rank holds all. ``"n_averaged"``: the number of updates, int64.
        """
        n_averaged = torch.tensor(self._updates, dtype=torch.int64, device="cpu")
        return {"averages": self._by_name(), "n_averaged": n_averaged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict()`` returned. Collective.

        Args:
            state_dict: Its averages may be whole tensors, the same on every rank.
        Raises:
            ValueError: names or shapes are not this module's. Nothing is changed then.
            RuntimeError: inside ``swap()``, or another rank's state was rejected.
        """
        with all_or_none(self._groups, "EMA.load_state_dict()"):
            self._refuse_swapped("load_state_dict()")
            mine, given = self._by_name(), state_dict.get("averages")
            if given is None or "n_averaged" not in state_dict:
                self._reject(f"the state has {list(state_dict)}, not 'averages' and 'n_averaged'")
            for name in [*mine, *given]:
                if name not in mine or name not in given:
                    whose = "the state" if name in mine else "the module"
                    self._reject(f"{whose} has no average of '{name}'")
                shape = list(mine[name].shape)
                if not isinstance(given[name], Tensor):
                    self._reject(f"'{name}' is a {type(given[name]).__name__}, no tensor")
                if list(given[name].shape) != shape:
                    self._reject(f"'{name}' has shape {list(given[name].shape)}, not {shape}")
        with _plain_mode():
            for name, average in mine.items():
                average.copy_(given[name])
        self._updates = int(state_dict["n_averaged"])

    def _by_name(self) -> dict[str, Tensor]:
        tensors = ModelState.of(self._module).tensors
        return {name: self._averages[p] for name, p in tensors.items() if p in self._averages}

    def _refuse_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{self._groups.where}EMA.{what} inside EMA.swap(), where the module has the "
                "averages. Leave the context first."
            )

    def _reject(self, what: str) -> None:
        raise ValueError(
            f"{self._groups.where}EMA.load_state_dict(): {what}. Load the state of the same module."
        )


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """The averages outlive an ``inference_mode()`` in which they are made."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _is_trained(parameter: Tensor) -> bool:
    if find(parameter) is None:
        return parameter.requires_grad
    return entry_with_master(parameter) is not None


def _present(parameter: Tensor) -> Tensor:
    """A copy of what this rank holds of the parameter's value: of the master, where it has one."""
    if entry_with_master(parameter) is not None:
        return held_value(parameter)
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True)


def _write(values: dict[Tensor, Tensor]) -> None:
    """Give parameters and masters these values. Collective."""
    with _plain_mode():
        for parameter, value in values.items():
            write_held(parameter, value)
