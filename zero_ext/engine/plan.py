"""Plan: what sharding makes of some parameters. It is decided before anything changes, and read by
``shard``, ``estimate_memory`` and ``python -m zero_ext.plan``."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.engine.checks import Named, check_parameters, stays_whole
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.units import (
    Block,
    Choice,
    Dtypes,
    Tree,
    UnitPlan,
    bytes_of,
    cut_by_module,
    cut_by_size,
    modules_of_units,
    parts,
    split_block,
)
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.meshes import is_cut_over, locals_of


class ModelParameters(NamedTuple):
    """The parameters of a model, by what becomes of them. Those with several names have the first.

    Args:
        sharded: In registration order.
        whole: What every rank keeps whole, see ``stays_whole``.
        ignored: The names of those that are left alone.
        several_uses: The indices of sharded ones with several names, such as tied embeddings and
            heads. Autograd adds up a parameter's uses in one backward before any hook sees them,
            in the gradient's dtype: in bf16, 256 + 1 is 256. So their gradients arrive and travel
            in fp32. Several uses under one name, by a module that is called twice, cannot be known
            beforehand.
    """

    tree: Tree
    sharded: Named
    whole: Named
    ignored: set[str]
    several_uses: frozenset[int]


class Part(NamedTuple):
    """Units that are made one after the other.

    ``block``: the number of the block whose modules gather them; None: they stay in memory.
    """

    units: list[UnitPlan]
    block: int | None = None


@dataclass(frozen=True)
class Plan:
    """The units and dtypes of a sharded module. It names parameters by their indices.

    Args:
        parameters: What is sharded, in registration order.
        whole: What every rank keeps whole, see ``stays_whole``.
        parts: All units, in the order in which they are made.
        blocks: With stage 3, the modules that gather units; None with the other stages.
        cast_modules: The modules whose inputs ``mp_policy`` casts.
        dtypes: What each parameter is computed in; None: in its own dtype.
        several_uses: See ``ModelParameters``.
        prefetch_bytes: How much may be gathered ahead of its use.
        reshards: Whether each block is released between forward and backward.
    """

    options: ShardingOptions
    parameters: Named
    parts: Sequence[Part]
    dtypes: Dtypes
    whole: Named = ()
    blocks: Sequence[Block] | None = None
    cast_modules: Sequence[nn.Module] = ()
    several_uses: frozenset[int] = frozenset()
    prefetch_bytes: int = 0
    reshards: Sequence[bool] = ()


def plan_module(
    found: ModelParameters,
    options: ShardingOptions,
    choice: Choice = None,
    *,
    casts: bool = False,
    dtypes: Mapping[int, torch.dtype | None] | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Plan:
    """
    Args:
        choice: Which modules make units, see ``shard``.
        casts: Whether inputs of the units' modules are cast.
        dtypes: What parameters are computed in, by id. Default: ``param_dtype`` of ``options``.
        expert_mesh: See ``shard``.
    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    tree, named, several = found.tree, found.sharded, found.several_uses
    reshards = options.reshard_after_forward
    if not isinstance(reshards, bool):  # a function, which may hold the module
        options = replace(options, reshard_after_forward=True)
    parameters = [p for _, p in named]
    computed = [options.param_dtype if dtypes is None else dtypes[id(p)] for p in parameters]
    modules = modules_of_units(tree, parameters, choice) if casts or choice is not None else []
    if options.stage < 3:
        trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
        cut = [Part(units_by_size(trained, computed, options.bucket_bytes, several, expert_mesh))]
        return Plan(options, named, cut, computed, found.whole, None, modules, several)
    experts = _experts(dict(enumerate(parameters)), expert_mesh)
    blocks = cut_by_module(tree, parameters, choice, options.bucket_bytes, computed)
    in_fp32 = _with_fp32_gradients(dict(enumerate(parameters)), computed, several)
    cut = [
        Part(split_block(members, parameters, in_fp32, computed, experts), block)
        for block, members in parts(blocks)
    ]
    sizes = bytes_of(parameters, computed)
    of_blocks = [sum(map(sizes.__getitem__, block.members)) for block in blocks if not block.root]
    ahead = max(options.bucket_bytes, 1.5 * max(of_blocks, default=0))
    if options.prefetch_mb is not None:
        ahead = options.prefetch_mb * 2**20
    each = [
        reshards
        if isinstance(reshards, bool)
        else all(reshards(tree.names[module], module) for module in block.modules)
        for block in blocks
    ]
    rest = found.whole, blocks, modules, several, int(ahead), each
    return Plan(options, named, cut, computed, *rest)


