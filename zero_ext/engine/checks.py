"""Checks of parameters and buffers before they are sharded. A check that raises changes nothing."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import UninitializedParameter

from zero_ext import _C
from zero_ext._torch import FLATTENED, is_traceable_wrapper_subclass, spec_of, wrappers_of
from zero_ext.engine.low_precision import check_class
from zero_ext.engine.registry import Handle, RegistryEntry, find, find_all, living
from zero_ext.engine.units import Tree
from zero_ext.ranks.agreement import of_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.tensor.meshes import cutting_groups, is_cut_over, local_of, locals_of
from zero_ext.tensor.wrapped import has_gather_hooks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that parameters are trained in

Named = Sequence[tuple[str, Tensor]]  # parameters or buffers with their names


def check_module(module, verb: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"zero_ext: {verb} takes a module, not a {type(module).__name__}.")


def refuse_wrapped(tree: Tree) -> None:
    """Raise if another wrapper reduces gradients of a module, or will do it."""
    for module, kind in wrappers_of(tree.names).items():
        name = tree.names[module]
        which = f"submodule '{name}'" if name else "the module"
        raise ValueError(
            f"zero_ext: {which} is wrapped in {kind}, which handles its gradients already. "
            f"Shard the plain module instead, without {kind}."
        )


def reject_wrapper(groups: Groups, wrapper: str, name: str) -> NoReturn:
    """Raise that ``wrapper`` was put around a sharded module, found where ``name`` was."""
    raise RuntimeError(
        f"{groups.where}{wrapper} was put around parameters that are sharded, among them those of "
        f"'{name}'. Use the module without {wrapper}: its backward reduces the gradients."
    )


def check_number(name: str, value) -> None:
    """Raise for what cannot be compared with numbers, a string for example."""
    several = isinstance(value, Tensor) and value.numel() != 1
    if several or isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"zero_ext: {name} must be a number, not {value!r}.")


def check_positive(name: str, value, *, finite: bool = False) -> None:
    check_number(name, value)
    if not 0 < value <= math.inf or (finite and value == math.inf):
        kind = "positive and finite" if finite else "positive"
        raise ValueError(f"zero_ext: {name} must be {kind}, not {value}.")


def check_bool(name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"zero_ext: {name} must be True or False, not {value!r}.")


def check_count(name: str, value) -> None:
    """Raise for what counts nothing: a bool, a fraction, less than 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"zero_ext: {name} must be at least 1, not {value!r}.")


def check_state_dtype(state_dtype: str) -> None:
    if state_dtype not in ("fp32", "bf16", "int8"):
        raise ValueError(
            f"zero_ext: state_dtype must be 'fp32', 'bf16' or 'int8', not {state_dtype!r}."
        )


def stays_whole(parameter: Tensor) -> bool:
    """Whether every rank keeps all of it: it is frozen, in a dtype that nothing here computes with,
    such as quantised weights."""
    return not parameter.requires_grad and parameter.dtype not in DTYPES


def is_ignored(parameter: Tensor) -> bool:
    """Whether ``shard(ignored_params=)`` has left it alone, and no optimizer shards it."""
    ignored = (each for handle in living() for each in handle.ignored)
    return find(parameter) is None and any(each is parameter for each in ignored)


def describe(*parameters: tuple[str, Tensor]) -> list[str]:
    """A line for each parameter: the facts that ranks must agree on."""
    return [
        f"{name} {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        + ("" if type(p) is nn.Parameter else f" {type(p).__name__}")
        for name, p in parameters
    ]


