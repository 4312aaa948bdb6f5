"""``shard``: a module becomes a sharded one, in place."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from zero_ext import _C, units
from zero_ext.groups import resolve
from zero_ext.handle import Handle, find
from zero_ext.offload import check_policy


def shard(
    module: nn.Module,
    stage: int = 2,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    bucket_mb: float = 25.0,
    reduction: str | None = None,
    accumulation_steps: int | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    sync_module_states: bool = True,
) -> nn.Module:
    """Shard gradients and optimizer state of ``module`` over the ranks, in place. Collective.

    Class, name, state_dict keys and the Parameter objects stay; the parameters become views of flat
    buffers. Each ``backward()`` reduces the gradients, averaged over the ranks, unless it runs in
    ``no_sync()``; afterwards ``p.grad`` shows this rank's part in fp32. Make the optimizer
    afterwards, from ``zero_ext.optim``.

    The module gains ``no_sync()``, ``stats()`` and ``set_gradient_divide_factor(factor)``, and its
    ``zero_grad`` drops local sums as well.

    Args:
        module: On the CPU; parameters in fp32, bf16 or fp16, also mixed.
        stage: 1 shards the optimizer's state, 2 the gradients too, 0 nothing.
        mesh: One dimension, the ranks to shard over. Default: all, or this one alone without a
            process group.
        mp_policy: As for FSDP2. ``param_dtype`` becomes the parameters' dtype (the fp32 values live
            on as masters), ``reduce_dtype`` is what gradients travel in (default: their own with
            ``exchange``, fp32 with ``collective``).
        offload_policy: As for FSDP2. On the CPU, where this version trains, masters, optimizer
            state and gradient sums are in host memory already: it is checked and changes nothing.
        bucket_mb: Size of a unit, MiB of gradients.
        reduction: ``"exchange"`` (default): all-to-all, then one exact fp32 sum in rank order, the
            same bits as one process; ``"collective"``: the backend's reduce-scatter.
        accumulation_steps: Every n-th backward is the boundary; the others are as in ``no_sync``.
        ignored_params: Parameters to leave alone.
        sync_module_states: Take rank 0's parameters and buffers on every rank.
    Returns:
        ``module``.
    Raises:
        ValueError, TypeError: models differ between ranks, a parameter cannot be sharded, an
            argument makes no sense. The module is unchanged then.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            "zero_ext: the module is wrapped in DistributedDataParallel, which reduces its "
            "gradients already. Shard the plain module instead (ddp.module, before wrapping)."
        )
    mp_policy = mp_policy or MixedPrecisionPolicy()
    offload_policy = check_policy(offload_policy)
    groups = resolve(None, mesh)
    ignored = {id(p) for p in ignored_params}
    named = [(name, p) for name, p in module.named_parameters() if id(p) not in ignored]
    handle = Handle(
        groups,
        named,
        stage=stage,
        bucket_mb=bucket_mb,
        reduction=reduction,
        reduce_dtype=mp_policy.reduce_dtype,
        param_dtype=mp_policy.param_dtype,
        accumulation_steps=accumulation_steps,
        sync_module_states=sync_module_states,
        used_several_times=units.used_several_times(module),
    )
    handle.offload_policy = offload_policy
    if sync_module_states:
        handle.broadcast([p for _, p in named if not p.requires_grad] + list(module.buffers()))
    _give_methods(module, handle, mp_policy)
    return module


class Place(NamedTuple):
    """Where the module keeps a sharded parameter."""

    name: str
    parameters: dict[str, nn.Parameter | None]  # of the submodule
    key: str
    parameter: nn.Parameter

    def check(self, rank: int) -> None:
        """Refuse another Parameter in its place, which nobody would reduce or step."""
        found = self.parameters.get(self.key)
        if found is self.parameter or found is None or not self.parameter.requires_grad:
            return
        raise RuntimeError(
            f"zero_ext [rank {rank}]: parameter '{self.name}' was replaced by another one "
            f"({found.dtype} on {found.device}) after it was sharded, by .to(device), "
            "load_state_dict(assign=True) or an assignment. Do that before sharding, or copy the "
            "values into the parameter."
        )


