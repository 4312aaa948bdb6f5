"""EngineSettings: what DeepSpeed's engine tells of itself, and the few settings that may change."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.schedules import set_rate
from zero_ext.engine.offload import offload_states, reload_states
from zero_ext.optim.sharded import Sharded
from zero_ext.state.model_state import groups_of

# DeepSpeed's names of states, in terms of ``zero_ext.offload_states``.
_STATES = {
    "optim_states": "optimizer_state",
    "hp_params": "master",
    "lp_params": "full",
    "lp_grads": "grad",
    "contiguous_grad_buffer": "grad",
}


def _setting(read: Callable[[Config], Any]) -> Callable[["EngineSettings"], Any]:
    """A method that returns a setting."""
    return lambda engine: read(engine.settings)


class EngineSettings(nn.Module):
    """A part of ``TrainingEngine``.

    Attributes:
        settings: The configuration as it is now.
    """

    def __init__(self, module: nn.Module, settings: Config):
        super().__init__()
        self.module = module
        self.settings = settings
        self.optimizer: Sharded | None = None
        self.lr_scheduler: Any = None
        self.micro_steps = self.global_steps = self.global_samples = 0
        self._groups = groups_of(module)
        self._step_applied = False
        self._counted_from = 0  # ``micro_steps`` when the micro-batches per step were set
        self._skipped_before = 0  # steps, as a loaded checkpoint has counted them

    def _needs_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"zero_ext: {call} needs an optimizer. Pass initialize() one, or its config."
            )

    def _counted(self) -> int:
        """Micro-batches since the number of those per step was set."""
        return self.micro_steps - self._counted_from

    def _divides(self, by: float | None = None) -> None:
        """Divide the gradients of backwards by ``by``, from now on. Default: the loss scale times
        the accumulation steps. The sums of this step keep their meaning."""
        self.optimizer.zero_core.handle.engine.set_loss_scale(self._divisor() if by is None else by)

    def _divisor(self) -> float | None:
        """None: no parameter of the engine is trained."""
        # One that has let go of the model has none.
        core = getattr(self.optimizer, "zero_core", None)
        if core is None or core.handle.engine is None:
            return None
        return self.loss_scale() * self.settings.accumulation_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for NaN or Inf."""
        before = self._skipped_before
        return before if self.optimizer is None else before + self.optimizer.skipped_steps

    device = property(lambda self: self._groups.device)
    global_rank = property(lambda self: self._groups.global_rank)
    world_size = dp_world_size = property(lambda self: self._groups.world)
    data_parallel_group = property(lambda self: self._groups.parent)
    local_rank = property(lambda self: int(os.environ.get("LOCAL_RANK", 0)))
    basic_optimizer = property(lambda self: self.optimizer)

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the parameters."""
        return self._step_applied

    def get_lr(self) -> list[float]:
        self._needs_optimizer("get_lr()")
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm before clipping, of the last step that was made; None before the first one.

        Always None where the norm is not measured: with stage 0, or with ``compute_grad_norm``
        false, unless ``gradient_clipping`` is set.
        """
        norm = None if self.optimizer is None else self.optimizer.grad_norm
        return None if norm is None else norm.item()

    def loss_scale(self) -> float:
        scaler = None if self.optimizer is None else self.optimizer.loss_scaler
        return 1.0 if scaler is None else scaler.get_scale()

    train_batch_size = _setting(lambda settings: settings.train_batch_size)
    train_micro_batch_size_per_gpu = _setting(lambda settings: settings.micro_batch_size)
    gradient_accumulation_steps = _setting(lambda settings: settings.accumulation_steps)
    managed_gradient_accumulation = _setting(lambda settings: settings.managed_accumulation)
    torch_autocast_enabled = _setting(lambda settings: settings.autocast is not None)
    torch_autocast_dtype = _setting(lambda settings: settings.autocast)
    gradient_clipping = _setting(lambda settings: settings.max_grad_norm or 0.0)
    zero_optimization = _setting(lambda settings: settings.stage > 0)
    zero_optimization_stage = _setting(lambda settings: settings.stage)
    fp16_enabled = _setting(lambda settings: settings.dtype == torch.float16)
    bfloat16_enabled = _setting(lambda settings: settings.dtype == torch.bfloat16)
    steps_per_print = _setting(lambda settings: settings.steps_per_print)
    dynamic_loss_scale = _setting(lambda now: bool(now.scaler) and now.scaler["mode"] == "dynamic")
    cur_scale = property(lambda self: self.loss_scale())

    @property
    def config(self) -> dict[str, Any]:
        """The settings in this library's terms, as a dict."""
        return asdict(self.settings)

    def get_mom(self) -> list[Any]:
        """``momentum`` or ``betas`` of each group, 0.0 where it has neither."""
        self._needs_optimizer("get_mom()")
        groups = self.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def set_lr(self, lr: float) -> None:
        """Set the rate of every group. A schedule sets its own after the next step."""
        self._needs_optimizer("set_lr()")
        for group in self.optimizer.param_groups:
            set_rate(group, lr)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, per micro-batch and rank, and micro-batches per step."""
        now = self.settings
        return now.train_batch_size, now.micro_batch_size, now.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by changing the number of micro-batches, on every rank.

        Raises:
            ValueError: it is no multiple of the micro-batches of all ranks.
            RuntimeError: a micro-batch of this step has been run already.
        """
        samples = self.settings.micro_batch_size * self.world_size
        if train_batch_size < samples or train_batch_size % samples != 0:
            raise ValueError(
                f"zero_ext: set_train_batch_size({train_batch_size}): give a multiple of the "
                f"{samples} samples of one micro-batch of all ranks."
            )
        in_one = self._counted() % self.settings.accumulation_steps != 0
        if in_one and self.settings.managed_accumulation:
            raise RuntimeError(
                f"{self._groups.where}set_train_batch_size() in the middle of an accumulation. "
                "Call it after the step() that ends one."
            )
        self.settings = replace(
            self.settings,
            train_batch_size=train_batch_size,
            accumulation_steps=train_batch_size // samples,
        )
        self._counted_from = self.micro_steps
        if self.optimizer is not None:
            self._divides()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch, which the caller makes, and so those per step."""
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(
                f"zero_ext: set_train_micro_batch_size({micro_batch_size!r}): give a count."
            )
        samples = micro_batch_size * self.settings.accumulation_steps * self.world_size
        self.settings = replace(
            self.settings, train_batch_size=samples, micro_batch_size=micro_batch_size
        )

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, **_: Any
    ) -> None:
        """``zero_ext.offload_states``, with DeepSpeed's names of states or this library's."""
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f"zero_ext: offload_states(device={device!r}): choose 'cpu'.")
        names = None
        if include is not None:
            given = [str(getattr(each, "value", each)) for each in include]
            names = {_STATES.get(name, name) for name in given}
        offload_states(self.module, names)

    def reload_states(self, non_blocking: bool = False) -> None:
        """``zero_ext.reload_states``."""
        reload_states(self.module)

    def empty_partition_cache(self) -> None:
        """Release parameters that are gathered ahead or were kept gathered. Collective."""
        if self.settings.stage == 3:
            self.module.unshard()
            self.module.reshard()