def check_parameters(
    groups: Groups,
    parameters: Named,
    *,
    whole: Named = (),
    meta_allowed: bool = False,
) -> None:
    """Raise unless all ``parameters`` can be sharded beside those that stay ``whole``.

    Raises:
        ValueError, TypeError: naming the first parameter that cannot be.
    """
    tensors = [p for _, p in parameters]
    usable = set(filter(_C.has_kernels_on, {p.device for p in tensors}))
    for (name, p), entry in zip(parameters, find_all(tensors), strict=True):
        if type(p) is DTensor:
            _check_distributed(groups, name, p)
        elif type(p) is not nn.Parameter:
            _check_class(f"{groups.where}parameter '{name}'", p)
        is_new = entry is None and p.grad is None and not getattr(p, FLATTENED, False)
        can_be_used = p.device in usable or (meta_allowed and p.is_meta)
        if not is_new or p.layout != torch.strided or p.dtype not in DTYPES or not can_be_used:
            _reject(groups, name, p, entry, meta_allowed)
    first = _C.count_before_first_of_ddp(tensors)
    if first < len(parameters):
        raise ValueError(
            f"{groups.where}parameter '{parameters[first][0]}' is reduced by "
            "DistributedDataParallel already: its gradient would be averaged twice. Use the plain "
            "module (ddp.module before wrapping) without DDP."
        )
    _check_memory_of_their_own(groups, parameters)
    for name, parameter in (*parameters, *whole):
        if parameter.device != groups.device and not parameter.is_meta:
            raise ValueError(
                f"{groups.where}parameter '{name}' is on {parameter.device}, "
                f"others are on {groups.device}. Move the model to one device before sharding it."
            )
    for name, parameter in whole:
        if parameter.is_meta:
            reject_dtype(groups, name, parameter)


def _check_distributed(groups: Groups, name: str, parameter: DTensor) -> None:
    where = f"{groups.where}parameter '{name}' is a DTensor"
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where} on {mesh}, which is without this rank.")
    if not all(type(each) in (Shard, Replicate) for each in placements):
        raise TypeError(
            f"{where} with placements {placements}: only Shard and Replicate can be sharded."
        )
    if has_gather_hooks(local_of(parameter)):
        raise TypeError(
            f"{where} of a {type(local_of(parameter)).__name__}, which has hooks around gathers: "
            "zero_ext calls them for plain parameters alone. Leave the class out of modules that "
            "parallelize_module() cuts."
        )
    both = set(mesh.mesh.flatten().tolist()) & set(groups.global_ranks)
    if is_cut_over(parameter, groups.expert_mesh):
        _check_expert(where, groups, parameter, both)
    elif groups.world > 1 and both != {groups.global_rank}:
        raise ValueError(
            f"{where} that parallelize_module() or fully_shard() has cut over ranks "
            f"{mesh.mesh.tolist()}, and sharding over {list(groups.global_ranks)} would cut it "
            "again. Shard over the mesh's other dimension, such as mesh=mesh['dp'], and without "
            "fully_shard(). If it is of experts, pass their dimension as expert_mesh."
        )


def _check_expert(where: str, groups: Groups, parameter: DTensor, both: set[int]) -> None:
    cut = groups.expert_mesh.mesh.flatten().tolist()
    if both != set(cut):
        raise ValueError(
            f"{where} on ranks {parameter.device_mesh.mesh.tolist()}, of which sharding over "
            f"{list(groups.global_ranks)} may know those of expert_mesh={cut} alone."
        )
    over = [dist.get_process_group_ranks(g) for g in cutting_groups(spec_of(parameter))]
    if cut not in over:
        raise TypeError(
            f"{where} with placements {parameter.placements}, which does not cut it over "
            f"expert_mesh={cut}. Make what all of its ranks share a plain parameter: its gradient "
            "is averaged over them."
        )


def check_order(groups: Groups, named: Named) -> None:
    """Raise if ranks list equal parameters, by the first value of each, in other orders: only their
    places tell them apart. Collective."""
    if groups.world == 1:
        return
    plain = [p.detach() for _, p in named if type(p) in (Tensor, nn.Parameter) and p.numel()]
    firsts = [p[(0,) * p.dim()].item() for p in plain]
    texts = repr(firsts), repr(sorted(firsts, key=repr))
    own = [hashlib.sha256(text.encode()).digest() for text in texts]
    found = of_all_ranks(own, groups, "comparing parameters")
    if len({ordered for ordered, _ in found}) > len({values for _, values in found}):
        raise ValueError(
            f"{groups.where}ranks list the same parameters in different orders, and only places "
            "tell them apart. Pass a list in the order of model.parameters(), which no set has."
        )


