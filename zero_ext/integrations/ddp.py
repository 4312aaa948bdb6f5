"""The stand-in for ``DistributedDataParallel`` in a script, see run.py."""

import collections
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext._torch import disable_compilation
from zero_ext.engine.registry import any_sharded
from zero_ext.integrations.one_rank_saves import share_states, with_whole_states
from zero_ext.module.sharding import shard
from zero_ext.optim.adoption import adopt
from zero_ext.optim.groups import parameters_of
from zero_ext.optim.sharded import Sharded
from zero_ext.ranks import environment
from zero_ext.tensor.shard_tensor import ShardTensor

# Arguments that decide how DistributedDataParallel works, and no result.
_WAYS = {
    "batched_grad_copy", "bucket_cap_mb_list", "check_reduction", "device_ids", "dim",
    "find_unused_parameters", "gradient_as_bucket_view", "init_sync", "output_device",
    "skip_all_reduce_unused_params", "static_graph",
}  # fmt: skip
# Optimizers that the script has made, in the order of every rank: those that a forward has to look
# at, and those that had no sharded parameter when it did.
_made: "list[weakref.ref[torch.optim.Optimizer]]" = []
_plain: "list[weakref.ref[torch.optim.Optimizer]]" = []


def remember(optimizer: torch.optim.Optimizer) -> None:
    """For the next forward, which adopts it."""
    _made.append(weakref.ref(optimizer))


@disable_compilation
def _adopt_made() -> None:
    while _made:
        optimizer = _made[0]()
        if optimizer is not None and not isinstance(optimizer, Sharded):
            if any_sharded(parameters_of(optimizer.param_groups)):
                _adopt_with_state(optimizer)
            else:
                _plain.append(_made[0])
        del _made[0]  # not where it could not be adopted


def _adopt_with_state(optimizer: torch.optim.Optimizer) -> None:
    """With what the script has loaded into it."""
    before, optimizer.state = optimizer.state, collections.defaultdict(dict)
    try:
        adopt(optimizer)
    except BaseException:
        optimizer.state = before
        raise
    if before:
        optimizer.state = before
    share_states(optimizer)


def checked_save(save: Callable) -> Callable:
    """``torch.save``, which makes slices whole, or raises before it opens the file."""

    @functools.wraps(save)
    def checked(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if _name_of_slice(obj, ()) is not None:
            obj = with_whole_states(obj)
        if (name := _name_of_slice(obj, ())) is not None:
            raise ValueError(
                f"zero_ext: torch.save() to {f!r} on this rank alone would lose what other ranks "
                f"hold of {name}. On every rank, take get_optimizer_state_dict(model, optimizer, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
                "torch.distributed.checkpoint.state_dict, and save its result on one. Nothing was "
                "written."
            )
        save(obj, f, *args, **kwargs)

    return checked


def _name_of_slice(obj: Any, keys: tuple) -> str | None:
    """The first slice in ``obj``, as a reader of it would write it: ['optimizer']['state'][0]."""
    if isinstance(obj, ShardTensor):
        return "".join(f"[{key!r}]" for key in keys) or "a tensor"
    if isinstance(obj, Mapping):
        items = obj.items()
    elif isinstance(obj, list | tuple):
        items = enumerate(obj)
    else:
        return None
    return next(filter(None, (_name_of_slice(v, (*keys, k)) for k, v in items)), None)


class ShardedDataParallel(nn.Module):
    """Shards ``module`` where DistributedDataParallel wraps it, with that class's methods.

    The optimizer of its parameters is adopted here, or by the first forward where it is made later.
    What was loaded into it stays. ``state_dict()`` has whole values, also on one rank alone where
    all ranks share a host.

    Raises:
        ValueError: an argument that changes results has no counterpart here.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        **ways: Any,
    ):
        nn.Module.__init__(self)
        others = {name for name, value in ways.items() if value} - _WAYS
        if others or len(args) > 3:
            raise ValueError(
                f"zero_ext: DistributedDataParallel({', '.join(sorted(others)) or 'more than 4'}) "
                "has no counterpart under zero_ext.integrations.run. Leave it out."
            )
        stage, mesh = environment.stage(None), None
        if process_group is not None:
            mesh = DeviceMesh.from_group(process_group, next(module.parameters()).device.type)
        self.module = shard(
            module,
            stage,
            mesh=mesh,
            broadcast_buffers=False not in (broadcast_buffers, forward_sync_buffers),
            **({} if bucket_cap_mb is None else {"bucket_mb": bucket_cap_mb}),
        )
        if stage == 3:
            inner = getattr(module, "_orig_mod", module)  # of torch.compile
            inner.__dict__["state_dict"] = functools.partial(_whole_state_dict, module, inner)
        self._no_sync: Any = None
        _made[:0] = _plain
        _plain.clear()
        _adopt_made()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        _adopt_made()
        return self.module(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, whose module is plain. That of the class would look for its process group."""
        return self.__dict__ | {"_no_sync": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        for parameter in self.module.parameters():
            if parameter.requires_grad and not any_sharded([parameter]):  # as after copy.copy()
                parameter.register_hook(_reject_gradient_of_copy)

    def no_sync(self) -> Any:
        return self.module.no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._no_sync is None

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if value == self.require_backward_grad_sync:
            return
        if value:
            self._no_sync, left = None, self._no_sync
            left.__exit__(None, None, None)
        else:
            self._no_sync = self.module.no_sync()
            self._no_sync.__enter__()

    def register_comm_hook(self, state: Any, hook: Callable) -> NoReturn:
        """Raises ValueError, always."""
        raise ValueError(
            "zero_ext: register_comm_hook() has no counterpart under zero_ext.integrations.run: "
            "gradients are exchanged in their own dtype, and added in fp32. Leave it out."
        )

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError, always."""
        raise ValueError(
            "zero_ext: join() is for DistributedDataParallel. Ranks may run different numbers of "
            "backwards: leave it out, and call optimizer.step() equally often on every rank."
        )


def _reject_gradient_of_copy(gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "zero_ext: a backward through a copy of a DistributedDataParallel, whose gradients nobody "
        "averages. Wrap copy.deepcopy(model.module) in DistributedDataParallel instead."
    )


def _whole_state_dict(
    sharded: nn.Module,
    module: nn.Module,
    *args: Any,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """Whole values, although this rank may have released them."""
    with sharded.summon_full_params(writeback=False):
        state = type(module).state_dict(module, *args, prefix=prefix, keep_vars=keep_vars)
        copies: dict[Any, Any] = {}  # those of tied parameters are one
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                place = value.data_ptr(), value.shape, value.stride()
                if place not in copies:
                    copies[place] = value.detach().clone()
                state[name] = copies[place]
    if destination is None:
        return state
    destination.update(state)
    return destination
