"""Reads checkpoints of DeepSpeed 0.14 to 0.19, of stages 1 to 3 and any number of ranks.

Note [What is in a checkpoint of DeepSpeed]
A folder has one file of optimizer states per rank, and a file of the model: with stage 3 one per
rank. Masters and states are flat, one tensor per group of parameters (stage 3: per part of a
group). A parameter is a range of each rank's flat tensor:
- Stages 1 and 2 cut the flat group into equal parts. ``param_slice_mappings`` says where the
  elements of a parameter begin in this rank's part, and how many there are.
- Stage 3 cuts each parameter: rank r has elements r * ceil(n / ranks) and following ones. The
  parameters' parts lie one after the other, in the order of ``param_shapes``.
Files are mapped into memory, and each rank reads the ranges that it needs.
"""

import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from zero_ext.checkpoint import pickles
from zero_ext.checkpoint.contents import Contents

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_ANY_FILE = re.compile(r".*(_optim|_model)_states\.pt")
# Settings of a group that are the same in DeepSpeed's optimizers and in ours.
_SETTINGS = (
    "lr initial_lr betas eps weight_decay momentum dampening nesterov amsgrad maximize".split()
)
# The entries of the model's file beside the ``client_state``.
_OWN_ENTRIES = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params "
    "frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names "
    "skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions universal_checkpoint_info".split()
)


class _Named:
    """Stands for an object of DeepSpeed's: its arguments and attributes, without its code."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments


# The classes of DeepSpeed's that are in its files.
_CLASSES = [
    (_Named, f"deepspeed.{name}")
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
]


def _read(file: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_CLASSES):
            return torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"zero_ext: '{file}' holds {pickles.kind_of(error)}, and loading them could run any "
            "code. If you trust the file, name the classes to torch.serialization.add_safe_globals."
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f"zero_ext: '{file}' of {file.stat().st_size} bytes cannot be read ({error}). Load an "
            "earlier checkpoint."
        ) from error


def opened(path: Path) -> Contents | None:
    """The contents of a checkpoint; None if DeepSpeed has not written it.

    Raises:
        ValueError: files are missing, are those of tensor, pipeline or expert parallelism, or hold
            something else than DeepSpeed 0.14 to 0.19 writes.
    """
    if not path.is_dir() or not any(_ANY_FILE.fullmatch(each.name) for each in path.iterdir()):
        return None
    try:
        return _Folder(path).contents()
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"zero_ext: checkpoint '{path}' is none of DeepSpeed's stages 1 to 3 "
            f"({type(error).__name__}: {error}). Load one that DeepSpeed 0.14 to 0.19 has written."
        ) from error


class _Range(NamedTuple):
    """Where elements of a parameter lie in a rank's flat tensor of its group."""

    rank: int
    start: int
    numel: int


class _Value(NamedTuple):
    """A tensor, as those whose elements are its own, one after the other."""

    shape: torch.Size
    parts: list[Tensor]

    def described(self) -> TensorStorageMetadata:
        return TensorStorageMetadata(TensorProperties(self.parts[0].dtype), self.shape, [])

    def read_into(self, target: Tensor) -> None:
        """This rank's parts of a sharded tensor."""
        whole = torch.cat(self.parts)[: self.shape.numel()].view(self.shape)
        if not isinstance(target, DTensor):
            target.copy_(whole.view(target.shape))
            return
        for chunk in target.__create_chunk_list__():
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            index = MetadataIndex("", chunk.offsets)
            target.__get_tensor_shard__(index).copy_(whole[box])


