"""Handle: the Python side of one engine, and the registry that finds it from a Parameter."""

import atexit
import datetime
import itertools
import math
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from zero_ext import _C
from zero_ext.engine import units
from zero_ext.engine.host_gradient import HostGradient
from zero_ext.engine.meta import MetaModules
from zero_ext.engine.module_hooks import OpenForwards, SiteHooks, watch_module
from zero_ext.ranks.groups import (
    CommGroups,
    Groups,
    all_reduce_,
    broadcast_,
    check_environment,
    check_same_on_all_ranks,
    shared_host_transport_allowed,
)
from zero_ext.tensor import shard_tensor

# Engines with stage 3, whose shards the other ranks may need until they end, too.
_serving: weakref.WeakSet = weakref.WeakSet()
_EXIT_PATIENCE_S = 60.0  # without a reader

# Parameter -> (weak reference to its Handle, index in the engine). Nothing is attached to the
# user's Parameter itself.
_registry = WeakIdKeyDictionary()

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _serve_until_all_ranks_end() -> None:
    if hasattr(sys, "last_value"):  # this rank fails: the others must see that, not wait for it
        return
    for handle in list(_serving):
        handle.engine.begin_shutdown()
    _C.wait_for_shutdowns(_EXIT_PATIENCE_S)


atexit.register(_serve_until_all_ranks_end)


def find(parameter: Tensor) -> tuple["Handle", int] | None:
    """The engine that shards ``parameter`` and its index there, or None."""
    entry = _registry.get(parameter)
    handle = entry[0]() if entry is not None else None
    return None if handle is None else (handle, entry[1])


def handle_of(sharded) -> "Handle":
    """Of a sharded module, or of one of its optimizers.

    Raises:
        ValueError, TypeError: ``sharded`` is neither.
    """
    if isinstance(sharded, nn.Module):
        places = map(find, sharded.parameters())
        handle = next((place[0] for place in places if place is not None), None)
    else:
        handle = getattr(sharded, "_handle", None)
    if isinstance(handle, Handle):
        return handle
    if isinstance(sharded, nn.Module):
        raise ValueError(f"zero_ext: this {type(sharded).__name__} is not sharded.")
    raise TypeError(
        f"zero_ext: expected a sharded module or an optimizer of zero_ext.optim, not "
        f"{type(sharded).__name__}."
    )


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    return any(find(parameter) is not None for parameter in parameters)


def stays_whole(parameter: Tensor) -> bool:
    """Frozen, in a dtype that nothing here computes with, such as quantised weights."""
    return not parameter.requires_grad and parameter.dtype not in _DTYPES


