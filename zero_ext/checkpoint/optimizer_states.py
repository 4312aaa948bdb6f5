"""Optimizers' states in a checkpoint: tensors by parameters' names, everything else pickled."""

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zero_ext.checkpoint.contents import Contents
from zero_ext.engine.registry import find
from zero_ext.optim.sharded_optimizer import ShardedOptimizer
from zero_ext.state.model_state import ModelState


def listed(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


def _names(optimizer: torch.optim.Optimizer, of_model: ModelState) -> list[list[str]]:
    """Of each group's parameters."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in of_model.names:
                raise ValueError(
                    f"zero_ext: parameter {i} of the optimizer's group {g}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's."
                )
    return [[of_model.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _key(name: str, state: str) -> str:
    return f"optimizer.state.{name}.{state}"


def states_of(
    optimizers: list[torch.optim.Optimizer], of_model: ModelState
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors by key, and of each optimizer everything else."""
    tensors: dict[str, Tensor] = {}
    others: list[dict[str, Any]] = []
    seen: set[str] = set()
    for optimizer in optimizers:
        own, other = _state_of(optimizer, of_model)
        twice = seen & other["states"].keys()
        if twice:
            raise ValueError(
                f"zero_ext: two of the optimizers have '{min(twice)}'. Save one of them, or give "
                "each parameter to one optimizer."
            )
        seen |= other["states"].keys()
        tensors |= own
        others.append(other)
    return tensors, others


def _state_of(
    optimizer: torch.optim.Optimizer, of_model: ModelState
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = _names(optimizer, of_model)
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    states: dict[str, list[str]] = {}  # which are tensors
    objects: dict[str, dict[str, Any]] = {}
    for group, group_names in zip(state_dict["param_groups"], names, strict=True):
        for number, name in zip(group["params"], group_names, strict=True):
            values = state_dict["state"].get(number, {})
            states[name] = [s for s, value in values.items() if isinstance(value, Tensor)]
            objects[name] = {s: value for s, value in values.items() if s not in states[name]}
            tensors |= {_key(name, s): values[s].detach() for s in states[name]}
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state_dict["param_groups"]
    ]
    scaler = getattr(optimizer, "loss_scaler", None)
    return tensors, {
        "names": names,
        "settings": settings,
        "states": states,
        "objects": objects,
        "loss_scaler": None if scaler is None else scaler.state_dict(),
    }


def saved_states(
    contents: Contents, optimizers: list[torch.optim.Optimizer], of_model: ModelState
) -> list[dict[str, Any]]:
    """What ``state_of`` has saved of each, by the names that parameters have here."""
    path, saved = contents.path, contents.optimizers
    if optimizers and not saved:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has no optimizer's state. Load the model alone."
        )
    if optimizers and len(saved) != len(optimizers):
        raise ValueError(
            f"zero_ext: checkpoint '{path}' has the states of {len(saved)} optimizers, and is "
            f"loaded into {len(optimizers)}. Pass as many, in the order of the call that saved "
            "them, or load the model alone."
        )
    return [
        _saved_state(path, theirs, optimizer, of_model)
        for theirs, optimizer in zip(saved, optimizers, strict=False)
    ]


