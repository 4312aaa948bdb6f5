"""Handle: the Python side of one engine."""

import atexit
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C, _torch
from zero_ext.engine import (
    checks,
    low_precision,
    registry,
    released,  # noqa: F401 (which makes the errors of released parameters)
)
from zero_ext.engine.checks import Named
from zero_ext.engine.clipping import HostGradient
from zero_ext.engine.low_precision import LowPrecision
from zero_ext.engine.meta import MetaModules
from zero_ext.engine.plan import Plan, units_by_size
from zero_ext.engine.unit_hooks import (
    OpenForwards,
    SiteHooks,
    watch_inner_modules,
    watch_module,
)
from zero_ext.engine.units import Block, Tree, UnitPlan
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.collectives import all_reduce_
from zero_ext.ranks.groups import Groups
from zero_ext.tensor import meshes, shard_tensor
from zero_ext.tensor.meshes import Outer

_log = logging.getLogger(__name__)

_SAME_MODELS = "Build the same model and pass the same arguments on every rank."
_EXIT_PATIENCE_S = 60.0  # without a reader


class Handle:
    """One engine over some parameters.

    Args:
        plan: Of parameters that ``checks.check_parameters`` has passed. A frozen one stays as it is
            until it is unfrozen. An error is raised when one that stays whole is trained.
        buffers: The buffers that will be broadcast.
        meta: The modules whose parameters are on the meta device.
    """

    def __init__(
        self, groups: Groups, plan: Plan, buffers: Named = (), meta: MetaModules | None = None
    ):
        environment.check(groups)
        options, blocks = plan.options, plan.blocks
        described = [*options.describe(groups), *checks.describe(*plan.parameters, *plan.whole)]
        described += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in buffers]
        described += [f"unit of parameters {block.members}" for block in blocks or ()]
        others = [(i, d) for i, d in enumerate(plan.dtypes) if d != options.param_dtype]
        described += [f"parameter {i} is computed in {dtype}" for i, dtype in others]
        check_same_on_all_ranks(groups, described, "the models (or the arguments)", _SAME_MODELS)
        self.groups = groups
        self.options = options
        # Whether every rank holds all of the optimizer's state: stage 0, or replicas of one rank.
        self.replicated = groups.shards == 1 or options.stage == 0
        # By index in the engine, which holds the parameters, too.
        self.parameters: list[Tensor] = []
        # Parameters and indices, by id. Also the parameters that were on the meta device.
        self.entries: dict[int, tuple[Tensor, int]] = {}
        self.low_precision: dict[int, LowPrecision] = {}  # by their parameters' indices
        self.ignored: Sequence[Tensor] = ()  # what ``shard(ignored_params=)`` has left alone
        self.across_meshes: meshes.AcrossMeshes | None = None  # where parameters are DTensors
        self.engine = options.make_engine(groups, plan.prefetch_bytes)
        registry.register(self)
        self.engine.set_local_reader(_local_part)
        show_gradient = weakref.WeakMethod(self._show_gradient)
        self.engine.set_view_maker(lambda i, local: show_gradient()(i, local))
        # Whether verdicts about a step are made on the host.
        self.knows_on_host = groups.device.type == "cpu" or options.offloads
        self.forwards = OpenForwards()
        self._several_uses, self.planned = plan.several_uses, len(plan.parameters)
        self.dtypes = [*plan.dtypes]  # see Plan
        self.unfreezings = 0
        self._whole: list[tuple[str, weakref.ref]] = []
        self.leave_whole(plan.whole)
        self.optimizers: weakref.WeakSet = weakref.WeakSet()
        self.sharded_methods: weakref.ref | None = None  # of the module
        self.forgets_writes = False  # inside ``summon_full_params(writeback=False)``
        self.root_hooks: list[SiteHooks] = []  # of the module itself
        self.scaled_by: weakref.ref | None = None  # the optimizer whose loss_scaler the engine has
        self._units_of_blocks: list[list[int]] = [[] for _ in plan.blocks or [None]]
        try:
            self._add_planned(plan, meta)
        except BaseException:
            self.dissolve()
            raise

    def dissolve(self) -> None:
        """Let go of the parameters, although an exception's traceback may keep this alive."""
        self.parameters, self.entries = [], {}
        self.root_hooks, self.low_precision = [], {}  # which hold the engine
        self.engine.retire()
        try:
            if self.groups.shards == 1:
                self.engine.give_parameters_back()
        finally:
            self.engine = None

    # Parameters and their units

    def _register(self, parameters: Named) -> list[int]:
        tensors = [parameter for _, parameter in parameters]
        self.engine.add_parameters(tensors, [name for name, _ in parameters])
        first = len(self.parameters)
        self.parameters += tensors
        self.entries |= {id(p): (p, i) for i, p in enumerate(tensors, first)}
        distributed = [(i, p) for i, p in enumerate(tensors, first) if isinstance(p, DTensor)]
        if distributed and self.across_meshes is None:
            own = None if self.replicated else self.groups.mesh.get_group()
            compare = functools.partial(_check_equal_gradients, weakref.ref(self))
            inside = self.groups.expert_mesh
            self.across_meshes = meshes.AcrossMeshes(own, self.groups.parent, compare, inside)
        self.low_precision |= low_precision.register(self.groups, self.engine, tensors, first)
        if self.across_meshes is not None:
            self.engine.set_to_local(self.across_meshes.local_gradient)
        for i, parameter in distributed:
            _set_local(self, i, parameter)
        if distributed and (self.across_meshes.groups or self.replicated):
            self.engine.set_across_meshes(self.across_meshes.sum)
        if distributed and self.across_meshes.groups:
            _check_equal_values(self, [each for each in parameters if type(each[1]) is not DTensor])
        return list(range(first, len(self.parameters)))

    def _add_planned(self, plan: Plan, meta: MetaModules | None) -> None:
        self._register(plan.parameters)
        for block, units in itertools.groupby(plan.units, attrgetter("block")):
            of_block = list(units)
            if meta is not None:
                self._materialise(of_block, meta)
            made = [_make_unit(self.engine, self.parameters, unit) for unit in of_block]
            self._units_of_blocks[block or 0].extend(made)
        if plan.blocks is None:
            for (_, parameter), dtype in zip(plan.parameters, plan.dtypes, strict=True):
                if dtype is not None and not parameter.requires_grad:
                    meshes.convert(parameter, dtype)

    def make_units_by_size(self, indices: Sequence[int]) -> None:
        """Units of parameters that are trained. Collective."""
        for added in (False, True):
            trained = {i: self.parameters[i] for i in indices if (i >= self.planned) == added}
            rest = self.dtypes, self.options.bucket_bytes, self._several_uses
            for unit in units_by_size(trained, *rest, self.groups.expert_mesh):
                _make_unit(self.engine, self.parameters, unit, resident=added)

    def check_and_add(self, parameters: Named) -> None:
        """Take in more parameters, whole between steps: no forward gathers them. Collective."""
        checks.check_parameters(self.groups, parameters)
        described = checks.describe(*parameters)
        check_same_on_all_ranks(self.groups, described, "the added parameters", _SAME_MODELS)
        checks.check_order(self.groups, parameters)
        indices = self._register(parameters)
        self.dtypes += [None] * len(indices)  # their modules keep computing in their own
        self.make_units_by_size([i for i in indices if self.parameters[i].requires_grad])

    def leave_whole(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Watch more parameters that ``stays_whole`` is true of."""
        self._whole.extend((name, weakref.ref(parameter)) for name, parameter in parameters)

    def adopt_unfrozen(self) -> None:
        """Shard parameters that were frozen before and require a gradient now. Collective.

        Raises:
            TypeError: one of them ``stays_whole``.
        """
        self.check_whole()
        self.adopt(self.engine.unfrozen())

    def check_whole(self) -> None:
        """Raise a TypeError if a parameter that ``stays_whole`` is trained."""
        for name, reference in self._whole:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                checks.reject_dtype(self.groups, name, parameter)

    def adopt(self, unfrozen: Sequence[int]) -> None:
        """Shard the parameters ``unfrozen``. Collective.

        A gradient that autograd has left in their ``.grad`` becomes what a reduction makes of it.
        """
        if unfrozen:
            names = [self.engine.parameter_name(i) for i in unfrozen]
            _log.debug("%sshards what is trained from now on: %s", self.groups.where, names)
            self._make_trainable(unfrozen)
            self.unfreezings += 1

    # Also where a forward in inference mode notices that the parameters are trained.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_trainable(self, unfrozen: Sequence[int]) -> None:
        gradients = {i: self.parameters[i].grad for i in unfrozen}
        self.engine.meet_for_unfreezing(list(unfrozen))
        averages = {i: _average(self, i, gradient) for i, gradient in gradients.items()}
        by_unit: dict[int, list[int]] = {}
        for i in unfrozen:
            self.parameters[i].grad = None
            by_unit.setdefault(self.engine.frozen_unit_of(i), []).append(i)
        try:
            for members in by_unit.values():
                self.make_units_by_size(members)
            low_precision.watch(self.engine, self.low_precision)
        finally:  # parameters for which there is no memory stay as they were
            for i, average in averages.items():
                if self.engine.unit_of(i) < 0:
                    self.parameters[i].grad = gradients[i]
                elif average is not None:
                    self.engine.write_gradient(i, average)

    def _materialise(self, units: Iterable[UnitPlan], meta: MetaModules) -> None:
        old = {i: self.parameters[i] for unit in units for i in unit.members}
        made = meta.materialise(old)
        for i, new in made.items():
            self.engine.replace_parameter(i, new)
            self.parameters[i], self.entries[id(new)] = new, (new, i)
            if isinstance(new, DTensor):
                _set_local(self, i, new)
        if self.across_meshes is not None and self.across_meshes.groups:
            named = [(self.engine.parameter_name(i), new) for i, new in made.items()]
            _check_equal_values(self, [(n, p) for n, p in named if not meshes.is_cut(p)])

    def watch_modules(self, tree: Tree, blocks: Sequence[Block]) -> None:
        """Gather and release units as their modules are entered and left, from now on."""
        if _torch.is_profiling():
            _C.show_parameters_to_profiler(False)
        units: list[SiteHooks] = []
        unit_of: dict[int, int] = {}
        for block, numbers in zip(blocks, self._units_of_blocks, strict=True):
            inside: list[int] = []
            for k, module in enumerate(block.modules):
                last = k == len(block.modules) - 1
                site = self.engine.add_hook_site(numbers, root=block.root, first=k == 0, last=last)
                hooks = SiteHooks(self.engine, site, self.forwards, [inside], block.root)
                watch_module(module, hooks)
                if block.root:
                    self.root_hooks.append(hooks)
            hooks.set_reshard_after_forward(block.reshards)
            unit_of |= dict.fromkeys([id(self.parameters[i]) for i in block.members], len(units))
            units.append(hooks)
        hooked = {module for block in blocks for module in block.modules}
        watch_inner_modules(tree, units, unit_of, hooked)
        low_precision.show(self.low_precision, tree, self.engine, self.groups.device)

    def reshard(self, keep_writes: bool) -> None:
        """Release what ``unshard()`` gathered. Collective."""
        if keep_writes:  # to this rank's shards, which other ranks may still be gathering
            self.engine.wait_for_shards()
        self.engine.reshard(keep_writes=keep_writes)
        if keep_writes or not self.engine.serves_one_alone:
            self.engine.wait_for_shards()

    # Views of a parameter's values

    def holds(self, parameter: Tensor) -> bool:
        return id(parameter) in self.entries

    @functools.cached_property
    def _makers(self) -> dict[bool, shard_tensor.Maker]:
        """The makers for parameters that all ranks hold together, and for experts."""
        experts, ranks = self.groups.experts, self.groups.global_ranks
        makers = {False: shard_tensor.Maker(self.groups.mesh, ranks)}
        if experts is not None:
            makers[True] = shard_tensor.Maker(experts.alike, ranks)
        return makers

    def as_parameter(self, local: Tensor, i: int, parameter: Tensor) -> Tensor:
        """This rank's 1-D part of some per-element value, shown in the parameter's shape."""
        bounds, strides = self.check_size(i, parameter), self.engine.strides(i)
        if self.replicated:
            return self.as_whole(local, i, parameter)
        outer = Outer.of(parameter, strides)
        whole = strides if outer is None else parameter.stride()
        maker = self._makers[meshes.is_cut_over(parameter, self.groups.expert_mesh)]
        return maker.make(local, parameter.shape, bounds, whole, outer)

    def as_whole(self, flat: Tensor, i: int, parameter: Tensor) -> Tensor:
        """All elements that the engine's ranks share, 1-D, shown in the parameter's shape."""
        shape, strides = meshes.local_of(parameter).shape, self.engine.strides(i)
        part = flat.as_strided(shape, strides, flat.storage_offset())
        outer = Outer.of(parameter, strides)
        return part if outer is None else outer.present(part)

    def check_size(self, i: int, parameter: Tensor) -> list[int]:
        """Raise if the parameter was resized. Returns where each rank's part begins and ends."""
        bounds = self.engine.bounds(i)
        if (local := meshes.local_of(parameter)).numel() != bounds[-1]:
            raise RuntimeError(
                f"{self.groups.where}parameter '{self.engine.parameter_name(i)}' was resized to "
                f"{list(local.shape)}, it had {bounds[-1]} elements when it was sharded. "
                "Resize it before sharding."
            )
        return bounds

    def write_value(self, i: int, value: Tensor) -> None:
        """Give parameter i and its master the value that ``as_parameter`` shows. Collective."""
        part = value.gathered() if isinstance(value, shard_tensor.ShardTensor) else value
        self.engine.write_parameter(i, meshes.local_of(part))

    def _show_gradient(self, i: int, local: Tensor) -> tuple[Tensor, _C.Edits | None]:
        """The tensor for ``.grad``: this rank's slice of the sum, in the parameter's shape; and the
        edits mixed into it."""
        parameter = self.parameters[i]
        with torch.inference_mode(False), torch.no_grad():
            view = self.as_parameter(local, i, parameter)
            if type(view) is Tensor and view.device != parameter.device:
                view = view.as_subclass(HostGradient)
        return view, view.edits if isinstance(view, shard_tensor.ShardTensor) else None

    # States

    def refuse_forgotten_writes(self, what: str) -> None:
        """Raise inside ``summon_full_params(writeback=False)``, whose end would drop the written
        parameters and keep their masters."""
        if self.forgets_writes and self.engine.stage == 3:
            raise RuntimeError(
                f"{self.groups.where}{what} inside "
                "summon_full_params(writeback=False), which forgets writes. Leave it first."
            )

    def set_offloaded(self, states: Iterable[str]) -> None:
        """See ``zero_ext.offload_states``."""
        names = set(states)
        _log.debug("%soffloaded states: %s", self.groups.where, sorted(names) or "none")
        away = "optimizer_state" in names
        # Nothing is usable before all of it is back, also when memory runs out half-way.
        for optimizer in () if away else self.optimizers:
            optimizer.set_state_offloaded(False)
        self.engine.set_offloaded(names)
        for optimizer in self.optimizers if away else ():
            optimizer.set_state_offloaded(True)


def _set_local(handle: Handle, i: int, parameter: DTensor) -> None:
    row = handle.across_meshes.add(i, parameter)
    is_expert = meshes.is_cut_over(parameter, handle.groups.expert_mesh)
    handle.engine.set_local(i, meshes.local_of(parameter), row, is_expert)


def _check_equal_values(handle: Handle, plain: Named) -> None:
    """Raise where parameters that no other dimension knows differ between its ranks. Collective."""
    groups = handle.groups
    held = [(name, meshes.local_of(p)) for name, p in plain if not p.is_meta]
    # Else the values of another rank replace them.
    counts = not handle.options.sync_module_states or groups.rank == 0
    k = handle.across_meshes.find_unequal([p for _, p in held], 1e-6, counts=counts)
    if k is not None:
        raise ValueError(
            f"{groups.where}parameter '{held[k][0]}' is not cut by parallelize_module(), and its "
            "values differ between ranks of the plan's mesh, which train it as one. Seed these "
            "ranks alike before the model is made."
        )


def _check_equal_gradients(of_handle: weakref.ref[Handle]) -> None:
    """Raise where gradients differ that nothing sums over the other dimensions. Collective."""
    handle = of_handle()
    none = torch.zeros((), device=handle.groups.device)
    plain = [i for i, p in enumerate(handle.parameters) if type(p) is not DTensor]
    gradients = [none if (g := handle.parameters[i].grad) is None else g for i in plain]
    k = handle.across_meshes.find_unequal(meshes.locals_of(gradients), 1e-3)
    if k is not None:
        raise RuntimeError(
            f"{handle.groups.where}the gradient of '{handle.engine.parameter_name(plain[k])}' "
            "differs between ranks of the mesh of parallelize_module(), and nothing sums it over "
            "them. Nothing was updated. Put its module into the plan: SequenceParallel() for a "
            "norm whose input is cut along the sequence."
        )


def _local_part(gradient: Tensor) -> tuple[Tensor, _C.Edits]:
    """This rank's slice of what ``.grad`` is or was set to, and what was mixed into it."""
    if isinstance(gradient, shard_tensor.ShardTensor):
        return gradient.to_local(), gradient.edits
    raise TypeError(
        f"zero_ext: .grad was set to a {type(gradient).__name__}; set a ShardTensor of the same "
        "parameter or a plain tensor of its shape."
    )


def _make_unit(
    engine: _C.Engine, parameters: Sequence[Tensor], unit: UnitPlan, *, resident: bool = False
) -> int:
    """Returns its number in the engine. It can train, also if there is no memory for the next
    one."""
    trained = _C.UnitKind.resident if resident else _C.UnitKind.trainable
    kind = trained if unit.trainable else _C.UnitKind.frozen
    for i in unit.members:
        if type(parameters[i]) is not nn.Parameter:
            meshes.set_dtype(parameters[i], unit.dtype)
    number = engine.add_unit(unit.members, unit.dtype, kind)
    name, count = engine.unit_name_of(unit.members[0]), len(unit.members)
    _log.debug("zero_ext: %s unit '%s': %d parameters in %s", kind.name, name, count, unit.dtype)
    if unit.trainable and unit.gradient_is_fp32:
        engine.set_gradient_dtype(unit.members[0], torch.float32)
        for i in unit.members:
            parameters[i].grad_dtype = torch.float32
    return number


def _average(handle: Handle, i: int, gradient: Tensor | None) -> Tensor | None:
    """The average of the ranks' ``gradient``; None where no rank has one. Collective."""
    groups, divisor = handle.groups, handle.engine.gradient_divisor
    if handle.across_meshes is not None and gradient is not None:
        gradient = handle.across_meshes.local_gradient(i, gradient)
    if groups.world == 1:
        return None if gradient is None else gradient.float() / divisor
    is_expert = meshes.is_cut_over(handle.parameters[i], groups.expert_mesh)
    group = groups.experts.alike.get_group() if is_expert else groups.parent
    holders = torch.zeros((), dtype=torch.float32, device=groups.device)
    shape = meshes.local_of(handle.parameters[i]).shape
    total = torch.zeros(shape, dtype=torch.float32, device=groups.device)
    if gradient is not None:
        holders.fill_(1.0)
        total.copy_(gradient.detach())
    all_reduce_(holders, group)
    all_reduce_(total, group)
    return total / divisor if holders else None


@atexit.register
def _serve_until_all_ranks_end() -> None:
    """At exit a rank waits for the ranks that still read its stage 3 shards."""
    if hasattr(sys, "last_value"):  # this rank fails: the others must see that, not wait for it
        return
    for handle in registry.living():
        if handle.engine is not None:
            handle.engine.begin_shutdown()
    _C.wait_for_shutdowns(_EXIT_PATIENCE_S)
