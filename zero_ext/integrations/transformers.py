"""``transformers.Trainer`` over sharded models."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import transformers
import transformers.trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from zero_ext import checkpoint
from zero_ext._warnings import warn
from zero_ext.deepspeed.casting import cast
from zero_ext.deepspeed.config import Config
from zero_ext.integrations import deepspeed_file, stock_files
from zero_ext.integrations.accelerate import Accelerator
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.model_state import gather_state_dict, groups_of

_CHECKPOINT = "zero_ext"


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """As transformers'. ``deepspeed`` is read by this package's Trainer, without DeepSpeed.

    "auto" in the file means the value of the argument here. The file's stage, offload, casts,
    clipping, optimizer and schedule hold, as with DeepSpeed.

    Raises:
        ValueError: the file and an argument differ, or a setting is not available here.
    """

    def __post_init__(self) -> None:
        # With it transformers would ask for DeepSpeed.
        self.deepspeed_file, self.deepspeed = self.deepspeed, None
        super().__post_init__()
        self.settings_for(None)

    def settings_for(self, num_training_steps: int | None) -> Config | None:
        """The settings of the DeepSpeed file; None without one."""
        if self.deepspeed_file is None:
            return None
        return deepspeed_file.from_hf(self.deepspeed_file, self, num_training_steps)


class ShardedTrainerMixin:
    """Makes a trainer shard its model: put it before ``transformers.Trainer`` or a subclass of it.

    ``class Sharded(ShardedTrainerMixin, SFTTrainer): pass``. A checkpoint folder holds the weights
    as ``from_pretrained`` reads them. For ``resume_from_checkpoint`` it also holds a checkpoint of
    ``zero_ext.checkpoint``, from which a run with any stage and number of ranks continues. A folder
    that transformers' own trainer has written is resumed as well. Its own trainer raises where it
    finds a folder of this one.

    Resuming unpickles nothing of the model, the optimizer or the schedule unasked. To allow classes
    in them, pass them to ``torch.serialization.add_safe_globals``.

    Args:
        args, kwargs: The trainer's.
        stage: As for ``zero_ext.shard``. None: ``ZERO_EXT_STAGE`` of the environment, or 2.
        sharding: Further arguments of ``zero_ext.shard``, such as ``mp_policy`` or ``units``.
    Raises:
        ValueError: the arguments ask for FSDP, DeepSpeed or another parallelism, too.
    """

    def __init__(
        self,
        *args: Any,
        stage: int | None = None,
        sharding: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self._stage, self._sharding = stage, sharding
        super().__init__(*args, **kwargs)
        settings = self._settings()
        if settings is not None:
            cast(self.model, settings)

    def _settings(self, num_training_steps: int | None = None) -> Config | None:
        read = getattr(self.args, "settings_for", None)
        return None if read is None else read(num_training_steps)

    def create_accelerator_and_postprocess(self) -> None:
        settings = self._settings()
        if settings is not None:
            if self._stage is not None:
                raise ValueError(
                    "zero_ext: 'zero_optimization.stage' of the DeepSpeed file and stage= both say "
                    "what is sharded. Leave stage out."
                )
            self._stage = settings.stage
            self._sharding = settings.sharding | (self._sharding or {})
            self.args.max_grad_norm = settings.max_grad_norm or 0.0
        ours = functools.partial(Accelerator, stage=self._stage, sharding=self._sharding)
        # transformers makes the accelerator only here, and has no argument for another class.
        with mock.patch.object(transformers.trainer, "Accelerator", ours):
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        settings = self._settings()
        if settings is None or settings.optimizer is None or self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = settings.optimizer.kind(trained, **settings.optimizer.arguments)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        settings = self._settings(num_training_steps)
        if settings is None or settings.scheduler is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = settings.scheduler.kind(optimizer, **settings.scheduler.arguments)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Called on all ranks, as ``save_model`` is, although rank 0 alone writes."""
        if state_dict is None:
            state_dict = gather_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(Path(output_dir) / _CHECKPOINT, self.model, self._sharded_optimizer())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
            stock_files.write_placeholder(Path(output_dir) / OPTIMIZER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        folder, optimizer = Path(checkpoint_folder), self._sharded_optimizer()
        ours = (folder / _CHECKPOINT).exists()
        if ours:
            checkpoint.load(folder / _CHECKPOINT, self.model, optimizer)
        with all_or_none(groups_of(self.model), f"resume_from_checkpoint='{folder}'"):
            state = None if ours else stock_files.read(folder / OPTIMIZER_NAME)
            schedule = stock_files.read(folder / SCHEDULER_NAME)
        if state is not None:
            optimizer.load_state_dict(state)
        if schedule is not None:
            self.lr_scheduler.load_state_dict(schedule)
        missing = [] if ours or state is not None else [f"optimizer state ({OPTIMIZER_NAME})"]
        missing += [] if schedule is not None else [f"schedule ({SCHEDULER_NAME})"]
        if missing:
            warn(
                f"zero_ext: '{folder}' has no {' and no '.join(missing)}: what is missing begins "
                "anew."
            )

    def _sharded_optimizer(self) -> Sharded:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, Sharded):
            raise ValueError(
                f"zero_ext: the trainer's optimizer is a {type(optimizer).__name__} that was not "
                "sharded with the model. Leave its preparation to the trainer."
            )
        return optimizer

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "zero_ext: hyperparameter_search() makes many models in one trainer. Search with a "
            "plain Trainer, or start a run for each."
        )


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """A ``transformers.Trainer`` that shards its model. See ``ShardedTrainerMixin``."""


class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` that shards its model. See ``ShardedTrainerMixin``."""
