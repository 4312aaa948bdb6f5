"""UnitPlanner and UnitMaker: the units that parameters become, planned and made in the engine."""

import logging
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.registry import ParameterTable
from zero_ext.engine.units import UnitPlan, cut_by_size, split_block

_log = logging.getLogger(__name__)


class UnitPlanner(NamedTuple):
    """Plans units of ``parameters``, which are named by their indices.

    ``used_several_times``: parameters whose gradients autograd adds up, see the function.
    """

    parameters: Sequence[Tensor] | ParameterTable
    options: ShardingOptions
    used_several_times: Container[Tensor]

    def by_size(self, indices: Iterable[int]) -> list[UnitPlan]:
        """Units of trained parameters, of about the size of a bucket."""
        kinds: dict[bool, list[int]] = {False: [], True: []}
        for i in indices:
            kinds[self._gradient_is_fp32(i)].append(i)
        plans = []
        for in_fp32, members in kinds.items():
            numels = [self.parameters[i].numel() for i in members]
            # Two dtypes that become one are cut apart first: a unit's values come in one dtype.
            dtypes = [self.parameters[i].dtype for i in members]
            for plan in cut_by_size(numels, dtypes, self.options.bucket_bytes):
                cut = [members[m] for m in plan.members]
                plans.append(plan._replace(members=cut, gradient_is_fp32=in_fp32))
        return list(map(self._in_compute_dtype, plans))

    def of_block(self, members: Sequence[int]) -> list[UnitPlan]:
        """Units of parameters that are gathered together."""
        in_fp32 = {i for i in members if self._gradient_is_fp32(i)}
        parameters = {i: self.parameters[i] for i in members}
        return list(map(self._in_compute_dtype, split_block(members, parameters, in_fp32)))

    def _in_compute_dtype(self, plan: UnitPlan) -> UnitPlan:
        return plan._replace(dtype=self.options.param_dtype or plan.dtype)

    def _gradient_is_fp32(self, i: int) -> bool:
        """Although the parameter is computed with in half precision: because the user wants it, or
        to add up the parameter's uses. Such a gradient travels in fp32, in a unit of its own."""
        parameter = self.parameters[i]
        if (self.options.param_dtype or parameter.dtype) == torch.float32:
            return False
        wanted = parameter.dtype != torch.float32 and parameter.grad_dtype == torch.float32
        return wanted or parameter in self.used_several_times


class UnitMaker:
    def __init__(self, engine: _C.Engine, planner: UnitPlanner):
        self._engine = engine
        self._planner = planner

    def make_by_size(self, indices: Iterable[int]) -> None:
        for plan in self._planner.by_size(indices):
            self._make(plan)

    def make_block(self, members: Sequence[int]) -> list[int]:
        """Returns the numbers of the units in the engine."""
        return [self._make(plan) for plan in self._planner.of_block(members)]

    def _make(self, plan: UnitPlan) -> int:
        """A unit that can train, also if there is no memory for the next one."""
        kind = _C.UnitKind.trainable if plan.trainable else _C.UnitKind.frozen
        number = self._engine.add_unit(plan.members, plan.dtype, kind)
        _log.debug(
            "zero_ext: %s unit '%s': %d parameters in %s",
            kind.name,
            self._engine.unit_name_of(plan.members[0]),
            len(plan.members),
            plan.dtype,
        )
        if not plan.trainable:
            return number
        if plan.gradient_is_fp32:
            self._engine.set_gradient_dtype(self._engine.unit_count - 1, torch.float32)
            for i in plan.members:
                self._planner.parameters[i].grad_dtype = torch.float32
        return number
