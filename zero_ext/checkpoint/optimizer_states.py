"""Optimizers' states in a checkpoint: tensors by parameters' names, everything else pickled."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zero_ext._torch import tree_flatten, tree_leaves, tree_unflatten
from zero_ext._warnings import warn
from zero_ext.checkpoint.contents import Contents, first_of
from zero_ext.engine.registry import find
from zero_ext.optim.groups import name_in_module, parameters_of, settings_of
from zero_ext.optim.sharded import Sharded
from zero_ext.state.model_state import ModelState, entry_with_master

_SAVED_GROUPS = "Make it with the groups that were saved, or load the model alone."


def listed(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, str)
    listed = list(optimizer) if several else [optimizer]
    for each in listed:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                f"zero_ext: a checkpoint takes an optimizer or several, not a "
                f"{type(each).__name__}."
            )
    return listed


def _names(optimizer: torch.optim.Optimizer, of_model: ModelState) -> list[list[str]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in of_model.names:
                which = f"'{name}'" if (name := name_in_module(parameter)) else f"parameter {i}"
                raise ValueError(
                    f"zero_ext: {which} of the optimizer's group {g}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's."
                )
    return [[of_model.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _key(name: str, state: str) -> str:
    return f"optimizer.state.{name}.{state}"


def states_of(
    optimizers: list[torch.optim.Optimizer], of_model: ModelState
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors by key, and for each optimizer everything else."""
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, Any]] = []
    seen: set[str] = set()
    for optimizer in optimizers:
        names, state_dict = _names(optimizer, of_model), optimizer.state_dict()
        groups, scaler = state_dict["param_groups"], getattr(optimizer, "loss_scaler", None)
        every, numbers = state_dict["state"], [n for group in groups for n in group["params"]]
        values = {
            name: every.get(number, {})
            for number, name in zip(numbers, itertools.chain(*names), strict=True)
        }
        if twice := seen & values.keys():
            raise ValueError(
                f"zero_ext: two of the optimizers have '{min(twice)}'. Save one of them, or give "
                "each parameter to one optimizer."
            )
        seen |= values.keys()
        states = {n: [s for s in v if isinstance(v[s], Tensor)] for n, v in values.items()}
        tensors |= {_key(n, s): _detached(values[n][s]) for n in states for s in states[n]}
        others.append(
            {
                "names": names,
                "settings": [settings_of(group) for group in groups],
                "states": states,  # those that are tensors
                "objects": {
                    n: {s: value for s, value in v.items() if s not in states[n]}
                    for n, v in values.items()
                },
                "named": (named := {key: every[key] for key in every.keys() - set(numbers)}),
                "devices": [_is_on_device(each) for each in tree_leaves(named)],
                "on_device": {
                    n: [s for s in states[n] if _is_on_device(values[n][s])] for n in states
                },
                "loss_scaler": None if scaler is None else scaler.state_dict(),
            }
        )
    return tensors, others