class Handle:
    """One engine over some parameters.

    A parameter that is frozen when it comes in stays as it is until it is unfrozen. ``whole``: the
    parameters that no engine can take, see ``stays_whole``; an error is raised when one of them is
    trained. ``buffers``: the buffers that will be broadcast.
    """

    def __init__(
        self,
        groups: Groups,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        stage: int,
        bucket_mb: float,
        reduction: str | None = None,
        reduce_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        accumulation_steps: int | None = None,
        sync_module_states: bool = True,
        used_several_times: Iterable[Tensor] = (),
        blocks: Sequence[units.Block] | None = None,
        prefetch_mb: float | None = None,
        retained_bytes: int | None = None,
        reshard_after_forward: bool = True,
        meta: MetaModules | None = None,
        offload_policy: OffloadPolicy,
        whole: Sequence[tuple[str, Tensor]] = (),
        buffers: Sequence[tuple[str, Tensor]] = (),
    ):
        if reduction not in (None, "exchange", "collective"):
            raise ValueError(
                f"zero_ext: reduction must be 'exchange' or 'collective', not {reduction!r}."
            )
        check_sizes(bucket_mb, prefetch_mb, retained_bytes)
        for dtype in (param_dtype, reduce_dtype):
            if dtype is not None and dtype not in _DTYPES:
                raise ValueError(f"zero_ext: {dtype} is not one of {_DTYPES}.")
        _check_stage(stage)
        if stage == 3 and blocks is None:
            raise ValueError(
                "zero_ext: stage 3 gathers parameters when their modules are entered, an optimizer "
                "alone does not see them. Call zero_ext.shard(model, stage=3) first, then make the "
                "optimizer without stage."
            )
        _check_accumulation_steps(accumulation_steps)
        _check_parameters(groups, parameters, meta_allowed=meta is not None)
        _check_one_device(groups, [*parameters, *whole])
        for name, parameter in whole:
            if parameter.is_meta:
                _refuse_dtype(groups, name, parameter)
        device = groups.device
        offload = isinstance(offload_policy, CPUOffloadPolicy)
        cut = [block.members for block in blocks] if blocks else None
        settings = (
            f"stage={stage} bucket_mb={bucket_mb} reduction={reduction} param_dtype={param_dtype} "
            f"reduce_dtype={reduce_dtype} accumulation_steps={accumulation_steps or 1} "
            f"sync_module_states={sync_module_states} offload={offload} shards={groups.shards} "
            f"units={cut}"
        )
        check_environment(groups)
        check_same_on_all_ranks(
            groups,
            [
                settings,
                *_describe([*parameters, *whole]),
                *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in buffers),
            ],
            "the models (or the arguments)",
        )
        self.groups = groups
        self.bucket_bytes = bucket_mb * 2**20
        self.param_dtype = param_dtype
        self._used_several_times = WeakIdKeyDictionary(dict.fromkeys(used_several_times, True))
        options = _C.EngineOptions()
        options.stage = stage
        options.reduce_dtype = reduce_dtype
        options.accumulation_steps = accumulation_steps or 1
        options.broadcast = sync_module_states
        options.limit_bytes = _limit_bytes()
        options.global_ranks = list(groups.global_ranks)
        options.device = device
        options.offload = offload and device.type != "cpu"
        options.pin_memory = getattr(offload_policy, "pin_memory", True)
        options.gather.prefetch_bytes = units.prefetch_bytes(
            blocks or (), [p for _, p in parameters], prefetch_mb, bucket_mb, param_dtype
        )
        options.gather.prefetch_from_local_peers = prefetch_mb is not None
        options.gather.retained_bytes = -1 if retained_bytes is None else int(retained_bytes)
        options.gather.reshard_after_forward = reshard_after_forward
        with CommGroups(groups) as comm:
            for group, name in comm.names.items():
                setattr(options, group, name)
            options.timeout_ms = comm.timeout // datetime.timedelta(milliseconds=1)
            options.shared_host_transport = shared_host_transport_allowed()
            options.reduction = getattr(_C.Reduction, reduction or comm.default_reduction)
            self.engine = _C.Engine(options)
        self.engine.set_local_reader(_local_part)
        show_gradient = weakref.WeakMethod(self._show_gradient)
        self.engine.set_view_maker(lambda i, local: show_gradient()(i, local))
        if stage == 3 and groups.world > 1:
            _serving.add(self)
        self.offload_policy = offload_policy
        # Whether verdicts about a step are made on the host.
        self.knows_on_host = device.type == "cpu" or options.offload
        self.forwards = OpenForwards()
        self.parameters: list[weakref.ref] = []
        self._whole: list[tuple[str, weakref.ref]] = []
        self.leave_whole(whole)
        self.optimizers: weakref.WeakSet = weakref.WeakSet()
        self.sharded_methods: weakref.ref | None = None  # of the module
        self.root_hooks: list[SiteHooks] = []  # of the module itself
        self.scaled_by: weakref.ref | None = None  # the optimizer whose loss_scaler the engine has
        self._unwatched: list[tuple[units.Block, list[int]]] = []
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
        for reference in self.parameters:
            parameter = reference()
            entry = None if parameter is None else _registry.get(parameter)
            if entry is not None and entry[0]() is self:
                del _registry[parameter]
        _serving.discard(self)
        self._unwatched = []
        try:
            if self.groups.shards == 1:
                self.engine.give_parameters_back()
        finally:
            self.engine = None

    def _register(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        first = len(self.parameters)
        self.engine.add_parameters([p for _, p in parameters], [name for name, _ in parameters])
        for i, (_, parameter) in enumerate(parameters, first):
            _registry[parameter] = (weakref.ref(self), i)
            self.parameters.append(weakref.ref(parameter))
        return list(range(first, len(self.parameters)))

    def _materialise(self, members: Sequence[int], meta: MetaModules) -> None:
        old = {i: self.parameters[i]() for i in members}
        for i, new in meta.materialise(old).items():
            if old[i] in self._used_several_times:
                self._used_several_times[new] = True
            self.engine.replace_parameter(i, new)
            _registry[new] = (weakref.ref(self), i)
            self.parameters[i] = weakref.ref(new)

    def parameter_shard(self, i: int) -> Tensor:
        """This rank's part of a parameter, shown in its shape."""
        return self.as_parameter(self.engine.parameter_slice(i), i, self.parameters[i]())

    def _make_blocks(self, blocks: Sequence[units.Block], meta: MetaModules | None) -> None:
        numbers: list[list[int]] = [[] for _ in blocks]
        for block, members in units.parts(blocks):
            if meta is not None:
                self._materialise(members, meta)
            numbers[block].extend(self._make_part(members))
        self._unwatched = list(zip(blocks, numbers, strict=True))

    def _make_part(self, part: Sequence[int]) -> list[int]:
        parameters = {i: self.parameters[i]() for i in part}
        numbers = []
        in_fp32 = {i for i, p in parameters.items() if self._gradient_is_fp32(p)}
        for members, dtype, trainable in units.split_block(part, parameters, in_fp32):
            dtype = self.param_dtype or dtype
            if trainable:
                numbers.append(self._make_unit(members, dtype, members[0] in in_fp32))
            else:
                numbers.append(self.engine.add_unit(members, dtype, _C.UnitKind.frozen))
        return numbers

    def _make_unit(self, members: Sequence[int], dtype: torch.dtype, in_fp32: bool) -> int:
        """One that can train, also if there is no memory for the next."""
        number = self.engine.add_unit(members, dtype, _C.UnitKind.trainable)
        for i in members:
            self.engine.make_published(i)
        if in_fp32:
            self.engine.set_gradient_dtype(self.engine.unit_count - 1, torch.float32)
            for i in members:
                self.parameters[i]().grad_dtype = torch.float32
        return number

    def _show_gradient(self, i: int, local: Tensor) -> Tensor:
        """What ``.grad`` is: this rank's slice of the sum, in the parameter's shape."""
        parameter = self.parameters[i]()
        with torch.inference_mode(False), torch.no_grad():
            view = self.as_parameter(local, i, parameter)
            if self.replicated and view.device != parameter.device:
                view = view.as_subclass(HostGradient)
        return view

    def watch_modules(self) -> None:
        """Gather and release units as their modules are entered and left, from now on."""
        unwatched, self._unwatched = self._unwatched, []  # which would keep the modules alive
        if not self.engine.releases:
            return
        for block, numbers in unwatched:
            for k, module in enumerate(block.modules):
                last = k == len(block.modules) - 1
                site = self.engine.add_hook_site(numbers, root=block.root, first=k == 0, last=last)
                hooks = SiteHooks(self.engine, site, self.forwards)
                watch_module(module, hooks)
                if block.root:
                    self.root_hooks.append(hooks)

    def add_parameters(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        """Take in more parameters; returns their indices. Collective."""
        indices = self._register(parameters)
        self._make_units([i for i in indices if self.parameters[i]().requires_grad])
        for i in indices:  # what is frozen computes with the others
            parameter = self.parameters[i]()
            if not parameter.requires_grad and self.param_dtype is not None:
                parameter.data = parameter.data.to(self.param_dtype)
        return indices

    def check_and_add(self, parameters: Sequence[tuple[str, Tensor]]) -> list[int]:
        """``add_parameters`` after the checks that a constructor makes."""
        if self.engine.stage == 3:
            raise ValueError(
                "zero_ext: parameters cannot be added to a module that is sharded with stage 3: no "
                "forward would gather them. Make them part of the module before sharding it."
            )
        _check_parameters(self.groups, parameters)
        _check_one_device(self.groups, parameters)
        check_same_on_all_ranks(self.groups, _describe(parameters), "the added parameters")
        return self.add_parameters(parameters)

    def refuse_forgotten_writes(self, what: str) -> None:
        """Raise where half of what is written now, the parameters without their masters, would go
        with the end of ``summon_full_params(writeback=False)``."""
        methods = self.sharded_methods and self.sharded_methods()
        if methods is not None and methods.forgets_writes:
            raise RuntimeError(
                f"{self.groups.where}{what} inside "
                "summon_full_params(writeback=False), which forgets writes. Leave it first."
            )

    def leave_whole(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Watch more parameters that ``stays_whole`` is true of."""
        self._whole.extend((name, weakref.ref(parameter)) for name, parameter in parameters)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into tensors that the engine does not hold. Collective."""
        for tensor in tensors if self.groups.world > 1 else ():
            # What was made in an inference may be written to in one alone.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                # Where it is expanded its elements have one place.
                one = [slice(0, 1) if expanded else slice(None) for expanded in expansion(tensor)]
                own = tensor.detach()[tuple(one)]
                dense = (
                    own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                )
                # No backend knows every dtype.
                broadcast_(dense.reshape(-1).view(torch.uint8), self.groups.parent, 0)
                own.copy_(dense)

    def _make_units(self, indices: Sequence[int]) -> None:
        # What arrives in fp32 travels in fp32: units of its own, so that the others do not.
        in_fp32 = {i for i in indices if self._gradient_is_fp32(self.parameters[i]())}
        self._make_units_of([i for i in indices if i not in in_fp32], in_fp32=False)
        self._make_units_of([i for i in indices if i in in_fp32], in_fp32=True)

    def _gradient_is_fp32(self, parameter: Tensor) -> bool:
        """Of a half-precision parameter: because the user wants it, or to add up its uses."""
        if (self.param_dtype or parameter.dtype) == torch.float32:
            return False
        wanted = parameter.dtype != torch.float32 and parameter.grad_dtype == torch.float32
        return wanted or parameter in self._used_several_times

    def _make_units_of(self, indices: Sequence[int], in_fp32: bool) -> None:
        members = [self.parameters[i]() for i in indices]
        dtypes = [self.param_dtype or p.dtype for p in members]
        # Two dtypes that become one are cut apart first: a unit's values come in one dtype.
        keys = [p.dtype for p in members]
        plans = units.cut_by_size([p.numel() for p in members], keys, self.bucket_bytes)
        for plan in plans:
            unit = [indices[i] for i in plan.members]
            self._make_unit(unit, dtypes[plan.members[0]], in_fp32)

    def as_parameter(self, local: Tensor, i: int, parameter: Tensor) -> Tensor:
        """This rank's 1-D part of some per-element value, shown in the parameter's shape."""
        if self.replicated:
            return local.as_strided(parameter.shape, self.engine.strides(i))
        return shard_tensor.make(
            local, parameter.shape, self.engine.bounds(i), self.groups.mesh, self.engine.strides(i)
        )

    @property
    def replicated(self) -> bool:
        """Every rank holds all of the optimizer's state: stage 0, or replicas of one rank."""
        return self.groups.shards == 1 or self.engine.stage == 0

    def adopt_unfrozen(self) -> list[int]:
        """Shard parameters that were frozen before and require a gradient now. Collective.

        A gradient that autograd has left in their ``.grad`` becomes what a reduction makes of it.

        Raises:
            TypeError: one of them ``stays_whole``.
        """
        for name, reference in self._whole:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                _refuse_dtype(self.groups, name, parameter)
        unfrozen = self.engine.unfrozen()
        if unfrozen:  # for training, even where a forward in inference mode notices it
            with torch.inference_mode(False), torch.no_grad():
                self._adopt(unfrozen)
        return unfrozen

    def _adopt(self, unfrozen: Sequence[int]) -> None:
        gradients = {i: self.parameters[i]().grad for i in unfrozen}
        totals = {i: self._average(i, gradient) for i, gradient in gradients.items()}
        by_block: dict[int, list[int]] = {}
        for i in unfrozen:
            self.parameters[i]().grad = None
            by_block.setdefault(self.engine.frozen_unit_of(i), []).append(i)
        try:
            for members in by_block.values():
                self._make_units(members)
        finally:  # those for which there is no memory stay as they were
            for i, total in totals.items():
                if self.engine.unit_of(i) < 0:
                    self.parameters[i]().grad = gradients[i]
                elif total is not None:
                    self.engine.write_gradient(i, total)

    def _average(self, i: int, gradient: Tensor | None) -> Tensor | None:
        """What a reduction makes of each rank's ``gradient``."""
        if self.groups.world == 1:
            return None if gradient is None else gradient.float() / self.engine.gradient_divisor
        device = self.groups.device
        holders = torch.tensor(0.0 if gradient is None else 1.0, dtype=torch.float32, device=device)
        shape = self.parameters[i]().shape
        total = torch.zeros(shape, dtype=torch.float32, device=device)
        if gradient is not None:
            total.copy_(gradient.detach())
        try:
            all_reduce_(holders, self.groups.parent)
            all_reduce_(total, self.groups.parent)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.groups.where}'{self.engine.parameter_name(i)}' was frozen "
                "when it came in and requires a gradient now. To shard it this rank waited for the "
                f"others, which must change requires_grad in the same places: {error}"
            ) from error
        return total / self.engine.gradient_divisor if holders else None

    def set_offloaded(self, states: Iterable[str]) -> None:
        """See ``zero_ext.offload_states``."""
        names = set(states)
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

    def check_forward(self) -> None:
        if "full" in self.engine.offloaded():
            raise RuntimeError(
                f"{self.groups.where}forward: the parameters of this model are "
                "offloaded. Call zero_ext.reload_states() first."
            )

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return self.engine.stats()


def check_sizes(
    bucket_mb: float, prefetch_mb: float | None = None, retained_bytes: float | None = None
) -> None:
    if not 0 < bucket_mb < math.inf:
        raise ValueError(f"zero_ext: bucket_mb must be positive and finite, not {bucket_mb}.")
    for name, value in (("prefetch_mb", prefetch_mb), ("retained_bytes", retained_bytes)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"zero_ext: {name} must be at least 0 and finite, not {value!r}.")


def _check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3) or not isinstance(stage, int) or isinstance(stage, bool):
        raise ValueError(
            f"zero_ext: there is no stage {stage!r}. Stage 1 shards the optimizer's state, stage 2 "
            "the gradients too, stage 3 the parameters as well (0 shards nothing)."
        )


