"""Handle: the Python side of one engine."""

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zero_ext.engine import (
    checks,
    clipping,  # noqa: F401 (which changes torch's clipping)
    other_wrappers,  # noqa: F401 (which watches torch's wrappers)
)
from zero_ext.engine.host_gradient import HostGradient
from zero_ext.engine.inner_modules import InnerModules
from zero_ext.engine.meta import MetaModules
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.registry import ParameterTable, register_whole_gradient
from zero_ext.engine.released import begin_releasing, end_releasing, note_offloaded
from zero_ext.engine.shutdown import serving
from zero_ext.engine.unfreezing import make_trainable
from zero_ext.engine.unit_hooks import OpenForwards, SiteHooks, watch_module
from zero_ext.engine.unit_maker import UnitMaker, UnitPlanner
from zero_ext.engine.units import Block, parts, prefetch_bytes
from zero_ext.ranks import environment
from zero_ext.ranks.agreement import check_same_on_all_ranks
from zero_ext.ranks.collectives import copy_from_rank_0
from zero_ext.ranks.groups import Groups
from zero_ext.tensor import shard_tensor

_log = logging.getLogger(__name__)

_SAME_MODELS = "Build the same model and pass the same arguments on every rank."


class Handle:
    """One engine over some parameters.

    Args:
        parameters: With their names. A frozen one stays as it is until it is unfrozen.
        whole: The parameters that no engine can take, see ``stays_whole``. An error is raised when
            one of them is trained.
        buffers: The buffers that will be broadcast.
        blocks: How modules cut the parameters into units; None: by size.
        used_several_times: See ``units.used_several_times``.
        meta: The modules whose parameters are on the meta device.
    """

    def __init__(
        self,
        groups: Groups,
        parameters: Sequence[tuple[str, Tensor]],
        options: ShardingOptions,
        *,
        whole: Sequence[tuple[str, Tensor]] = (),
        buffers: Sequence[tuple[str, Tensor]] = (),
        blocks: Sequence[Block] | None = None,
        used_several_times: WeakIdKeyDictionary | None = None,
        meta: MetaModules | None = None,
    ):
        if options.stage == 3 and blocks is None:
            raise ValueError(
                "zero_ext: stage 3 gathers parameters when their modules are entered, an optimizer "
                "alone does not see them. Call zero_ext.shard(model, stage=3) first, then make the "
                "optimizer without stage."
            )
        checks.check_parameters(groups, parameters, whole=whole, meta_allowed=meta is not None)
        environment.check(groups)
        described = [*options.describe(groups), *checks.describe(*parameters, *whole)]
        described += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in buffers]
        described += [f"unit of parameters {block.members}" for block in blocks or ()]
        check_same_on_all_ranks(groups, described, "the models (or the arguments)", _SAME_MODELS)
        self.groups = groups
        self.options = options
        self.offload_policy = options.offload_policy
        # Whether every rank holds all of the optimizer's state: stage 0, or replicas of one rank.
        self.replicated = groups.shards == 1 or options.stage == 0
        ahead = prefetch_bytes(blocks or (), [p for _, p in parameters], options)
        self.engine = options.make_engine(groups, ahead)
        self.engine.set_local_reader(_local_part)
        show_gradient = weakref.WeakMethod(self._show_gradient)
        self.engine.set_view_maker(lambda i, local: show_gradient()(i, local))
        if options.stage == 3 and groups.world > 1:
            serving.add(self)
        # Whether verdicts about a step are made on the host.
        self.knows_on_host = groups.device.type == "cpu" or options.offloads
        self.forwards = OpenForwards()
        self.parameters = ParameterTable(self)
        self._used_several_times = used_several_times or WeakIdKeyDictionary()
        planner = UnitPlanner(self.parameters, options, self._used_several_times)
        self.units = UnitMaker(self.engine, planner)
        self.unfreezings = 0
        self._whole: list[tuple[str, weakref.ref]] = []
        self.leave_whole(whole)
        self.optimizers: weakref.WeakSet = weakref.WeakSet()
        self.sharded_methods: weakref.ref | None = None  # of the module
        self.root_hooks: list[SiteHooks] = []  # of the module itself
        self.scaled_by: weakref.ref | None = None  # the optimizer whose loss_scaler the engine has
        self._unwatched: list[tuple[Block, list[int]]] = []
        try:
            if blocks is None:
                self.add_parameters(parameters)
            else:
                self._register(parameters)
                self._make_blocks(blocks, meta)
        except BaseException:
            self.dissolve()
            raise

    def dissolve(self) -> None:
        """Let go of the parameters, although an exception's traceback may keep this alive."""
        end_releasing(self)
        self.parameters.unregister()
        serving.discard(self)
        self._unwatched = []
        self.root_hooks = []  # which hold the engine
        self.engine.retire()
        try:
            if self.groups.shards == 1:
                self.engine.give_parameters_back()
        finally:
            self.engine = self.units = None

    # Parameters and their units

    def _register(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        self.engine.add_parameters([p for _, p in parameters], [name for name, _ in parameters])
        return [self.parameters.add(parameter) for _, parameter in parameters]

    def add_parameters(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        """Take in more parameters; returns their indices. Collective."""
        indices = self._register(parameters)
        self.units.make_by_size([i for i in indices if self.parameters[i].requires_grad])
        for i in indices:  # what is frozen computes with the others
            parameter = self.parameters[i]
            if not parameter.requires_grad and self.options.param_dtype is not None:
                parameter.data = parameter.data.to(self.options.param_dtype)
        return indices

    def check_and_add(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        """``add_parameters`` after the checks that a constructor makes."""
        if self.engine.stage == 3:
            raise ValueError(
                "zero_ext: parameters cannot be added to a module that is sharded with stage 3: no "
                "forward would gather them. Make them part of the module before sharding it."
            )
        checks.check_parameters(self.groups, parameters)
        described = checks.describe(*parameters)
        check_same_on_all_ranks(self.groups, described, "the added parameters", _SAME_MODELS)
        return self.add_parameters(parameters)

    def leave_whole(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Watch more parameters that ``stays_whole`` is true of."""
        self._whole.extend((name, weakref.ref(parameter)) for name, parameter in parameters)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into tensors that the engine does not hold. Collective."""
        copy_from_rank_0(self.groups, tensors)

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
            make_trainable(self, unfrozen)
            self.unfreezings += 1

    def _make_blocks(self, blocks: Sequence[Block], meta: MetaModules | None) -> None:
        numbers: list[list[int]] = [[] for _ in blocks]
        for block, members in parts(blocks):
            if meta is not None:
                self._materialise(members, meta)
            numbers[block].extend(self.units.make_block(members))
        self._unwatched = list(zip(blocks, numbers, strict=True))

    def _materialise(self, members: Sequence[int], meta: MetaModules) -> None:
        old = {i: self.parameters[i] for i in members}
        for i, new in meta.materialise(old).items():
            if old[i] in self._used_several_times:
                self._used_several_times[new] = True
            self.engine.replace_parameter(i, new)
            self.parameters.replace(i, new)

    def watch_modules(self) -> None:
        """Gather and release units as their modules are entered and left, from now on."""
        unwatched, self._unwatched = self._unwatched, []  # which would keep the modules alive
        if not self.engine.releases:
            return
        begin_releasing(self)
        inner = InnerModules(self.engine, self.forwards)
        for block, numbers in unwatched:
            inside: list[int] = []
            for k, module in enumerate(block.modules):
                last = k == len(block.modules) - 1
                site = self.engine.add_hook_site(numbers, root=block.root, first=k == 0, last=last)
                hooks = SiteHooks(self.engine, site, self.forwards, inside)
                watch_module(module, hooks)
                if block.root:
                    self.root_hooks.append(hooks)
            inner.add_unit(block.modules, [self.parameters[i] for i in block.members], site, inside)
        inner.watch(unwatched[-1][0].modules[0])

    def reshard(self, keep_writes: bool) -> None:
        """Release what ``unshard()`` gathered. Collective."""
        if keep_writes:  # to this rank's shards, which other ranks may still be gathering
            self.engine.wait_for_shards()
        self.engine.reshard(keep_writes=keep_writes)
        if keep_writes or not self.engine.serves_one_alone:
            self.engine.wait_for_shards()

    # What a parameter's values look like

    @functools.cached_property
    def _maker(self) -> shard_tensor.Maker:
        return shard_tensor.Maker(self.groups.mesh, self.groups.global_ranks)

    def as_parameter(self, local: Tensor, i: int, parameter: Tensor) -> Tensor:
        """This rank's 1-D part of some per-element value, shown in the parameter's shape."""
        bounds = self.check_size(i, parameter)
        if self.replicated:
            return local.as_strided(parameter.shape, self.engine.strides(i))
        return self._maker.make(local, parameter.shape, bounds, self.engine.strides(i))

    def check_size(self, i: int, parameter: Tensor) -> list[int]:
        """Raise if the parameter was resized. Returns where each rank's part begins and ends."""
        bounds = self.engine.bounds(i)
        if parameter.numel() != bounds[-1]:
            raise RuntimeError(
                f"{self.groups.where}parameter '{self.engine.parameter_name(i)}' was resized to "
                f"{list(parameter.shape)}, it had {bounds[-1]} elements when it was sharded. "
                "Resize it before sharding."
            )
        return bounds

    def write_value(self, i: int, value: Tensor) -> None:
        """Give parameter i and its master the value that ``as_parameter`` shows. Collective."""
        whole = value.full_tensor() if isinstance(value, shard_tensor.ShardTensor) else value
        self.engine.write_parameter(i, whole)

    def parameter_shard(self, i: int) -> Tensor:
        """This rank's part of a parameter, shown in its shape."""
        return self.as_parameter(self.engine.parameter_slice(i), i, self.parameters[i])

    def _show_gradient(self, i: int, local: Tensor) -> Tensor:
        """What ``.grad`` is: this rank's slice of the sum, in the parameter's shape."""
        parameter = self.parameters[i]
        with torch.inference_mode(False), torch.no_grad():
            view = self.as_parameter(local, i, parameter)
            if self.replicated and view.device != parameter.device:
                view = view.as_subclass(HostGradient)
            if self.replicated:
                register_whole_gradient(view, self)
        return view

    # States

    def refuse_forgotten_writes(self, what: str) -> None:
        """Raise inside ``summon_full_params(writeback=False)``, whose end would drop the written
        parameters and keep their masters."""
        methods = self.sharded_methods and self.sharded_methods()
        if methods is not None and methods.forgets_writes:
            raise RuntimeError(
                f"{self.groups.where}{what} inside "
                "summon_full_params(writeback=False), which forgets writes. Leave it first."
            )

    def set_offloaded(self, states: Iterable[str]) -> None:
        """See ``zero_ext.offload_states``."""
        names = set(states)
        _log.debug("%soffloaded states: %s", self.groups.where, sorted(names) or "none")
        note_offloaded(self, bool(names))
        away = "optimizer_state" in names
        # Nothing is usable before all of it is back, also when memory runs out half-way.
        if not away:
            self._set_state_offloaded(False)
        self.engine.set_offloaded(names)
        if away:
            self._set_state_offloaded(True)

    def _set_state_offloaded(self, offloaded: bool) -> None:
        for optimizer in self.optimizers:
            optimizer._set_state_offloaded(offloaded)

    def stats(self) -> dict[str, int]:
        return self.engine.stats()


def _local_part(gradient: Tensor) -> Tensor:
    """This rank's slice of what a user has set as ``.grad``."""
    if isinstance(gradient, shard_tensor.ShardTensor):
        return gradient.to_local()
    raise TypeError(
        f"zero_ext: .grad was set to a {type(gradient).__name__}; set a ShardTensor of the same "
        "parameter or a plain tensor of its shape."
    )
