"""Plan: what sharding makes of some parameters. It is decided before anything changes, and read by
``shard``, ``estimate_memory`` and ``python -m zero_ext.plan``."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_ext.engine.checks import Named, check_parameters, stays_whole
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.units import (
    Block,
    Choice,
    UnitPlan,
    bytes_of,
    cut_by_module,
    cut_by_size,
    modules_of_units,
    named_modules,
    parts,
    split_block,
)
from zero_ext.ranks.groups import Groups

Found = tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]], frozenset[int]]


class Part(NamedTuple):
    """Units that are made one after the other.

    ``block``: the number of the block whose modules gather them; None: they stay in memory.
    """

    units: list[UnitPlan]
    block: int | None = None


@dataclass(frozen=True)
class Plan:
    """What sharding makes of parameters, which it names by their indices.

    Args:
        parameters: What is sharded, in registration order.
        whole: What every rank keeps whole, see ``stays_whole``.
        parts: All units, in the order in which they are made.
        blocks: With stage 3, the modules that gather units; None with the other stages.
        cast_modules: The modules whose inputs ``mp_policy`` casts.
        several_uses: The parameters whose uses autograd adds up, see ``parameters_of``.
        prefetch_bytes: How much may be gathered ahead of its use.
    """

    options: ShardingOptions
    parameters: Named
    parts: Sequence[Part]
    whole: Named = ()
    blocks: Sequence[Block] | None = None
    cast_modules: Sequence[nn.Module] = ()
    several_uses: frozenset[int] = frozenset()
    prefetch_bytes: int = 0


def plan_module(
    module: nn.Module,
    options: ShardingOptions,
    choice: Choice = None,
    *,
    found: Found | None = None,
    casts: bool = False,
) -> Plan:
    """
    Args:
        choice: Which modules make units, see ``shard``.
        found: What ``parameters_of(module)`` has found.
        casts: Whether inputs of the units' modules are cast.
    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    named, whole, several = found or parameters_of(module)
    parameters = [p for _, p in named]
    modules = modules_of_units(module, parameters, choice) if casts or choice is not None else []
    if options.stage < 3:
        trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
        cut = [Part(units_by_size(trained, options, several))]
        return Plan(options, named, cut, whole, None, modules, several)
    blocks = cut_by_module(module, parameters, choice, options.bucket_bytes, options.param_dtype)
    cut = [
        Part(_units_of_block({i: parameters[i] for i in members}, options, several), block)
        for block, members in parts(blocks)
    ]
    ahead = _prefetch_bytes(blocks, parameters, options)
    return Plan(options, named, cut, whole, blocks, modules, several, ahead)


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
    return Plan(options, parameters, [Part(units_by_size(trained, options))], whole)


def parameters_of(module: nn.Module, ignored: Iterable[int] = ()) -> Found:
    """The named parameters that are sharded, those that every rank keeps whole, and the indices of
    the former that have several names, such as tied embeddings and heads.

    Autograd adds up a parameter's uses in one backward before any hook sees them, in the
    gradient's dtype: in bf16, 256 + 1 is 256. So gradients of these arrive and travel in fp32.
    Several uses under one name, by a module that is called twice, cannot be known beforehand.
    """
    named, whole, uses = [], [], dict.fromkeys(ignored, -1)
    for prefix, each in named_modules(module, remove_duplicate=False):
        for key, p in each._parameters.items():
            count = 0 if p is None else uses.get(id(p), 0)
            if p is None or count < 0:
                continue
            if count == 0:
                name = f"{prefix}.{key}" if prefix else key
                (whole if stays_whole(p) else named).append((name, p))
            uses[id(p)] = count + 1
    several = [i for i, (_, p) in enumerate(named) if uses[id(p)] > 1]
    return named, whole, frozenset(several)


def units_by_size(
    parameters: Mapping[int, Tensor], options: ShardingOptions, several_uses: Container[int] = ()
) -> list[UnitPlan]:
    """Units of trained parameters, of about the size of a bucket."""
    kinds: dict[bool, list[int]] = {False: [], True: []}
    for i, parameter in parameters.items():
        kinds[_gradient_is_fp32(parameter, i in several_uses, options)].append(i)
    plans = []
    for in_fp32, members in kinds.items():
        numels = [parameters[i].numel() for i in members]
        # Two dtypes that become one are cut apart first: a unit's values come in one dtype.
        dtypes = [parameters[i].dtype for i in members]
        for plan in cut_by_size(numels, dtypes, options.bucket_bytes):
            cut = [members[m] for m in plan.members]
            dtype = options.param_dtype or plan.dtype
            plans.append(UnitPlan(cut, dtype, gradient_is_fp32=in_fp32))
    return plans


def _units_of_block(
    parameters: Mapping[int, Tensor], options: ShardingOptions, several_uses: Container[int]
) -> list[UnitPlan]:
    """Units of parameters that are gathered together."""
    in_fp32 = {i for i, p in parameters.items() if _gradient_is_fp32(p, i in several_uses, options)}
    plans = split_block(list(parameters), parameters, in_fp32)
    return [plan._replace(dtype=options.param_dtype or plan.dtype) for plan in plans]


def _gradient_is_fp32(parameter: Tensor, several_uses: bool, options: ShardingOptions) -> bool:
    """Although the parameter is computed with in half precision: because the user wants it, or to
    add up the parameter's uses. Such a gradient travels in fp32, in a unit of its own."""
    if (options.param_dtype or parameter.dtype) == torch.float32:
        return False
    wanted = parameter.dtype != torch.float32 and parameter.grad_dtype == torch.float32
    return wanted or several_uses


def _prefetch_bytes(
    blocks: Iterable[Block], parameters: Sequence[Tensor], options: ShardingOptions
) -> int:
    """How much may be gathered ahead of its use, see ``shard``."""
    if options.prefetch_mb is not None:
        return int(options.prefetch_mb * 2**20)
    sizes = [bytes_of(b.members, parameters, options.param_dtype) for b in blocks if not b.root]
    return int(max(options.bucket_bytes, 1.5 * max(sizes, default=0)))
