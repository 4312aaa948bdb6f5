"""``shard``: a module becomes a sharded one, in place."""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from typing_extensions import Never

from zero_ext.engine.checks import (
    check_buffers,
    check_module,
    check_parameters,
    refuse_wrapped,
)
from zero_ext.engine.handle import Handle
from zero_ext.engine.low_precision import check_seen
from zero_ext.engine.meta import MetaModules
from zero_ext.engine.options import ReshardChoice, ShardingOptions
from zero_ext.engine.plan import Plan, parameters_of, plan_module
from zero_ext.engine.units import Block, Choice, Tree, bytes_of, largest_of_many
from zero_ext.module import foreign_names, plain_copies
from zero_ext.module.forward_hooks import ForwardHooks, cast_inputs, cast_outputs
from zero_ext.module.methods import (
    ShardedMethods,
    ZeroGrad,
    refuse_taken_names,
    replace_save_pretrained,
)
from zero_ext.module.policies import ModulePolicy, Policies, input_dtype
from zero_ext.module.state_dict_hooks import StateDictHooks
from zero_ext.ranks.agreement import with_experts
from zero_ext.ranks.collectives import copy_from_rank_0
from zero_ext.ranks.groups import Groups, resolve
from zero_ext.tensor.meshes import locals_of

_log = logging.getLogger(__name__)