def plan_parameters(
    groups: Groups, parameters: Named, options: ShardingOptions, whole: Named
) -> Plan:
    """The plan of parameters whose modules are not known.

    Raises:
        ValueError, TypeError: a parameter cannot be sharded, or stage 3 was asked for.
    """
    if options.stage == 3:
        raise ValueError(
            "zero_ext: stage 3 gathers parameters when their modules are entered, an optimizer "
            "alone does not see them. Call zero_ext.shard(model, stage=3) first, then make the "
            "optimizer without stage."
        )
    check_parameters(groups, parameters, whole=whole)
    trained = {i: p for i, (_, p) in enumerate(parameters) if p.requires_grad}
    dtypes = [None] * len(parameters)
    cut = [Part(units_by_size(trained, dtypes, options.bucket_bytes))]
    return Plan(options, parameters, cut, dtypes, whole)


def parameters_of(tree: Tree, ignored: Container[int] = ()) -> ModelParameters:
    """``ignored``: the ids of parameters that are left alone."""
    sharded, whole, left_alone = [], [], set()
    uses: dict[int, int] = {}
    for module in tree.modules:
        for key, p in module._parameters.items():
            if p is None:
                continue
            uses[id(p)] = uses.get(id(p), 0) + 1
            if uses[id(p)] > 1:
                continue
            prefix = tree.names[module]
            name = f"{prefix}.{key}" if prefix else key
            if id(p) in ignored:
                left_alone.add(name)
            elif not p.requires_grad and stays_whole(p):
                whole.append((name, p))
            else:
                sharded.append((name, p))
    several = frozenset([i for i, (_, p) in enumerate(sharded) if uses[id(p)] > 1])
    return ModelParameters(tree, sharded, whole, left_alone, several)


def units_by_size(
    parameters: Mapping[int, Tensor],
    dtypes: Dtypes,
    bucket_bytes: float,
    several_uses: Container[int] = (),
    expert_mesh: DeviceMesh | None = None,
) -> list[UnitPlan]:
    """Units of trained parameters, of about the size of a bucket."""
    with_fp32 = _with_fp32_gradients(parameters, dtypes, several_uses)
    experts = _experts(parameters, expert_mesh)
    kinds: dict[tuple[bool, torch.dtype | None, bool], list[int]] = {}
    for i in parameters:
        kinds.setdefault((i in with_fp32, dtypes[i], i in experts), []).append(i)
    plans = []
    # Kinds whose last gradient comes first, as in each of them; fp32 gradients at the end.
    for (in_fp32, dtype, _), members in sorted(kinds.items(), key=lambda k: (k[0][0], -k[1][-1])):
        numels = [p.numel() for p in locals_of([parameters[i] for i in members])]
        # Two dtypes that become one are cut apart first: a unit's values come in one dtype.
        own = [parameters[i].dtype for i in members]
        for plan in cut_by_size(numels, own, bucket_bytes):
            cut = [members[m] for m in plan.members]
            plans.append(UnitPlan(cut, dtype or plan.dtype, gradient_is_fp32=in_fp32))
    return plans


def _experts(parameters: Mapping[int, Tensor], expert_mesh: DeviceMesh | None) -> set[int]:
    if expert_mesh is None:  # no frame of Python for each parameter
        return set()
    return {i for i, parameter in parameters.items() if is_cut_over(parameter, expert_mesh)}


def _with_fp32_gradients(
    parameters: Mapping[int, Tensor], dtypes: Dtypes, several_uses: Container[int]
) -> set[int]:
    """The parameters with half-precision computation and fp32 gradients: because the user wants it,
    or to add up their uses. Such gradients travel in fp32, in units of their own."""
    fp32 = torch.float32
    return {
        i
        for i, p in parameters.items()
        if (dtypes[i] or p.dtype) != fp32
        and (i in several_uses or (p.dtype != fp32 and p.grad_dtype == fp32))
    }