def _limit_bytes() -> int:
    text = os.environ.get("ZERO_EXT_LIMIT_BYTES")
    if text is None:
        return sys.maxsize
    if not text.isdigit():
        raise ValueError(f"zero_ext: ZERO_EXT_LIMIT_BYTES={text!r} is not a number of bytes.")
    return int(text)


def _check_accumulation_steps(steps: int | None) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"zero_ext: accumulation_steps must be at least 1, not {steps!r}.")


def expansion(tensor: Tensor) -> list[bool]:
    """Of each dimension, whether all its elements are one in memory."""
    return [n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]


def check_buffers(groups: Groups, buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for one that ``broadcast`` cannot carry."""
    for name, buffer in buffers if groups.world > 1 else ():
        kind = None
        if buffer.layout != torch.strided:
            kind = str(buffer.layout)
        elif buffer.is_quantized or is_traceable_wrapper_subclass(buffer):
            kind = type(buffer).__name__ if not buffer.is_quantized else str(buffer.dtype)
        if kind is not None:
            raise TypeError(
                f"{groups.where}buffer '{name}' is {kind}, which is not broadcast."
                " Give all ranks the same values and pass sync_module_states=False."
            )


def _usable_devices() -> str:
    with_kernels = [d for d in ("cpu", "cuda") if _C.has_kernels_on(torch.device(d))]
    return " and ".join(with_kernels).upper()


def _check_one_device(groups: Groups, parameters: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in parameters:
        if parameter.device != groups.device and not parameter.is_meta:
            raise ValueError(
                f"{groups.where}parameter '{name}' is on {parameter.device}, "
                f"others are on {groups.device}. Move the model to one device before sharding it."
            )


def _how_to_shard_once(parameter: Tensor) -> str:
    handle, _ = find(parameter)
    if handle.sharded_methods is None:
        return "An optimizer of zero_ext.optim has done it: make the optimizer after shard()."
    return (
        "Shard a module once, not its layers one by one (units= says which are gathered together), "
        "and give its parameters to one optimizer."
    )


def _check_parameters(
    groups: Groups, parameters: Sequence[tuple[str, Tensor]], meta_allowed: bool = False
) -> None:
    for name, parameter in parameters:
        where = f"{groups.where}parameter '{name}'"
        if isinstance(parameter, DTensor):
            raise TypeError(
                f"{where} is a DTensor: another library (FSDP2, tensor parallelism) shards it "
                "already. Pass a plain module, before fully_shard()."
            )
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{where} has no shape yet. Run a forward of its lazy module before sharding it."
            )
        if is_traceable_wrapper_subclass(parameter):
            raise TypeError(
                f"{where} is a {type(parameter).__name__}, which wraps other tensors and cannot be "
                "cut. Leave it out (ignored_params)."
            )
        if find(parameter) is not None:
            raise ValueError(f"{where} is sharded already. {_how_to_shard_once(parameter)}")
        usable = parameter.is_meta if meta_allowed else False
        usable = usable or _C.has_kernels_on(parameter.device)
        if parameter.dtype not in _DTYPES or not usable:
            _refuse_dtype(groups, name, parameter)
        if parameter.layout != torch.strided:
            raise TypeError(f"{where} has layout {parameter.layout}; only dense ones can be cut.")
        if parameter.grad is not None:
            raise ValueError(
                f"{where} has a gradient already, which was never reduced. Call zero_grad() first."
            )
        if _C.reduced_by_ddp(parameter):
            raise ValueError(
                f"{where} is reduced by DistributedDataParallel already: its gradient would be "
                "averaged twice. Use the plain module (ddp.module before wrapping) without DDP."
            )
    _refuse_shared_memory(groups, parameters)


def _refuse_shared_memory(groups: Groups, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Each parameter gets memory of its own: what was tied by its memory alone would come apart."""
    pieces = []
    for name, parameter in parameters:
        value = parameter.detach()
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
        )
        if parameter.is_meta or value.numel() == 0 or extent != value.numel():  # has gaps
            continue
        begin = value.data_ptr()
        pieces.append((begin, begin + value.nbytes, name, parameter.requires_grad))
    pieces.sort(key=lambda piece: piece[:2])
    for (_, end, first, first_trains), (begin, _, second, second_trains) in itertools.pairwise(
        pieces
    ):
        if begin < end and (first_trains or second_trains):
            raise ValueError(
                f"{groups.where}parameters '{first}' and '{second}' are different ones "
                "in the same memory, which sharding would part. Make them one Parameter "
                "(b.weight = a.weight), or give one a copy."
            )


def _refuse_dtype(groups: Groups, name: str, parameter: Tensor) -> NoReturn:
    trains = parameter.requires_grad and parameter.dtype not in _DTYPES
    raise TypeError(
        f"{groups.where}parameter '{name}' is {parameter.dtype} on {parameter.device}; "
        f"this build trains {', '.join(map(str, _DTYPES))} on {_usable_devices()}. Convert it, "
        f"{'freeze it, ' if trains else ''}or leave it out (ignored_params)."
    )


def _describe(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [
        f"{name} {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        for name, p in parameters
    ]


def _local_part(gradient: Tensor) -> Tensor:
    if isinstance(gradient, shard_tensor.ShardTensor):
        return gradient.to_local()
    raise TypeError(
        f"zero_ext: .grad was set to a {type(gradient).__name__}; set a ShardTensor of the same "
        "parameter or a plain tensor of its shape."
    )