class _Folder:
    """The files of one checkpoint, and what they hold. See ``Contents``."""

    def __init__(self, path: Path):
        self.path = path
        models, states = self._files()
        self._model = models[0]
        self._keys: dict[str, str] = {}
        self._values: dict[str, _Value] = {}
        self._objects: dict[str, Any] = {}
        self._optimizers: list[dict[str, Any]] = []
        if states:
            self._add_trained(states)
        self._add_others(models)

    def contents(self) -> Contents:
        steps, samples, skipped = (
            self._model.get(name, 0) for name in ("global_steps", "global_samples", "skipped_steps")
        )
        return Contents(
            self.path,
            f"of DeepSpeed {self._model.get('ds_version')}, {steps} steps",
            {key: value.described() for key, value in self._values.items()},
            self._keys,
            self._objects,
            self._optimizers,
            {
                "client_state": {k: v for k, v in self._model.items() if k not in _OWN_ENTRIES},
                "counts": (steps, samples, skipped),
                "lr_scheduler": self._model.get("lr_scheduler"),
            },
            self._read,
        )

    def _read(self, targets: dict[str, Tensor], _: bool = False) -> None:
        for key, target in targets.items():
            self._values[key].read_into(target)

    def _files(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The models' and the optimizers' files, by rank."""
        found: dict[re.Pattern, dict[int, Path]] = {_MODEL_FILE: {}, _OPTIMIZER_FILE: {}}
        for file in self.path.iterdir():
            for pattern, files in found.items():
                if match := pattern.fullmatch(file.name):
                    files[int(match[1] or 0)] = file
                    break
            else:
                if _ANY_FILE.fullmatch(file.name):
                    raise ValueError(
                        f"zero_ext: '{file}' is of DeepSpeed's tensor, pipeline or expert "
                        "parallelism, which are not read. Make a universal checkpoint, and load "
                        "its parameters."
                    )
        models, states = (
            [_read(file) for _, file in sorted(files.items())] for files in found.values()
        )
        states = [each["optimizer_state_dict"] for each in states]
        counts = [each["partition_count"] for each in states]
        ranks = max((max(c) if isinstance(c, list) else c for c in counts), default=0)
        if not models or len(states) != ranks:
            raise ValueError(
                f"zero_ext: checkpoint '{self.path}' of DeepSpeed has {len(models)} files of the "
                f"model and {len(states)} of the optimizer, of {ranks} ranks. Copy the missing "
                "ones there."
            )
        return models, states

    # Parameters that were trained

    def _add_trained(self, states: list[dict[str, Any]]) -> None:
        base = [
            each.get("base_optimizer_state", each.get("optimizer_state_dict")) for each in states
        ]
        flats = [
            each.get("single_partition_of_fp32_groups", each.get("fp32_flat_groups"))
            for each in states
        ]
        if isinstance(base[0], list):  # elastic_checkpoint: the groups' settings are not saved
            base = [{"state": dict(enumerate(each)), "param_groups": None} for each in base]
        groups = base[0]["param_groups"] or [{"params": [k]} for k in range(len(flats[0]))]
        group_of = {flat: g for g, group in enumerate(groups) for flat in group["params"]}
        names: list[list[str]] = [[] for _ in groups]
        tensors: dict[str, list[str]] = {}
        others: dict[str, dict[str, Any]] = {}
        ranges = self._ranges(states)
        for flat, shapes in enumerate(self._model["param_shapes"]):
            group = groups[group_of[flat]]
            of_flat = base[0]["state"].get(flat, {})
            flat_states = [s for s, v in of_flat.items() if _is_flat(v)]
            others_of_flat = {s: _plain(v) for s, v in of_flat.items() if not _is_flat(v)}
            if flat_states and "step" in group:
                others_of_flat.setdefault("step", group["step"])
            for name, shape in shapes.items():
                names[group_of[flat]].append(name)
                self._add(f"model.{name}", shape, ranges[name], [each[flat] for each in flats])
                self._keys[name] = f"model.{name}"
                for state in flat_states:
                    by_rank = [each["state"][flat][state] for each in base]
                    self._add(f"optimizer.state.{name}.{state}", shape, ranges[name], by_rank)
                tensors[name], others[name] = flat_states, dict(others_of_flat)
        self._optimizers = [
            {
                "names": names,
                "names_trained_only": True,
                "settings": [{k: g[k] for k in _SETTINGS if k in g} for g in groups],
                "states": tensors,
                "objects": others,
                "loss_scaler": _loss_scaler(states[0].get("loss_scaler")),
            }
        ]

    def _ranges(self, states: list[dict[str, Any]]) -> dict[str, list[_Range]]:
        found: dict[str, list[_Range]] = {}
        for rank, each in enumerate(states):
            for mapping in each.get("param_slice_mappings", ()):
                for name, place in mapping.items():
                    place = _Range(rank, place.start, place.numel)
                    found.setdefault(name, []).append(place)
        for shapes in () if found else self._model["param_shapes"]:
            start = 0
            for name, shape in shapes.items():
                part = -(-shape.numel() // len(states))
                found[name] = [_Range(rank, start, part) for rank in range(len(states))]
                start += part
        return found

    def _add(
        self, key: str, shape: torch.Size, ranges: Iterable[_Range], flats: list[Tensor]
    ) -> None:
        parts = [flats[rank].narrow(0, start, numel) for rank, start, numel in ranges]
        self._values[key] = _Value(torch.Size(shape), parts)
        if sum(part.numel() for part in parts) < self._values[key].shape.numel():
            raise ValueError(
                f"zero_ext: checkpoint '{self.path}' lacks elements of '{key}', of shape "
                f"{tuple(shape)}. Load an earlier checkpoint."
            )

    # Parameters that were frozen, buffers and everything else

    def _add_others(self, models: list[dict[str, Any]]) -> None:
        shared = dict(self._model.get("shared_params") or {})
        pieces = [each.get("frozen_param_fragments") or {} for each in models]
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            key = self._keys[name] = f"model.{name}"
            pieces_of_it = [each[name].flatten() for each in pieces]
            self._values[key] = _Value(torch.Size(shape), pieces_of_it)
        for name, value in (self._model.get("module") or {}).items():
            if name in self._keys or name in shared:
                continue
            self._keys[name] = f"model.{name}"
            if isinstance(value, Tensor):
                self._values[f"model.{name}"] = _Value(value.shape, [value.flatten()])
            else:
                self._objects[name] = value
        for name, first in shared.items():
            if first in self._keys:
                self._keys[name] = self._keys[first]


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _loss_scaler(saved: Any) -> dict[str, Any] | None:
    """The state of a ``LossScaler`` that goes on from a dynamic loss scale of DeepSpeed's."""
    if not getattr(saved, "dynamic", False):
        return None
    window = saved.scale_window
    good = saved.cur_iter - saved.last_overflow_iter - 1
    return {
        "mode": "dynamic",
        "scale": float(saved.cur_scale),
        "growth_factor": float(saved.scale_factor),
        "backoff_factor": 1 / saved.scale_factor,
        "growth_interval": window,
        "hysteresis": saved.delayed_shift,
        "min_scale": float(saved.min_scale),
        # DeepSpeed's scale grows in the first step after a whole window.
        "good_steps": (good - 1) % window if good > 0 else 0,
        "overflows_left": saved.cur_hysteresis,
    }
