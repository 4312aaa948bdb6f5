"""ShardingOptions: the settings that users pass to ``shard()``, to an optimizer, to an estimate."""

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zero_ext import _C
from zero_ext.engine.checks import DTYPES, check_bool, check_count, check_number, check_positive
from zero_ext.ranks import environment
from zero_ext.ranks.comm_groups import comm_groups
from zero_ext.ranks.groups import Groups

# Other ranks' gradients of one unit are received in windows. All parts of a window take at most so
# much together, or as much as this rank's gradients of the unit.
window_bytes = 4 * 2**20


class StatesOffloadPolicy(CPUOffloadPolicy):
    """DeepSpeed's ``offload_optimizer`` alone: stage 3's parameters stay on the device."""


class ParametersOffloadPolicy(CPUOffloadPolicy):
    """DeepSpeed's ``offload_param`` alone: of stage 3, and frozen parameters only, because trained
    ones are gathered from their masters, which the update needs on the device."""


# Values of ``shard(reshard_after_forward=)``: one answer, or a function of a name and a module.
ReshardChoice = bool | Callable[[str, nn.Module], bool]
_POLICIES = (OffloadPolicy, CPUOffloadPolicy, StatesOffloadPolicy, ParametersOffloadPolicy)


def check_policy(policy: OffloadPolicy | None) -> OffloadPolicy:
    """``policy``, or the one that offloads nothing.

    Raises:
        TypeError: neither a ``CPUOffloadPolicy`` nor an ``OffloadPolicy`` of torch's FSDP2.
    """
    if policy is None:
        return OffloadPolicy()
    if type(policy) not in _POLICIES:
        raise TypeError(
            "zero_ext: offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy(pin_memory="
            f"True|False) or None, not {policy!r}."
        )
    return policy


# The options in which ranks may differ.
_OWN = ("prefetch_mb", "retained_bytes", "reshard_after_forward", "offload_policy")


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """See ``shard`` for what each of them means.

    Raises:
        ValueError, TypeError: a setting makes no sense.
    """

    stage: int
    bucket_mb: float = 25.0
    reduction: str | None = None
    reduce_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    accumulation_steps: int | None = None
    sync_module_states: bool = True
    broadcast_buffers: bool = False
    prefetch_mb: float | None = None
    retained_bytes: int | None = None
    reshard_after_forward: ReshardChoice = True
    host_copies: bool = False
    offload_policy: OffloadPolicy | None = None

    def __post_init__(self):
        stage, steps = self.stage, self.accumulation_steps
        steps = 1 if steps is None else steps
        if type(stage) is not int:
            raise TypeError(
                f"zero_ext: stage must be an int, such as stage=3, not the {type(stage).__name__} "
                f"{stage!r}."
            )
        if stage not in (0, 1, 2, 3):
            raise ValueError(
                f"zero_ext: there is no stage {stage!r}. Stage 1 shards the optimizer's state, "
                "stage 2 the gradients too, stage 3 the parameters as well (0 shards nothing)."
            )
        object.__setattr__(self, "offload_policy", check_policy(self.offload_policy))
        if self.reduction not in (None, "exchange", "collective"):
            raise ValueError(
                f"zero_ext: reduction must be 'exchange' or 'collective', not {self.reduction!r}."
            )
        check_positive("bucket_mb", self.bucket_mb, finite=True)
        reshards = self.reshard_after_forward
        if not isinstance(reshards, bool) and (
            isinstance(reshards, type) or not callable(reshards)
        ):
            raise TypeError(
                "zero_ext: reshard_after_forward must be True, False or a function of a module's "
                f"name and the module, not {reshards!r}. FSDP2's integers have no equivalent here."
            )
        for name in ("prefetch_mb", "retained_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"zero_ext: {name} must be at least 0 and finite, not {value!r}.")
        check_bool("sync_module_states", self.sync_module_states)
        check_bool("broadcast_buffers", self.broadcast_buffers)
        check_bool("host_copies", self.host_copies)
        for dtype in (self.param_dtype, self.reduce_dtype):
            if dtype is not None and dtype not in DTYPES:
                raise ValueError(f"zero_ext: {dtype} is not one of {DTYPES}.")
        check_count("accumulation_steps", steps)
        object.__setattr__(self, "accumulation_steps", steps)

    @property
    def bucket_bytes(self) -> float:
        return self.bucket_mb * 2**20

    @property
    def offloads(self) -> bool:
        """Masters, gradient sums and optimizer state live in host memory."""
        return type(self.offload_policy) in (CPUOffloadPolicy, StatesOffloadPolicy)

    @property
    def offloads_parameters(self) -> bool:
        """Shards of stage 3 live in host memory."""
        kinds = (CPUOffloadPolicy, ParametersOffloadPolicy)
        return self.stage == 3 and type(self.offload_policy) in kinds

    def describe(self, groups: Groups) -> list[str]:
        """A line for each setting that ranks must agree on."""
        agreed = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OWN}
        agreed |= {"offload": self.offloads, "offload_parameters": self.offloads_parameters}
        return [f"{name}={value}" for name, value in (*agreed.items(), ("shards", groups.shards))]

    def make_engine(self, groups: Groups, prefetch_bytes: int) -> _C.Engine:
        """An engine over ``groups`` that has no parameters yet. Collective."""
        options = _C.EngineOptions()
        options.stage = self.stage
        options.reduce_dtype = self.reduce_dtype
        options.accumulation_steps = self.accumulation_steps
        options.broadcast = self.sync_module_states
        options.limit_bytes = environment.limit_bytes()
        options.window_bytes = window_bytes
        options.global_ranks = list(groups.global_ranks)
        options.expert_places = [] if groups.experts is None else list(groups.experts.places)
        options.device = groups.device
        on_device = groups.device.type != "cpu"
        if self.host_copies and self.stage == 3 and on_device:
            raise ValueError(
                f"{groups.where}host_copies=True with parameters on {groups.device}. A device's"
                " backend sends each part once to each host by itself. Leave host_copies out."
            )
        options.offload = self.offloads and on_device
        options.offload_parameters = self.offloads_parameters and on_device
        options.host_copies = self.host_copies
        options.pin_memory = getattr(self.offload_policy, "pin_memory", True)
        options.gather.prefetch_bytes = prefetch_bytes
        options.gather.prefetch_from_local_peers = self.prefetch_mb is not None
        options.gather.retained_bytes = (
            -1 if self.retained_bytes is None else int(self.retained_bytes)
        )
        options.host = environment.host_of_this_rank()
        with comm_groups(groups) as comm:
            for group, name in comm.names.items():
                setattr(options, group, name)
            options.timeout_ms = comm.timeout // datetime.timedelta(milliseconds=1)
            options.reduction = getattr(_C.Reduction, self.reduction or comm.default_reduction)
            options.default_reduction = self.reduction is None
            exchanges = options.reduction == _C.Reduction.exchange
            if groups.experts is not None and not exchanges and not comm.on_device:
                raise ValueError(
                    f"{groups.where}expert_mesh with reduction='collective' through the host. Pass "
                    'reduction="exchange".'
                )
            return _C.Engine(options)
