"""Plan: what sharding makes of some parameters. It is decided before anything changes, and read by
``shard``, ``estimate_memory`` and ``python -m zero_ext.plan``."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

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
    merged,
    modules_of_units,
    parts,
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


@dataclass(frozen=True)
class Plan:
    """The units and dtypes of a sharded module. It names parameters by their indices.

    Args:
        parameters: What is sharded, in registration order.
        whole: What every rank keeps whole, see ``stays_whole``.
        units: In the order in which they are made.
        blocks: With stage 3, the modules that gather units; None with the other stages.
        cast_modules: The modules whose inputs ``mp_policy`` casts.
        dtypes: What each parameter is computed in; None: in its own dtype.
        several_uses: See ``ModelParameters``.
        prefetch_bytes: How much may be gathered ahead of its use.
    """

    options: ShardingOptions
    parameters: Named
    units: Sequence[UnitPlan]
    dtypes: Dtypes
    whole: Named = ()
    blocks: Sequence[Block] | None = None
    cast_modules: Sequence[nn.Module] = ()
    several_uses: frozenset[int] = frozenset()
    prefetch_bytes: int = 0


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
    given = options.reshard_after_forward
    reshards = given if callable(given) else lambda name, module: given
    options = replace(options, reshard_after_forward=True)  # a function may hold the module
    parameters = [p for _, p in named]
    computed = [options.param_dtype if dtypes is None else dtypes[id(p)] for p in parameters]
    modules = modules_of_units(tree, parameters, choice) if casts or choice is not None else []
    if options.stage < 3:
        trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
        cut = units_by_size(trained, computed, options.bucket_bytes, several, expert_mesh)
        return Plan(options, named, cut, computed, found.whole, None, modules, several)
    blocks = cut_by_module(tree, parameters, choice, options.bucket_bytes, computed)
    if given is not True:  # no frame of Python for each block
        blocks = [
            block._replace(reshards=all(reshards(tree.names[each], each) for each in block.modules))
            for block in blocks
        ]
    kinds = kinds_of(dict(enumerate(parameters)), computed, several, expert_mesh)
    cut = units_of_blocks(blocks, kinds)
    sizes = bytes_of(parameters, computed)
    of_blocks = [sum(map(sizes.__getitem__, block.members)) for block in blocks if not block.root]
    ahead = max(options.bucket_bytes, 1.5 * max(of_blocks, default=0))
    if options.prefetch_mb is not None:
        ahead = options.prefetch_mb * 2**20
    rest = found.whole, blocks, modules, several, int(ahead)
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
    cut = units_by_size(trained, dtypes, options.bucket_bytes)
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


# What the parameters of a unit have in common: that of ``UnitPlan`` after its members, their own
# dtype, and whether they are experts.
Kind = tuple[torch.dtype, bool, bool, torch.dtype, bool]
_T = TypeVar("_T")


def kinds_of(
    parameters: Mapping[int, Tensor],
    dtypes: Dtypes | None = None,
    several_uses: Container[int] = (),
    expert_mesh: DeviceMesh | None = None,
) -> dict[int, Kind]:
    """Gradients are in fp32, beside half-precision computation, because the user wants it, or to
    add up ``several_uses``."""
    fp32 = torch.float32
    kinds = {}
    for i, p in parameters.items():
        own, trains = p.dtype, p.requires_grad
        dtype = (dtypes and dtypes[i]) or own
        adds_up = i in several_uses or (own != fp32 and p.grad_dtype == fp32)
        # Without a frame of Python for each parameter where there are no experts.
        is_expert = expert_mesh is not None and is_cut_over(p, expert_mesh)
        kinds[i] = (dtype, trains, trains and dtype != fp32 and adds_up, own, is_expert)
    return kinds


def by_kind(members: Iterable[int], kinds: Mapping[int, _T]) -> dict[_T, list[int]]:
    found: dict[_T, list[int]] = {}
    for i in members:
        found.setdefault(kinds[i], []).append(i)
    return found


# A parameter that is so many times smaller than a bucket may wait for others: see Note [Reduction
# order] in csrc/reduce/reductions.h.
_SMALL = 64


def units_by_size(
    parameters: Mapping[int, Tensor],
    dtypes: Dtypes,
    bucket_bytes: float,
    several_uses: Container[int] = (),
    expert_mesh: DeviceMesh | None = None,
) -> list[UnitPlan]:
    """Cut parameters, in reverse registration order, into units of about ``bucket_bytes``.

    Gradients arrive roughly in reverse registration order, so units fill one after the other. A
    unit has one kind. A parameter is never cut, so a larger one makes a larger unit. Small
    parameters at the end of a full unit, such as norms beside large weights, would keep it waiting.
    They become units of their own at the end.

    Returns:
        Units in the order in which they become complete, which is the order of reductions. Kinds
        whose last gradient comes first are first; fp32 gradients are at the end.
    """
    kinds = kinds_of(parameters, dtypes, several_uses, expert_mesh)
    own = zip(parameters, locals_of(parameters.values()), strict=True)
    sizes = {i: local.numel() * kinds[i][3].itemsize for i, local in own}
    # Own dtypes of one kind are cut apart, and take turns: a unit's values come in one dtype.
    kind_of = {i: (in_fp32, dtypes[i], expert) for i, (*_, in_fp32, _, expert) in kinds.items()}
    last_of = {kind: i for i, kind in kind_of.items()}
    apart = {i: (kind, kinds[i][3]) for i, kind in kind_of.items()}
    large, small = [], []
    for members in by_kind(reversed(sizes), apart).values():
        *full, last = _filled(members, sizes, bucket_bytes)
        kept = [_without_small_end(unit, sizes, bucket_bytes) for unit in full]
        left = [i for unit, most in zip(full, kept, strict=True) for i in unit[len(most) :]]
        kept.append(_without_small_end(last, sizes, bucket_bytes) if left else last)
        left += last[len(kept[-1]) :]
        large += filter(None, kept)
        small += _filled(left, sizes, bucket_bytes)
    large.sort(key=lambda unit: unit[-1], reverse=True)
    units = [UnitPlan(unit[::-1], *kinds[unit[0]][:3]) for unit in (*large, *small)]
    return sorted(units, key=lambda u: (u.gradient_is_fp32, -last_of[kind_of[u.members[0]]]))


def _filled(members: Sequence[int], sizes: Mapping[int, int], limit: float) -> list[Sequence[int]]:
    """``members`` cut into runs of ``sizes`` within ``limit``."""
    return [members[begin:end] for begin, end in merged([sizes[i] for i in members], limit)]


def _without_small_end(
    members: Sequence[int], sizes: Mapping[int, int], bucket_bytes: float
) -> Sequence[int]:
    """Without the last ones, as many as are small together."""
    kept, taken_bytes = len(members), 0
    while kept > 0 and (taken_bytes + sizes[members[kept - 1]]) * _SMALL <= bucket_bytes:
        kept -= 1
        taken_bytes += sizes[members[kept]]
    return members[:kept]


def units_of_blocks(blocks: Sequence[Block], kinds: Mapping[int, Kind]) -> list[UnitPlan]:
    """In the order in which a backward completes them. A unit has one kind."""
    return [
        UnitPlan(members, *kind[:3], block)
        for block, part in parts(blocks)
        for kind, members in by_kind(part, kinds).items()
    ]