class ShardedMethods:
    """What ``module.no_sync`` and the hooks reach. A copy of the module is a plain module, so a
    copy of this has no engine."""

    def __init__(
        self,
        handle: Handle | None,
        mp_policy: MixedPrecisionPolicy | None,
        places: Sequence[Place] = (),
    ):
        self._handle = handle
        self._mp_policy = mp_policy
        self._places = places

    def __deepcopy__(self, memo) -> "ShardedMethods":
        memo[id(self)] = twin = ShardedMethods(None, self._mp_policy)
        return twin

    def __reduce__(self):
        return ShardedMethods, (None, None)

    @property
    def handle(self) -> Handle:
        if self._handle is None:
            raise RuntimeError(
                "zero_ext: this module is a copy of a sharded one, and a plain module itself. Call "
                "zero_ext.shard() on it first."
            )
        return self._handle

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards inside it accumulate locally, in fp32, and send nothing (stages 0 and 1).

        Stage 2 keeps its memory promise and reduces anyway, as ``stats()`` counts. The last
        backward before ``step`` must run outside.
        """
        engine = self.handle.engine
        engine.push_no_sync()
        try:
            yield
        finally:
            engine.pop_no_sync()

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return self.handle.stats()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of by the number of ranks."""
        if not factor > 0:
            raise ValueError(f"zero_ext: the divide factor must be positive, not {factor}.")
        self.handle.engine.set_divide_factor(factor)

    def zero_grad(self, module: nn.Module, set_to_none: bool = True) -> None:
        if self._handle is None:
            return nn.Module.zero_grad(module, set_to_none)
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        self._handle.engine.zero_grad(range(len(self._handle.parameters)), mode)
        for parameter in module.parameters():
            if parameter.grad is None or self._shards(parameter):
                continue
            parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def _shards(self, parameter: nn.Parameter) -> bool:
        entry = find(parameter)
        return entry is not None and entry[0] is self._handle

    def before_forward(self, module, args, kwargs):
        if self._handle is None:
            return args, kwargs
        for place in self._places:
            place.check(self._handle.groups.rank)
        self._handle.check_forward()
        self._handle.adopt_thawed()
        self._handle.engine.before_forward()
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after_forward(self, module, args, output):
        if self._handle is None or self._mp_policy.output_dtype is None:
            return output
        return _cast(output, self._mp_policy.output_dtype)


def _cast(values, dtype: torch.dtype):
    def cast(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(cast, values)


def _give_methods(module: nn.Module, handle: Handle, mp_policy: MixedPrecisionPolicy) -> None:
    places = [
        Place(f"{prefix}.{key}" if prefix else key, owner._parameters, key, parameter)
        for prefix, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None and (find(parameter) or (None,))[0] is handle
    ]
    methods = ShardedMethods(handle, mp_policy, places)
    module.no_sync = BoundMethod(methods, "no_sync")
    module.stats = BoundMethod(methods, "stats")
    module.set_gradient_divide_factor = BoundMethod(methods, "set_gradient_divide_factor")
    module.zero_grad = ZeroGrad(methods, module)
    module.register_forward_pre_hook(
        BoundMethod(methods, "before_forward"), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(BoundMethod(methods, "after_forward"))


class BoundMethod:
    """A method that can be copied and pickled with the module that carries it."""

    def __init__(self, methods: ShardedMethods, name: str):
        self._methods = methods
        self._name = name
        functools.update_wrapper(self, getattr(ShardedMethods, name))
        del self.__wrapped__

    def __call__(self, *args, **kwargs):
        return getattr(self._methods, self._name)(*args, **kwargs)


class ZeroGrad:
    """``module.zero_grad``; a copy of the module gets one for itself.

    Holds the module weakly: in a cycle, its buffers would wait for a garbage collection.
    """

    def __init__(self, methods: ShardedMethods, module: nn.Module):
        self._methods = methods
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo) -> "ZeroGrad":
        return ZeroGrad(copy.deepcopy(self._methods, memo), copy.deepcopy(self._module(), memo))

    def __reduce__(self):
        return ZeroGrad, (self._methods, self._module())

    def __call__(self, set_to_none: bool = True) -> None:
        self._methods.zero_grad(self._module(), set_to_none)
