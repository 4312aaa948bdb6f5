"""EngineCheckpoints: DeepSpeed's calls for checkpoints and weights."""

import os
from pathlib import Path
from typing import Any

import torch

from zero_ext import checkpoint
from zero_ext._warnings import warn
from zero_ext.checkpoint.saving import save_without
from zero_ext.deepspeed.engine_settings import EngineSettings
from zero_ext.ranks.agreement import all_or_none, check_same_on_all_ranks
from zero_ext.state.model_state import gather_state_dict, plain_name

_LATEST = "latest"  # a file with the tag of the last checkpoint


class EngineCheckpoints(EngineSettings):
    """A part of ``TrainingEngine``."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """``zero_ext.checkpoint.save`` into ``save_dir/tag``; ``save_dir/latest`` names it.

        Args:
            tag: Default: ``global_step`` and the number of global steps.
            client_state: Whatever else a restart needs. Rank 0's is saved.
            exclude_frozen_parameters: Save only parameters that are trained, and buffers. Load such
                a checkpoint with ``load_module_strict=False``.
        Returns:
            True. Raises as ``zero_ext.checkpoint.save``.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        if not str(save_dir):
            raise ValueError("zero_ext: save_checkpoint(''): name a folder.")
        folder = Path(save_dir)
        schedule = self.lr_scheduler
        with all_or_none(self._groups, f"save_checkpoint() to '{folder}'"):
            extra = {
                "client_state": dict(client_state or {}),
                "counts": (self.global_steps, self.global_samples, self.skipped_steps),
                "lr_scheduler": None if schedule is None else schedule.state_dict(),
            }
        frozen = self._frozen() if exclude_frozen_parameters else ()
        save_without(frozen, folder / tag, self.module, self.optimizer, extra=extra)
        with all_or_none(self._groups, f"save_checkpoint() to '{folder}'"):
            if save_latest and self._groups.rank == 0:
                written = folder / f".{_LATEST}.zero_ext"
                written.write_text(tag)
                written.replace(folder / _LATEST)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        allow_pickle: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what ``save_checkpoint`` has written with any stage and number of ranks. Collective.

        DeepSpeed's own checkpoints are loaded as ``zero_ext.checkpoint.from_deepspeed`` does.
        Gradients are dropped: the next micro-batch is the first one of an accumulation.

        Args:
            tag: Default: what ``load_dir/latest`` names. Without that file nothing is loaded, with
                a warning.
            load_module_only: Load neither the optimizer nor schedule and counts.
            custom_load_fn: Not available: write values with ``zero.GatheredParameters``.
            allow_pickle: Also load a ``client_state`` of more than tensors and plain containers.
                Unpickling it can run any code. Pass True only for files that you trust.
        Returns:
            The checkpoint's path and its ``client_state``; None and an empty dict if nothing was
            loaded. Raises as ``zero_ext.checkpoint.load``.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "zero_ext: load_checkpoint() has no custom_load_fn. Leave it out, and write values "
                "with zero.GatheredParameters()."
            )
        tag = self._tag_to_load(Path(load_dir) / _LATEST, tag)
        if tag is None:
            return None, {}
        path = Path(load_dir) / str(tag)
        with_states = load_optimizer_states and not load_module_only
        extra = checkpoint.load(
            path,
            self.module,
            self.optimizer if with_states else None,
            strict=load_module_strict,
            allow_pickle=allow_pickle,
        )
        self.zero_grad()
        if self.optimizer is not None:
            self._divides()  # the loss scale was loaded
        saved = extra.get("lr_scheduler")
        if not load_module_only:
            if "counts" in extra:
                self._count_on(*extra["counts"])
            if load_lr_scheduler_states and self.lr_scheduler is not None and saved is not None:
                self.lr_scheduler.load_state_dict(saved)
        return str(path), extra.get("client_state", {})

    def _tag_to_load(self, latest: Path, tag: str | int | None) -> str | int | None:
        """``tag``, or what the file ``latest`` names; None, with a warning, without both."""
        with all_or_none(self._groups, f"load_checkpoint() from '{latest.parent}'"):
            if tag is None and latest.exists():
                tag = latest.read_text().strip()
        check_same_on_all_ranks(
            self._groups,
            [f"checkpoint {tag}"],
            "what to load",
            remedy="Load from a folder that all ranks share.",
        )
        if tag is None:
            warn(f"zero_ext: no '{latest}': nothing was loaded.")
        return tag

    def _count_on(self, steps: int, samples: int, skipped: int) -> None:
        self.micro_steps = steps * self.settings.accumulation_steps
        self._counted_from = self.micro_steps
        self.global_steps, self.global_samples = steps, samples
        self._skipped_before += skipped - self.skipped_steps

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Rank 0 writes the whole ``state_dict()``, in the parameters' own dtypes. Collective."""
        file = Path(save_dir) / save_filename
        state = gather_state_dict(self.module)
        if exclude_frozen_parameters:
            state = self._without_frozen(state)
        with all_or_none(self._groups, f"save_16bit_model() to '{file}'"):
            if self._groups.rank == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)
        return True

    save_fp16_model = save_16bit_model  # its older name

    def module_state_dict(
        self, *arguments: Any, exclude_frozen_parameters: bool = False, **keywords: Any
    ) -> dict[str, Any]:
        """The module's ``state_dict()``, which has ShardTensors with stage 3."""
        state = self.module.state_dict(*arguments, **keywords)
        return self._without_frozen(state) if exclude_frozen_parameters else state

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, **_: Any
    ) -> None:
        """``load_state_dict`` of what is under ``"module"`` in ``checkpoint``. Collective."""
        self.module.load_state_dict(checkpoint.get("module", checkpoint), strict=strict)

    def _frozen(self) -> set[str]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {plain_name(name) for name, parameter in named if not parameter.requires_grad}

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        frozen = self._frozen()
        return {name: value for name, value in state.items() if plain_name(name) not in frozen}