# The returned module has the class of the given one, for type checkers too.
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def shard(
    module: AnyModule,
    stage: int = 2,
    *,
    mesh: DeviceMesh | Literal["alone"] | None = None,
    expert_mesh: DeviceMesh | None = None,
    units: Choice = None,
    mp_policy: ModulePolicy = None,
    offload_policy: OffloadPolicy | None = None,
    bucket_mb: float = 25.0,
    reduction: str | None = None,
    accumulation_steps: int | None = None,
    reshard_after_forward: ReshardChoice = True,
    retained_bytes: int | None = None,
    prefetch_mb: float | None = None,
    host_copies: bool = False,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    sync_module_states: bool = True,
    broadcast_buffers: bool = False,
    **foreign: Never,
) -> AnyModule:
    """Shard parameters, gradients and optimizer state of ``module`` over the ranks, in place.
    Collective.

    The module keeps its class, its state_dict keys and its Parameter objects; the parameters become
    views of flat buffers. Each ``backward()`` outside of ``no_sync()`` reduces the gradients,
    averaged over the ranks. Afterwards ``p.grad`` shows this rank's part in fp32. Make the
    optimizer after this call, from ``zero_ext.optim``.

    With stage 3 the parameters of a unit are in memory while a forward or a backward is inside one
    of its modules. Elsewhere they keep shape and dtype, but reading or writing them raises an error
    that names the unit. ``summon_full_params()`` and ``unshard()`` gather them. ``state_dict()``
    returns ShardTensors, and ``load_state_dict()`` is collective. Ranks may enter different units,
    for example in branches of a forward. A forward that one rank runs alone ends in a timeout.

    The module gains the methods ``no_sync()``, ``stats()``, ``set_gradient_divide_factor(factor)``,
    ``unshard()``, ``reshard()`` and ``summon_full_params()``. Its ``zero_grad()`` discards local
    sums as well.

    Args:
        module: On one device, with parameters in fp32, bf16 or fp16, also mixed. Frozen parameters
            of any other dtype (quantised weights) stay whole on every rank. With stage 3 parameters
            and buffers may be on the meta device: each unit is materialised, sharded and released
            in turn, and the Parameter objects are new ones.
        stage: What is sharded. 0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too.
        units: Stage 3: which parameters are gathered together. Module classes, or a function of a
            module's name and the module: True makes a unit, and modules for which it returns the
            same string are one unit. ``()``: all together. Default: the children of the outermost
            ModuleLists and Sequentials, small neighbours merged up to ``bucket_mb``, and the models
            in a ModuleList or ModuleDict that is sharded itself. In a child without a forward, what
            is called is gathered together. Parameters in none of them, or shared by several, are
            gathered while the root's forward and backward run. In every stage ``mp_policy`` casts
            the inputs of these modules.
        mesh: The ranks to shard over, in one dimension. Default: all. ``"alone"``: this rank trains
            by itself, as without a launcher. With two dimensions, as for FSDP2, sharding is hybrid:
            each row is a replica whose ranks hold one copy together, and gradients are reduced over
            all ranks.
        expert_mesh: The dimension among the ranks of ``mesh`` that cuts experts: parameters that
            are DTensors with ``Shard`` over it. Ranks with the same experts shard them together. An
            expert's gradient is the sum over all tokens that reached it, divided by the number of
            all ranks, as that of every other parameter. On the CPU the reduction must
            be ``"exchange"``.
        mp_policy: As for FSDP2. ``param_dtype`` becomes the parameters' dtype; the fp32 values stay
            as masters. Inputs of ``module`` and of each unit's modules are cast to it. Unlike in
            FSDP2, ``output_dtype`` casts the outputs of ``module`` only. Gradients are sent in
            ``reduce_dtype`` (default: their own dtype with ``exchange``, fp32 with ``collective``).
            Or a function of a module's name and the module: what it returns holds for the module
            and for what is inside, and casts its inputs and outputs. None: as the module around.
        offload_policy: As for FSDP2: masters, optimizer state and gradient sums are in (pinned)
            host memory, and the CPU runs the update. With stage 3 the parameters are there, too,
            between their uses. Every backward reduces, also inside ``no_sync()``. Has no effect
            for a model on the CPU.
        bucket_mb: Size of a unit in MiB of gradients (stage 3: up to which small ones are merged).
        reduction: ``"exchange"``: all-to-all, then one exact fp32 sum in rank order, which has the
            bits of one process. ``"collective"``: the backend's reduce-scatter. Default:
            ``"exchange"``, but for NCCL between GPUs that cannot read each other's memory.
        accumulation_steps: Every n-th backward is the boundary; the others are as in ``no_sync()``.
            The gradient is the sum of the n micro-batches: divide each loss by n for their average.
            A step before the boundary raises.
        reshard_after_forward: Stage 3: release units between forward and backward. Or a function of
            the name and the module of each unit that says it for that unit.
        retained_bytes: Stage 3: how many bytes a backward with ``retain_graph`` may leave gathered
            for the next one; other units are gathered again. A double backward (``create_graph``)
            that reads such a unit may raise an error that names it. Default: no limit.
        prefetch_mb: Stage 3: MiB gathered ahead of their use, in the order of the last pass. 0
            gathers nothing ahead. Default: ``bucket_mb`` or 1.5 times the largest unit, whichever
            is more; 0 where all ranks read each other's memory, because nothing would overlap.
        host_copies: Stage 3, on CPUs of several hosts: the ranks of each host keep the other hosts'
            parts of the parameters as well. Gathers stay within a host, and an update sends each
            part once to each other host. Default: gathers take each part from its rank.
        param_init_fn: Initialises the parameters and buffers of one module that were on the meta
            device, without its children. Default: the module's ``reset_parameters``.
        ignored_params: Parameters to leave alone: neither broadcast, nor are gradients averaged.
            Each rank trains its own.
        sync_module_states: Start with rank 0's parameters and buffers on every rank. With False the
            ranks must have the same values already; in stage 3 each keeps its part of its own.
        broadcast_buffers: Before each training forward every rank gets rank 0's buffers, as DDP
            does by default. The forward is then collective. Default: each rank keeps its own.
    Returns:
        ``module``.
    Raises:
        ValueError, TypeError: models differ between ranks, a parameter cannot be sharded, or an
            argument is wrong. The module is unchanged.
        torch.OutOfMemoryError: the module is a plain one with its values and can be sharded later.
            With stage 3 on several ranks the parameters of finished units are lost.
    """
    if foreign:
        foreign_names.reject_foreign(foreign)
    check_module(module, "shard()")
    tree = Tree(module)
    refuse_wrapped(tree)
    refuse_taken_names(module)
    policies = Policies.of(tree, mp_policy)
    options = ShardingOptions(
        stage=stage,
        bucket_mb=bucket_mb,
        reduction=reduction,
        reduce_dtype=policies.root.reduce_dtype,
        param_dtype=policies.root.param_dtype,
        accumulation_steps=accumulation_steps,
        sync_module_states=sync_module_states,
        broadcast_buffers=broadcast_buffers,
        prefetch_mb=prefetch_mb,
        host_copies=host_copies,
        retained_bytes=retained_bytes,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
    )
    groups = resolve(None, mesh, module.parameters())
    if expert_mesh is not None:
        groups = with_experts(groups, expert_mesh)
    ignored_params = _checked_ignored(ignored_params, param_init_fn)
    found = parameters_of(tree, {id(p) for p in ignored_params})
    named, whole = found.sharded, found.whole
    buffers = tree.named_buffers() if sync_module_states else []
    check_buffers(groups, [(name, b) for name, b in buffers if not b.is_meta])
    check_parameters(groups, named, whole=whole, meta_allowed=stage == 3)
    check_seen(groups, stage, named)
    casts = any(map(input_dtype, [policies.root, *policies.own.values()]))
    plan = plan_module(
        found, options, units, casts=casts, dtypes=policies.dtypes, expert_mesh=expert_mesh
    )
    meta = None
    if stage == 3:
        left_alone = {id(p) for p in (*ignored_params, *[p for _, p in whole])}
        _refuse_writing_forwards(tree, groups, left_alone)
        meta = MetaModules(tree, left_alone, param_init_fn, groups.device)
    handle = Handle(groups, plan, buffers=buffers, meta=meta)
    handle.ignored = ignored_params
    frozen = [p for _, p in named if not p.requires_grad] if stage < 3 else []
    others = [*frozen, *[p for _, p in whole]]
    _complete(handle, tree, meta, others if sync_module_states else None)
    _attach(handle, tree, plan, found.ignored, policies)
    _log_sharded(handle, module)
    if plan.blocks is not None:
        _log_large_unit(handle, tree, plan.blocks)
    return module