def _check_class(where: str, parameter: Tensor) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"{where} has no shape yet. Run a forward of its lazy module before sharding it."
        )
    if has_gather_hooks(parameter):
        check_class(where, parameter)
    elif is_traceable_wrapper_subclass(parameter):
        raise TypeError(
            f"{where} is a {type(parameter).__name__}, which wraps other tensors and cannot be "
            "cut. Leave it out (ignored_params)."
        )


def _reject(
    groups: Groups,
    name: str,
    parameter: Tensor,
    entry: RegistryEntry | None,
    meta_allowed: bool,
) -> NoReturn:
    """Raise that a parameter cannot be sharded. ``entry``: of the handle that shards it."""
    where = f"{groups.where}parameter '{name}'"
    if getattr(parameter, FLATTENED, False):
        raise TypeError(
            f"{where} is flattened by FullyShardedDataParallel, which shards it already. Pass a "
            "plain module, before FullyShardedDataParallel()."
        )
    if entry is not None:
        raise ValueError(f"{where} is sharded already. {_how_to_shard_once(*entry)}")
    if parameter.is_meta and not meta_allowed:
        raise TypeError(
            f"{where} is on the meta device, where it has no values. Shard the module with stage 3,"
            " or give it values before (module.to_empty(device=...) and an initialisation)."
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"{where} has layout {parameter.layout}; only dense ones can be cut.")
    if parameter.grad is not None:
        raise ValueError(
            f"{where} has a gradient already, which was never reduced. Call zero_grad() first."
        )
    reject_dtype(groups, name, parameter)


def _how_to_shard_once(handle: Handle, i: int) -> str:
    if handle.sharded_methods is None or i >= handle.planned:
        return (
            "An optimizer of zero_ext.optim has done it: make it after shard() or prepare(model)."
        )
    return (
        "Shard a module once, not its layers one by one (units= says which are gathered together), "
        "and models that share parameters as one: nn.ModuleList([one, another])."
    )


def reject_dtype(groups: Groups, name: str, parameter: Tensor) -> NoReturn:
    """Raise that ``parameter`` cannot be trained in its dtype on its device."""
    with_kernels = [d for d in ("cpu", "cuda") if _C.has_kernels_on(torch.device(d))]
    trains = parameter.requires_grad and parameter.dtype not in DTYPES
    raise TypeError(
        f"{groups.where}parameter '{name}' is {parameter.dtype} on {parameter.device}; this build "
        f"trains {', '.join(map(str, DTYPES))} on {' and '.join(with_kernels).upper()}. Convert "
        f"it{', freeze it' if trains else ''}, or leave it out (ignored_params)"
        f"{' and average its gradient yourself' if trains else ''}."
    )


def _check_memory_of_their_own(groups: Groups, parameters: Named) -> None:
    """Sharding moves each parameter into other memory. Two trained ones that are tied only by
    lying in the same memory would no longer be equal."""
    memory = [
        (p.data_ptr(), p.data_ptr() + p.nbytes, k)
        for k, p in enumerate(locals_of([p for _, p in parameters]))
        if not p.is_meta and p.numel() > 0 and (p.is_contiguous() or not _has_gaps(p))
    ]
    for (_, end, k), (begin, _, m) in itertools.pairwise(sorted(memory)):
        (first, one), (second, other) = parameters[k], parameters[m]
        if begin < end and (one.requires_grad or other.requires_grad):
            raise ValueError(
                f"{groups.where}parameters '{first}' and '{second}' are different ones "
                "in the same memory, which sharding would part. Make them one Parameter "
                "(b.weight = a.weight), or give one a copy."
            )


def _has_gaps(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) != tensor.numel()


def check_buffers(groups: Groups, buffers: Named) -> None:
    """Raise for a buffer that rank 0 cannot broadcast."""
    for name, buffer in buffers if groups.world > 1 else ():
        kind = None
        if buffer.layout != torch.strided:
            kind = str(buffer.layout)
        elif buffer.is_quantized:
            kind = str(buffer.dtype)
        elif type(buffer) is not Tensor and is_traceable_wrapper_subclass(buffer):
            kind = type(buffer).__name__
        if kind is not None:
            raise TypeError(
                f"{groups.where}buffer '{name}' is {kind}, which is not broadcast."
                " Give all ranks the same values and pass sync_module_states=False."
            )