def torchs_groups(optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """By key what torch's get_optimizer_state_dict() has of groups. Only torch reads it."""
    groups = [
        settings | {"params": names}
        for each in optimizers
        for settings, names in zip(each["settings"], each["names"], strict=True)
    ]
    return {
        f"optimizer.param_groups.{g}.{k}": v for g, d in enumerate(groups) for k, v in d.items()
    }


def _detached(value: Tensor) -> Tensor:
    return value.detach() if value.requires_grad else value


class _Saved(NamedTuple):
    """The state of one parameter: the keys of its tensors, and everything else."""

    keys: dict[str, str]
    objects: dict[str, Any]


class SavedOptimizer:
    """A checkpoint's states of an optimizer, by the names that parameters have in the model here.

    Raises:
        ValueError: its groups have other parameters than those of ``optimizer``.
    """

    def __init__(
        self,
        contents: Contents,
        saved: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        of_model: ModelState,
    ):
        self._contents, self._optimizer = contents, optimizer
        self._names = _names(optimizer, of_model)
        names, parameters = itertools.chain(*self._names), parameters_of(optimizer.param_groups)
        self._parameters = dict(zip(names, parameters, strict=True))
        self._settings, self._loss_scaler = saved["settings"], saved["loss_scaler"]
        # A checkpoint of DeepSpeed has none of these.
        self._on_device = {
            _key(name, state)
            for name, states in saved.get("on_device", {}).items()
            for state in states
        }
        self._named = _placed(saved.get("named", {}), saved.get("devices", ()), optimizer)
        # A tied parameter's first name may be another one here.
        tensors = {name: of_model.tensors.get(name) for name in saved["states"]}
        here = {name: of_model.names.get(id(tensor), name) for name, tensor in tensors.items()}
        frozen = {name for name, p in self._parameters.items() if not self._takes_state(p)}
        saved_names = [[here[name] for name in group] for group in saved["names"]]
        self._check_groups(saved_names, frozen if saved.get("names_trained_only") else set())
        self._states = {
            here[name]: _Saved(
                {state: _key(name, state) for state in states}, saved["objects"][name]
            )
            for name, states in saved["states"].items()
        }
        passed_over = [name for name in self._states if name in frozen]
        if any(self._states[name].keys for name in passed_over):
            warn(
                "zero_ext: the optimizer's states of parameters that are frozen now are passed "
                f"over: {first_of(passed_over)}."
            )
        self._states |= dict.fromkeys(frozen, _Saved({}, {}))

    @staticmethod
    def all_of(
        contents: Contents, optimizers: list[torch.optim.Optimizer], of_model: ModelState
    ) -> list["SavedOptimizer"]:
        """One for each of ``optimizers``, which must be as many as were saved, or none."""
        path, saved = contents.path, contents.optimizers
        if not optimizers:
            return []
        if not saved:
            raise ValueError(
                f"zero_ext: checkpoint '{path}' has no optimizer's state. Load the model alone."
            )
        if len(saved) != len(optimizers):
            raise ValueError(
                f"zero_ext: checkpoint '{path}' has the states of {len(saved)} optimizers, and is "
                f"loaded into {len(optimizers)}. Pass as many, in the order of the call that saved "
                "them, or load the model alone."
            )
        pairs = zip(saved, optimizers, strict=True)
        return [SavedOptimizer(contents, theirs, ours, of_model) for theirs, ours in pairs]

    def _check_groups(self, saved_names: list[list[str]], without_states: set[str]) -> None:
        path = self._contents.path
        if len(saved_names) != len(self._names):
            raise ValueError(
                f"zero_ext: the optimizer has {len(self._names)} groups, and {len(saved_names)} in "
                f"checkpoint '{path}'. {_SAVED_GROUPS}"
            )
        for g, (ours, theirs) in enumerate(zip(self._names, saved_names, strict=True)):
            for name in sorted(({*ours} ^ {*theirs}) - without_states):
                where = "not in the checkpoint's" if name in ours else "in the checkpoint's alone"
                raise ValueError(
                    f"zero_ext: the optimizer's group {g} has other parameters than in checkpoint "
                    f"'{path}': '{name}' is {where}. {_SAVED_GROUPS}"
                )

    def _takes_state(self, parameter: Tensor) -> bool:
        """Optimizers of this package have no state of frozen parameters."""
        frozen = find(parameter) and entry_with_master(parameter) is None
        return not (frozen and isinstance(self._optimizer, Sharded))

    def targets(self) -> dict[str, Tensor]:
        """The tensors to read into, by key: this rank's part of each."""
        targets, metadata = {}, self._contents.tensors
        for name, parameter in self._parameters.items():
            for state, key in self._states[name].keys.items():
                if key not in metadata:
                    raise ValueError(
                        f"zero_ext: checkpoint '{self._contents.path}' lacks the optimizer's "
                        f"state '{state}' of '{name}'."
                    )
                targets[key] = _target(parameter, metadata[key], key in self._on_device)
        return targets

    def checked_load(self, values: dict[str, Tensor]) -> Callable[[], None]:
        """Check what will be loaded, as far as the optimizer can. What is returned loads it.

        Args:
            values: The tensors that were read, by key.
        """
        saved = [self._states[name] for names in self._names for name in names]
        states = [{s: values[key] for s, key in keys.items()} | objects for keys, objects in saved]
        numbers = itertools.count()
        state_dict = {
            "state": self._named | {number: state for number, state in enumerate(states) if state},
            "param_groups": [
                {**settings, "params": list(itertools.islice(numbers, len(names)))}
                for names, settings in zip(self._names, self._settings, strict=True)
            ],
        }
        if isinstance(self._optimizer, Sharded):
            load_optimizer = self._optimizer.checked_load(state_dict)
        else:
            load_optimizer = functools.partial(self._optimizer.load_state_dict, state_dict)
        scaler = getattr(self._optimizer, "loss_scaler", None)

        def load() -> None:
            load_optimizer()
            if scaler is not None and self._loss_scaler is not None:
                scaler.load_state_dict(self._loss_scaler)

        return load


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _device_of(parameter: Tensor) -> torch.device:
    """Where an optimizer sees it: that of its master."""
    handle, i = entry_with_master(parameter) or (None, -1)
    return parameter.device if handle is None else handle.engine.master_slice(i).device


def _placed(named: dict[str, Any], on_device: Sequence[bool], optimizer) -> dict[str, Any]:
    """``named``, read to the CPU, with what was on a device on that of the parameters here."""
    parameters = parameters_of(optimizer.param_groups)
    if not any(on_device) or not parameters:
        return named
    device, (leaves, structure) = _device_of(parameters[0]), tree_flatten(named)
    moves = zip(leaves, on_device, strict=True)
    return tree_unflatten([leaf.to(device) if moved else leaf for leaf, moved in moves], structure)


def _target(parameter: Tensor, item: TensorStorageMetadata, on_device: bool) -> Tensor:
    """This rank's part of a state, where it has one of each element; else all of it."""
    dtype, entry = item.properties.dtype, entry_with_master(parameter)
    if isinstance(parameter, DTensor) and item.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    if entry is None or parameter.dim() == 0 or item.size != parameter.shape:
        device = _device_of(parameter) if on_device else torch.device("cpu")
        return torch.empty(item.size, dtype=dtype, device=device)
    handle, i = entry
    local = torch.empty_like(handle.engine.master_slice(i), dtype=dtype)
    return handle.as_parameter(local, i, parameter)