def _saved_state(
    path: Path, saved: dict[str, Any], optimizer: torch.optim.Optimizer, of_model: ModelState
) -> dict[str, Any]:
    """If the groups have these parameters."""
    names = _names(optimizer, of_model)
    if len(saved["names"]) != len(names):
        raise ValueError(
            f"zero_ext: the optimizer has {len(names)} groups, and {len(saved['names'])} in "
            f"checkpoint '{path}'."
        )

    def here(name: str) -> str:  # a tied parameter's first name may be another one
        tensor = of_model.tensors.get(name)
        return name if tensor is None else of_model.names.get(id(tensor), name)

    for g, (ours, theirs) in enumerate(zip(names, saved["names"], strict=True)):
        for name in sorted(set(ours) ^ {here(name) for name in theirs}):
            where = "not in the checkpoint's" if name in ours else "in the checkpoint's alone"
            raise ValueError(
                f"zero_ext: the optimizer's group {g} has other parameters than in checkpoint "
                f"'{path}': '{name}' is {where}."
            )
    frozen = [name for name in saved["states"] if not _takes_state(optimizer, of_model, here(name))]
    if any(saved["states"][name] for name in frozen):
        first = ", ".join(f"'{here(name)}'" for name in frozen[:8])
        warnings.warn(
            f"zero_ext: the optimizer's states of parameters that are frozen now are passed over: "
            f"{first}.",
            stacklevel=8,
        )
    return {
        **saved,
        "names": [[here(name) for name in group] for group in saved["names"]],
        "objects": {here(name): values for name, values in saved["objects"].items()},
        "keys": {
            here(name): {} if name in frozen else {s: _key(name, s) for s in states}
            for name, states in saved["states"].items()
        },
        "frozen": {here(name) for name in frozen},
    }


def _takes_state(optimizer: torch.optim.Optimizer, of_model: ModelState, name: str) -> bool:
    """Optimizers of this package have none of frozen parameters."""
    place = find(of_model.tensors[name]) if name in of_model.tensors else None
    frozen = place is not None and place[0].engine.unit_of(place[1]) < 0
    return not (frozen and isinstance(optimizer, ShardedOptimizer))


def targets_of(
    saved: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    of_model: ModelState,
    contents: Contents,
) -> dict[str, Tensor]:
    targets = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = of_model.names[id(parameter)]
            for state, key in saved["keys"][name].items():
                if key not in contents.tensors:
                    raise ValueError(
                        f"zero_ext: checkpoint '{contents.path}' lacks the optimizer's state "
                        f"'{state}' of '{name}'."
                    )
                targets[key] = _target(parameter, contents.tensors[key])
    return targets


def _target(parameter: Tensor, item: TensorStorageMetadata) -> Tensor:
    """This rank's part of a state, where it has one of each element; else all of it."""
    place = find(parameter)
    dtype = item.properties.dtype
    if isinstance(parameter, DTensor) and item.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    counts = parameter.dim() == 0 or item.size != parameter.shape
    if place is None or place[0].engine.unit_of(place[1]) < 0 or counts:
        return torch.empty(item.size, dtype=dtype, device="cpu")
    handle, i = place
    local = torch.empty_like(handle.engine.master_slice(i), dtype=dtype)
    return handle.as_parameter(local, i, parameter)


def checked_load(
    saved: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    of_model: ModelState,
    values: dict[str, Tensor],
) -> Callable[[], None]:
    """Checks, as far as the optimizer can, what it will load, and returns what loads it."""
    state_dict = _loadable(saved, optimizer, of_model, values)
    if isinstance(optimizer, ShardedOptimizer):
        load_optimizer = optimizer._checked_load(state_dict)
    else:
        load_optimizer = functools.partial(optimizer.load_state_dict, state_dict)
    scaler = getattr(optimizer, "loss_scaler", None)

    def load() -> None:
        load_optimizer()
        if scaler is not None and saved["loss_scaler"] is not None:
            scaler.load_state_dict(saved["loss_scaler"])

    return load


def _loadable(
    saved: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    of_model: ModelState,
    values: dict[str, Tensor],
) -> dict[str, Any]:
    """As the optimizer's ``load_state_dict`` takes it."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for names, settings in zip(_names(optimizer, of_model), saved["settings"], strict=True):
        numbers = range(len(state), len(state) + len(names))
        for number, name in zip(numbers, names, strict=True):
            tensors = {s: values[key] for s, key in saved["keys"][name].items()}
            objects = {} if name in saved["frozen"] else saved["objects"][name]
            state[number] = tensors | objects
        groups.append({**settings, "params": list(numbers)})
    return {"state": {n: values for n, values in state.items() if values}, "param_groups": groups}