def _checked_ignored(
    ignored: Iterable[nn.Parameter], init: Callable[[nn.Module], None] | None
) -> list[nn.Parameter]:
    if init is not None and not callable(init):
        raise TypeError(f"zero_ext: param_init_fn must be a function of a module, not {init!r}.")
    parameters = list(ignored) if isinstance(ignored, Iterable) else [ignored]
    for each in parameters:
        if not isinstance(each, nn.Parameter):
            raise TypeError(
                f"zero_ext: ignored_params must hold Parameters, not a {type(each).__name__}."
            )
    return parameters


def _refuse_writing_forwards(tree: Tree, groups: Groups, ignored: set[int]) -> None:
    """Raise if a forward writes to an embedding: other ranks may gather half of a written row."""
    for child, name in tree.names.items() if groups.world > 1 else ():
        embeds = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
        if embeds and id(child.weight) not in ignored:
            raise ValueError(
                f"{groups.where}'{name}' is a {type(child).__name__} with "
                f"max_norm={child.max_norm}: its forward writes to the weight while other ranks "
                "may gather it. Leave the weight out with ignored_params, and average its gradient "
                "yourself."
            )


def _complete(
    handle: Handle,
    tree: Tree,
    meta: MetaModules | None,
    parameters: Iterable[nn.Parameter] | None,
) -> None:
    """Materialise what is left on the meta device. Give every rank the values of rank 0 in the
    buffers and in ``parameters``, which no unit holds; ``None``: ranks keep their own values."""
    try:
        if meta is not None:
            meta.finish()
        if parameters is not None:
            buffers = [buffer for _, buffer in tree.named_buffers()]
            copy_from_rank_0(handle.groups, locals_of([*parameters, *buffers]))
    except BaseException:
        handle.dissolve()
        raise


def _log_sharded(handle: Handle, module: nn.Module) -> None:
    groups = handle.groups
    level = logging.INFO if groups.rank == 0 else logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    stats = handle.engine.stats()
    _log.log(
        level,
        "%ssharded %s with stage %d over %d ranks%s: %d units, %d bytes per rank before the first "
        "step, %d local peers",
        groups.where,
        type(module).__name__,
        handle.options.stage,
        groups.world,
        f" in replicas of {groups.shards}" if groups.shards < groups.world else "",
        stats["units"],
        stats["bytes_held"],
        stats["neighbors"],
    )
    if groups.world > 1 and groups.device.type != "cpu":
        why = handle.engine.why_sent
        sent = f"are sent: {why}" if why else "are read in place by the other ranks' devices"
        _log.log(level, "%sgradients %s", groups.where, sent)
    here, world = stats["neighbors"] + 1, groups.world
    if handle.options.reduction != "collective" and 1 < here < world == groups.shards:
        of_passes = 1 if handle.options.host_copies else here
        # Parts, for each rank elsewhere.
        of_each = (here * world, here + 1, here + 1, here + of_passes)
        times = of_each[handle.options.stage] * (world - here) / (2 * world - 2)
        told = (
            "sends up to %.1f times the bytes of a ring to other hosts: see docs/between_hosts.md"
        )
        _log.log(level, f"%sa host with %d of %d ranks {told}", groups.where, here, world, times)


def _log_large_unit(handle: Handle, tree: Tree, blocks: Sequence[Block]) -> None:
    """Say so where one unit has most of the parameters: they are all in memory at once."""
    groups, options = handle.groups, handle.options
    if groups.shards == 1 or groups.rank > 0:
        return
    sizes = bytes_of(handle.parameters, handle.dtypes)
    found = largest_of_many(blocks, tree, handle.parameters, sizes)
    if found is None or sum(sizes) <= options.bucket_bytes:
        return
    block, share = found
    which = tree.names[block.modules[0]]
    _log.warning(
        "%sone unit, %s, holds %d %% of the parameters, which are gathered together. "
        "Choose smaller units: zero_ext.shard(units=[BlockClass]).",
        groups.where,
        f"'{which}'" if which else "that of the whole module",
        round(100 * share),
    )


def _attach(handle: Handle, tree: Tree, plan: Plan, ignored: set[str], policies: Policies) -> None:
    """Give the modules of ``tree`` hooks and methods. Those that come last run first."""
    module, releases = tree.root, handle.engine.releases
    if releases or handle.low_precision:
        whole = [Block([module], [*range(len(handle.parameters))], root=True)]
        handle.watch_modules(tree, plan.blocks or whole)
    cast_inputs(dict.fromkeys([*plan.cast_modules, *policies.own]), policies)
    cast_outputs(policies)
    forward_hooks = ForwardHooks(tree, handle, policies.root, ignored)
    methods = ShardedMethods(handle, forward_hooks)
    handle.sharded_methods = weakref.ref(methods)
    methods.attach(module)
    module.zero_grad = ZeroGrad(handle, module)
    if releases:
        StateDictHooks(handle).attach(tree)
        replace_save_pretrained(tree.names, methods)
    forward_hooks.attach(module)
    foreign_names.attach(tree.names)
    plain_copies.attach(tree.names)
