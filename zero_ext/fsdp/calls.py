"""The functions of FSDP2."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from zero_ext import _torch
from zero_ext.engine.options import check_policy
from zero_ext.engine.registry import any_sharded
from zero_ext.fsdp import optimizers, pipelines
from zero_ext.fsdp.first_use import FirstCall, FirstMethod, move_to_device
from zero_ext.fsdp.fsdp_module import FSDPModule, check_fsdp_modules, fsdp_class_of
from zero_ext.fsdp.notes import Note, is_inside, note_of, outermost
from zero_ext.module import plain_copies
from zero_ext.module.forward_methods import register_forward_method
from zero_ext.module.policies import check_mp_policy
from zero_ext.ranks.groups import rank_and_world

_Modules = TypeVar("_Modules", nn.Module, list[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> _Modules:
    """FSDP2's ``fully_shard``: the parameters of ``module`` become a unit. Call it bottom-up.

    What is inside an outermost module is sharded together with stage 3 when it is first used: by a
    forward, by ``state_dict()``, or when an optimizer of its parameters is made. That is
    collective. The Parameters stay the same objects, and the module's class becomes a subclass of
    itself and of ``FSDPModule``. The next optimizers of torch's classes are adopted by their first
    step.

    Args:
        module: A module, or a list of modules that are one unit.
        mesh: The ranks to shard over, in one dimension, or two for HSDP. Default: all. Of experts,
            which are DTensors: those of these ranks that have the same ones.
        reshard_after_forward: Release the unit between forward and backward. A number of ranks
            must mean True or False: all ranks of a replica, or 1.
        shard_placement_fn: May return None or ``Shard(dim)``, which changes nothing that is
            visible: ranks hold equal parts of flat units.
        mp_policy: Of this unit. All units are reduced in one ``reduce_dtype``.
        offload_policy: The same for all units.
        ignored_params: Parameters inside ``module`` to leave alone.
        dp_mesh_dims: None. Pass a mesh of the data dimensions.
    Returns:
        ``module``.
    Raises:
        ValueError, TypeError: an argument is wrong, a call came before one for a module inside, or
            the module is sharded already.
        NotImplementedError: FSDP2 knows it, and there is no counterpart here.
    """
    modules = outermost([module] if isinstance(module, nn.Module) else list(module))
    ignored = set(map(id, ignored_params or ()))
    _check_modules(modules, ignored)
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "zero_ext: fully_shard: dp_mesh_dims has no counterpart. Pass the mesh of the data "
            "dimensions: mesh=whole_mesh['dp'], or mesh=whole_mesh['replicate', 'shard']."
        )
    check_mp_policy(mp_policy)
    if shard_placement_fn is not None:
        _check_placements(shard_placement_fn, modules, ignored)
    note = Note(
        modules=[weakref.ref(each) for each in modules],
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=check_policy(offload_policy),
        ignored=[
            (weakref.ref(owner), key)
            for each in modules
            for owner in each.modules()
            for key, p in owner._parameters.items()
            if id(p) in ignored
        ],
        reshard_after_forward=_checked_reshard(reshard_after_forward, mesh),
    )
    move_to_device(note)
    _torch.after_making_optimizers(optimizers.follow)
    note.leave()
    for each in modules:
        each.__class__ = fsdp_class_of(type(each))
        FirstCall(each).attach(each)
        pipelines.attach(each)
    plain_copies.attach(modules)
    return module


def _check_modules(modules: Sequence[nn.Module], ignored: set[int]) -> None:
    if not modules:
        raise ValueError("zero_ext: fully_shard() takes a module, or a list of at least one.")
    for each in modules:
        name = type(each).__name__
        if isinstance(each, FSDPModule):
            raise ValueError(f"zero_ext: fully_shard() was called for this {name} already.")
        has_forward = type(each).forward is not nn.Module.forward
        if isinstance(each, nn.ModuleList | nn.ModuleDict) and not has_forward:
            raise ValueError(
                f"zero_ext: fully_shard: a {name} has no forward. Call it for the modules in it."
            )
        if is_inside(each):
            raise ValueError(
                f"zero_ext: fully_shard() was called for a module around this {name}. Call it for "
                "the modules inside first."
            )
        if any_sharded(p for p in each.parameters() if id(p) not in ignored):
            raise ValueError(
                f"zero_ext: parameters of this {name} are sharded already, or were used before. "
                "Call fully_shard() bottom-up for all modules before the first use."
            )


def _check_placements(
    placement_of: Callable[[nn.Parameter], Any], modules: Sequence[nn.Module], ignored: set[int]
) -> None:
    for module in modules:
        for name, parameter in module.named_parameters():
            placement = None if id(parameter) in ignored else placement_of(parameter)
            if placement is not None and not isinstance(placement, Shard):
                raise NotImplementedError(
                    f"zero_ext: fully_shard: shard_placement_fn returns {placement} for '{name}'. "
                    "A mesh of its own for a parameter has no counterpart: return None or Shard."
                )


def _checked_reshard(reshard: bool | int | None, mesh: DeviceMesh | None) -> bool | None:
    if reshard is None or isinstance(reshard, bool):
        return reshard
    _, world = rank_and_world()
    shards = world if mesh is None else mesh.size(-1)
    if not isinstance(reshard, int) or reshard < 1 or shards % reshard:
        raise ValueError(
            f"zero_ext: fully_shard: reshard_after_forward must be True, False or a divisor of "
            f"{shards}, not {reshard!r}."
        )
    if reshard not in (1, shards):
        raise NotImplementedError(
            f"zero_ext: fully_shard: reshard_after_forward={reshard} of {shards} ranks has no "
            "counterpart. Pass True or False, or a mesh of two dimensions."
        )
    return reshard != 1


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name()`` like a forward. Without effect if no FSDPModule is given.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"zero_ext: {type(module).__name__} has no method '{method_name}'.")
    note = note_of(module)
    if note.engine is not None:
        register_forward_method(module, method_name)
        return
    note.forward_methods.append((weakref.ref(module), method_name))
    module.__dict__[method_name] = FirstMethod(module, method_name)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Has no effect but checks: streams are those of the process.

    Raises:
        ValueError: one of ``modules`` is no FSDPModule.
    """
    check_fsdp_modules(modules)
