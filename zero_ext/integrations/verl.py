"""An engine of verl whose model and optimizer are sharded: ``actor.strategy=zero_ext``.

verl imports this module in each of its processes with ``VERL_USE_EXTERNAL_MODULES``, as in
``VERL_USE_EXTERNAL_MODULES=zero_ext.integrations.verl``. Forwards, losses, schedules and clipping
are those of verl's FSDP engine, and so are the settings under ``fsdp_config``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from zero_ext import checkpoint
from zero_ext.module.sharding import shard
from zero_ext.optim import adoption
from zero_ext.ranks import environment
from zero_ext.state.iteration import iter_full_params

_CHECKPOINT = "zero_ext"


@EngineRegistry.register("language_model", backend="zero_ext", device=["cuda", "cpu"])
class ShardedEngine(transformer_impl.FSDPEngineWithLMHead):
    """As verl's FSDP engine. ``ZERO_EXT_STAGE`` says what is sharded; 2 without it.

    ``model_dtype``, ``mixed_precision`` and ``fsdp_size`` of ``fsdp_config`` hold. A checkpoint has
    a folder ``zero_ext``, from which a run with any stage and number of ranks continues, and the
    model's configuration and tokenizer in ``huggingface``.

    Raises:
        ValueError: the settings ask for offload, LoRA, Ulysses, QAT or fp16.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        found = {
            "param_offload": self._is_offload_param,
            "optimizer_offload": self._is_offload_optimizer,
            "offload_policy": self.engine_config.offload_policy,
            "lora_rank": self._is_lora,
            "ulysses_sequence_parallel_size": self.use_ulysses_sp,
            "qat": self._qat_enabled,
            "mixed_precision.param_dtype=fp16": self._dtype("param_dtype", "bf16") == torch.float16,
        }
        asked = [name for name, there in found.items() if there]
        if asked:
            raise ValueError(
                f"zero_ext: verl asks for {', '.join(asked)}, which this engine does not have. "
                "Leave it out of the configuration, or train with actor.strategy=fsdp2."
            )
        self._stage = environment.stage(None)

    def _dtype(self, name: str, default: str) -> torch.dtype:
        settings = self.engine_config.mixed_precision or {}
        return PrecisionType.to_dtype(settings.get(name, default))

    # Building

    def _build_module(self) -> nn.Module:
        """Every rank reads the weights: FSDP would send those of rank 0 to the others."""
        on_host = mock.Mock(return_value=lambda: torch.device("cpu"))
        with mock.patch.object(transformer_impl, "get_init_weight_context_manager", on_host):
            return super()._build_module()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self._autocast_dtype = self._dtype("param_dtype", "bf16")
        policy = MixedPrecisionPolicy(
            param_dtype=self._autocast_dtype, reduce_dtype=self._dtype("reduce_dtype", "fp32")
        )
        module.to(get_device_id())
        return shard(module, self._stage, mesh=self.device_mesh, mp_policy=policy)

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return adoption.adopt(super()._build_optimizer(module))

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        if (model or optimizer or grad) and device != get_device_name():
            raise NotImplementedError(
                "zero_ext: this engine does not move to the host. Use zero_ext.offload_states()."
            )

    # Weights

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Whole parameters, and buffers of the state_dict. Collective: every rank iterates."""
        kind = self.model_config.hf_config.model_type
        return unfuse_moe_params(self._whole_values(), kind), None

    def _whole_values(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in iter_full_params(self.module):
            yield from convert_weight_keys({name: value}, self.module).items()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = {n: v for n, v in self.module.state_dict().items() if n not in parameters}
        yield from convert_weight_keys(buffers, self.module).items()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "zero_ext: verl's delta_sharded needs DTensors, which this engine does not have. Send "
            "zero_ext.iter_changed_params(engine.module), or choose another checkpoint engine."
        )

    # Checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        manager, folder = self.checkpoint_manager, Path(local_path)
        if dist.get_rank() == 0:
            manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        extra = {}
        if manager.should_save_extra:
            schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            extra = {"rng": _plain(manager.get_rng_state()), "lr_scheduler": schedule}
        optimizer = self.optimizer if manager.should_save_optimizer else None
        checkpoint.save(folder / _CHECKPOINT, self.module, optimizer, extra=extra)
        if manager.should_save_hf_model:
            checkpoint.export_safetensors(self.module, folder / "huggingface")
        if dist.get_rank() == 0:
            self.model_config.hf_config.save_pretrained(folder / "huggingface")
            if manager.processing_class is not None:
                manager.processing_class.save_pretrained(folder / "huggingface")
            manager.register_checkpoint(local_path, max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        if local_path is None:
            return
        manager = self.checkpoint_manager
        optimizer = self.optimizer if manager.should_load_optimizer else None
        extra = checkpoint.load(Path(local_path) / _CHECKPOINT, self.module, optimizer)
        if manager.should_load_extra:
            manager.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])


def _plain(rng: dict[str, Any]) -> dict[str, Any]:
    """Without arrays of numpy, which a load would have to unpickle."""
    kind, keys, *rest = rng["numpy"]
    return {**rng, "numpy": (kind, keys.tolist(), *rest)}
