"""``shard``: a module becomes a sharded one, in place."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from zero_ext import _C
from zero_ext.engine.checks import check_buffers, stays_whole
from zero_ext.engine.handle import Handle
from zero_ext.engine.meta import MetaModules
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.registry import find
from zero_ext.engine.units import Choice, cut_by_module, used_several_times
from zero_ext.ranks.groups import Groups, resolve
from zero_ext.tensor.shard_tensor import ShardTensor

# What comes back has the class of what was given, for type checkers too.
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def shard(
    module: AnyModule,
    stage: int = 2,
    *,
    mesh: DeviceMesh | None = None,
    units: Choice = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    bucket_mb: float = 25.0,
    reduction: str | None = None,
    accumulation_steps: int | None = None,
    reshard_after_forward: bool = True,
    retained_bytes: int | None = None,
    prefetch_mb: float | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    sync_module_states: bool = True,
) -> AnyModule:
    """Shard parameters, gradients and optimizer state of ``module`` over the ranks, in place.
    Collective.

    Class, name, state_dict keys and the Parameter objects stay; the parameters become views of flat
    buffers. Each ``backward()`` reduces the gradients, averaged over the ranks, unless it runs in
    ``no_sync()``; afterwards ``p.grad`` shows this rank's part in fp32. Make the optimizer
    afterwards, from ``zero_ext.optim``.

    With stage 3 a unit's parameters are in memory while a forward or a backward is inside one of
    its modules. Elsewhere they keep shape and dtype, but reading or writing them raises an error
    that names the unit; ``summon_full_params()`` and ``unshard()`` bring them in. ``state_dict()``
    holds ShardTensors then, ``load_state_dict()`` is collective. Ranks may enter
    different units, as branches of a forward do; a forward by one rank alone ends in a timeout.

    The module gains ``no_sync()``, ``stats()``, ``set_gradient_divide_factor(factor)``,
    ``unshard()``, ``reshard()`` and ``summon_full_params()``, and its ``zero_grad`` drops local
    sums as well.

    Args:
        module: On one device; parameters in fp32, bf16 or fp16, also mixed. Frozen ones of any
            other dtype (quantised weights) stay whole on every rank. With stage 3 parameters and
            buffers may be on the meta device: each unit is materialised, cut and released in turn,
            and the Parameter objects are new ones.
        stage: 1 shards the optimizer's state, 2 the gradients too, 3 the parameters as well, 0
            nothing.
        units: Stage 3: whose parameters are gathered together. Module classes, or a function of a
            module's name and the module. Default: the children of the outermost ModuleLists and
            Sequentials, small neighbours merged up to ``bucket_mb``, and the models in a ModuleList
            or ModuleDict that is sharded itself. Parameters in none of them, or shared by several,
            are gathered while the root's forward and backward run.
        mesh: One dimension, the ranks to shard over. Default: all, or this one alone without a
            process group. Two dimensions, as for FSDP2, for hybrid sharding: each row is a replica,
            whose ranks hold one copy between them, and gradients are those of all ranks.
        mp_policy: As for FSDP2. ``param_dtype`` becomes the parameters' dtype (the fp32 values live
            on as masters), ``reduce_dtype`` is what gradients travel in (default: their own with
            ``exchange``, fp32 with ``collective``).
        offload_policy: As for FSDP2: masters, optimizer state and gradient sums live in (pinned)
            host memory, where the update runs on the CPU; every backward reduces, also inside
            ``no_sync``. Changes nothing for a model on the CPU.
        bucket_mb: Size of a unit, MiB of gradients (stage 3: up to which small ones are merged).
        reduction: ``"exchange"``: all-to-all, then one exact fp32 sum in rank order, the same bits
            as one process; ``"collective"``: the backend's reduce-scatter. Default: the first, with
            NCCL the second.
        accumulation_steps: Every n-th backward is the boundary; the others are as in ``no_sync``.
        reshard_after_forward: Stage 3: release units between forward and backward.
        retained_bytes: Stage 3: how much a backward with ``retain_graph`` may leave gathered for
            the next one; the rest is gathered again. A double backward (``create_graph``) that
            reads a unit beyond it may be refused by name. Default: no limit.
        prefetch_mb: Stage 3: MiB gathered ahead of their use, along the order of the last pass;
            0: none. Default: ``bucket_mb``, or one and a half of the largest unit if that is more;
            none where all ranks read each other's memory, with which nothing would overlap.
        param_init_fn: Initialises the parameters and buffers of one module that were on the meta
            device, without its children. Default: the module's ``reset_parameters``.
        ignored_params: Parameters to leave alone.
        sync_module_states: Take rank 0's parameters and buffers on every rank.
    Returns:
        ``module``.
    Raises:
        ValueError, TypeError: models differ between ranks, a parameter cannot be sharded, an
            argument makes no sense. The module is unchanged then.
        torch.OutOfMemoryError: the module is a plain one with its values, and can be sharded later.
            With stage 3 on several ranks the parameters of finished units are lost.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            "zero_ext: the module is wrapped in DistributedDataParallel, which reduces its "
            "gradients already. Shard the plain module instead (ddp.module, before wrapping)."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"zero_ext: shard() takes a module, not a {type(module).__name__}.")
    mp_policy = mp_policy or MixedPrecisionPolicy()
    options = ShardingOptions(
        stage=stage,
        bucket_mb=bucket_mb,
        reduction=reduction,
        reduce_dtype=mp_policy.reduce_dtype,
        param_dtype=mp_policy.param_dtype,
        accumulation_steps=accumulation_steps,
        sync_module_states=sync_module_states,
        prefetch_mb=prefetch_mb,
        retained_bytes=retained_bytes,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
    )
    groups = resolve(None, mesh, module.parameters())
    ignored = {id(p) for p in ignored_params}
    named = [(name, p) for name, p in module.named_parameters() if id(p) not in ignored]
    whole = [(name, p) for name, p in named if stays_whole(p)]
    named = [(name, p) for name, p in named if not stays_whole(p)]
    ignored |= {id(p) for _, p in whole}
    if not isinstance(module, FSDPModule):  # refused for its parameters
        _refuse_taken_names(module)
    buffers = list(module.named_buffers()) if sync_module_states else []
    check_buffers(groups, [(name, b) for name, b in buffers if not b.is_meta])
    blocks = None
    if stage == 3:
        _refuse_writing_forwards(module, groups, ignored)
        parameters = [p for _, p in named]
        blocks = cut_by_module(module, parameters, units, options.bucket_bytes, options.param_dtype)
    meta = MetaModules(module, ignored, param_init_fn, groups.device) if stage == 3 else None
    handle = Handle(
        groups,
        named,
        options,
        whole=whole,
        buffers=buffers,
        blocks=blocks,
        used_several_times=used_several_times(module),
        meta=meta,
    )
    try:
        if meta is not None:
            meta.finish()
        if sync_module_states:
            frozen = [p for _, p in named if not p.requires_grad] if blocks is None else []
            handle.broadcast([*frozen, *(p for _, p in whole), *module.buffers()])
    except BaseException:
        handle.dissolve()
        raise
    handle.watch_modules()
    _give_methods(module, handle, mp_policy)
    return module


def _refuse_taken_names(module: nn.Module) -> None:
    for name in _METHODS:
        own = getattr(module, name, None)
        if own is not None and not isinstance(own, BoundMethod):
            raise ValueError(
                f"zero_ext: the {type(module).__name__} has a '{name}' of its own, which is what a "
                "sharded module's method is called. Rename it."
            )


def _refuse_writing_forwards(module: nn.Module, groups: Groups, ignored: set[int]) -> None:
    """Other ranks gather a row while it is being normalised, and would have half of it."""
    for name, child in module.named_modules() if groups.world > 1 else ():
        embeds = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
        if embeds and id(child.weight) not in ignored:
            raise ValueError(
                f"{groups.where}'{name}' is a {type(child).__name__} with "
                f"max_norm={child.max_norm}, whose forward writes to its weight while other ranks "
                "may be gathering it. Shard the module with stage 2, or leave the weight out "
                "(ignored_params)."
            )


class Place(NamedTuple):
    """Where the module keeps a sharded parameter."""

    name: str
    parameters: dict[str, nn.Parameter | None]  # of the submodule
    key: str
    parameter: nn.Parameter

    def refuse_another(self, found: torch.Tensor | None, groups: Groups) -> None:
        """Raise if another Parameter was found in its place, which nobody would reduce or step."""
        # functional_call() puts plain tensors there, whose gradients are nobody's.
        trains = isinstance(found, nn.Parameter) and found.requires_grad
        if not trains or not torch.is_grad_enabled() or not self.parameter.requires_grad:
            return
        raise RuntimeError(
            f"{groups.where}parameter '{self.name}' was replaced by another one "
            f"({found.dtype} on {found.device}) after it was sharded, by .to(device), "
            "load_state_dict(assign=True) or an assignment. Do that before sharding, or copy the "
            "values into the parameter; functional_call() takes plain tensors."
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
        self._forgets = False  # inside summon_full_params(writeback=False)
        self._loading: nn.Module | None = None  # whose load_state_dict() runs
        self._held_before_load = False

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

    @property
    def forgets_writes(self) -> bool:
        """Inside ``summon_full_params(writeback=False)``, with stage 3."""
        return self._forgets and self._handle is not None and self._handle.engine.stage == 3

    def unshard(self) -> None:
        """Gather all parameters and keep them, until ``reshard()`` or the next step. Collective
        with stage 3, nothing to do otherwise."""
        self.handle.engine.unshard()

    def reshard(self) -> None:
        """Take ``unshard()`` back. What was written to this rank's parts stays. Collective."""
        self._release(keep_writes=True)

    def _release(self, keep_writes: bool) -> None:
        engine = self.handle.engine
        if keep_writes:  # into this rank's shards, which others may be gathering still
            engine.wait_for_shards()
        engine.reshard(keep_writes=keep_writes)
        if keep_writes or not engine.serves_one_alone:
            engine.wait_for_shards()

    @contextlib.contextmanager
    def summon_full_params(self, writeback: bool = True):
        """All parameters whole and readable inside the context, on every rank. Collective, but for
        ``writeback=False`` where ``stats()["neighbors"]`` counts all other ranks.

        Inside another one, or after ``unshard()``, the parameters stay when it ends.

        Args:
            writeback: With stage 3: keep what was written to the parameters, which must be the same
                on every rank. Otherwise it is forgotten, also what inner contexts would keep; with
                the other stages a write always stays.
        """
        engine = self.handle.engine
        held = engine.held_by_user
        if held and (writeback or self._forgets):
            yield
            return
        if held:  # what was written until now is not for this context to forget
            self.reshard()
        engine.unshard()
        before, self._forgets = self._forgets, not writeback
        try:
            with self._saved_alone(writeback):
                yield
        finally:
            self._forgets = before
            self._release(keep_writes=writeback)
            if held:
                engine.unshard()

    @contextlib.contextmanager
    def _saved_alone(self, writeback: bool):
        """What is never released at one rank cannot be gathered again."""
        engine = self.handle.engine
        if writeback or engine.stage != 3:
            yield
            return
        saved = [
            (place.parameter, place.parameter.detach().clone())
            for place in self._places
            if not engine.comes_and_goes(find(place.parameter)[1])
        ]
        try:
            yield
        finally:
            for parameter, value in saved:
                parameter.data.copy_(value)  # unseen by autograd: nothing has changed

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of by the number of ranks."""
        if not factor > 0:
            raise ValueError(f"zero_ext: the divide factor must be positive, not {factor}.")
        self.handle.engine.set_divide_factor(factor)

    def shards_in_state_dict(self, module: nn.Module, state_dict, prefix: str, metadata) -> None:
        """Released parameters cannot be read: the state has ShardTensors in their places.

        Names are those of now: layers may have been moved since the module was sharded.
        """
        if self._handle is None or not self._handle.engine.releases:
            return
        gathered = set(self._handle.engine.gathered_units())
        for owner_name, owner in module.named_modules(remove_duplicate=False):
            for name, parameter in owner._parameters.items():
                if parameter is None or not self.shards(parameter):
                    continue
                key = f"{prefix}{owner_name}.{name}" if owner_name else prefix + name
                value = state_dict.get(key)
                if value is None or value is parameter or isinstance(value, ShardTensor):
                    continue  # left out; keep_vars; done by a submodule's hook
                _, i = find(parameter)
                if self._handle.engine.unit_name_of(i) not in gathered:
                    state_dict[key] = self._handle.parameter_shard(i)

    def before_load(self, module: nn.Module, state_dict, prefix: str, *rest) -> None:
        if self._handle is None or not self._handle.engine.releases:
            return
        if self._loading not in (None, module):  # which has prepared for those inside it
            return
        self._loading = module
        self._held_before_load = self._handle.engine.held_by_user
        self._handle.engine.unshard()
        for key, value in state_dict.items():
            if key.startswith(prefix) and isinstance(value, ShardTensor):
                state_dict[key] = value.full_tensor()

    def after_load(self, module: nn.Module, incompatible_keys) -> None:
        if self._loading is not module:
            return
        self._loading = None
        if not self._held_before_load:
            self.reshard()

    def zero_grad(self, module: nn.Module, set_to_none: bool = True) -> None:
        if self._handle is None:
            return nn.Module.zero_grad(module, set_to_none)
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        self._handle.engine.zero_grad(range(len(self._handle.parameters)), mode)
        for parameter in module.parameters():
            if parameter.grad is None or self.shards(parameter):
                continue
            parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def shards(self, parameter: nn.Parameter) -> bool:
        entry = find(parameter)
        return entry is not None and entry[0] is self._handle

    def before_forward(self, module, args, kwargs):
        if self._handle is None:
            return args, kwargs
        for place in self._places:
            _, parameters, key, parameter = place
            try:
                found = parameters[key]
            except KeyError:  # a scripted module's dictionary has no get()
                found = None
            if found is not parameter:
                place.refuse_another(found, self._handle.groups)
        self._handle.check_forward()
        self._handle.adopt_unfrozen()
        self._handle.engine.before_forward()
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after_forward(self, module, args, output):
        if self._handle is None or self._mp_policy.output_dtype is None:
            return output
        return _cast(output, self._mp_policy.output_dtype)


# What a sharded module can do.
_METHODS = (
    "no_sync",
    "stats",
    "set_gradient_divide_factor",
    "unshard",
    "reshard",
    "summon_full_params",
)


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
    handle.sharded_methods = weakref.ref(methods)
    for name in _METHODS:
        setattr(module, name, BoundMethod(methods, name))
    module.zero_grad = ZeroGrad(methods, module)
    if handle.engine.releases:
        _watch_state_dicts(module, methods)
    module.register_forward_pre_hook(
        BoundMethod(methods, "before_forward"), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(BoundMethod(methods, "after_forward"))


def _watch_state_dicts(module: nn.Module, methods: ShardedMethods) -> None:
    """Of ``module`` and of those submodules that have sharded parameters of their own."""
    for each in module.modules():
        owns = any(p is not None and methods.shards(p) for p in each._parameters.values())
        if each is module or (owns and not isinstance(each, torch.jit.ScriptModule)):
            each.register_state_dict_post_hook(BoundMethod(methods, "shards_in_state_dict"))
            each.register_load_state_dict_pre_hook(BoundMethod(methods, "before_load"))
            each.register_load_state_dict_post_hook(BoundMethod(methods, "after_load"))


class BoundMethod:
    """A method that can be copied and pickled with the module that carries it."""

    def __init__(self, methods: ShardedMethods, name: str):
        self._methods = methods
        self._name = name
        functools.update_wrapper(self, getattr(ShardedMethods, name))
        del self.__wrapped__

    @torch.compiler.disable  # as module_hooks' hooks
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

    def __call__(self, *args, **kwargs) -> None:
        module = self._module()
        if type(module).zero_grad is not nn.Module.zero_grad:  # it does more
            type(module).zero_grad(module, *args, **kwargs)
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        self._methods.zero_grad(module, set_to_none)
