"""The first use of noted modules: one ``zero_ext.shard`` for all inside an outermost one.

See Note [When modules are sharded] in notes.py.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from zero_ext._torch import disable_compilation, tree_leaves, tree_map_only
from zero_ext.engine.carried import Carried, CarriedReplacement
from zero_ext.engine.registry import handle_of
from zero_ext.engine.unit_hooks import ModuleCall, hooks_of
from zero_ext.fsdp.notes import Note, NotedEngine, note_of, notes_in, roots_around
from zero_ext.module.forward_methods import register_forward_method
from zero_ext.module.sharding import shard
from zero_ext.tensor.wrapped import follow, has_gather_hooks, inner_of

# Methods of a sharded module for which FSDPModule has its own.
_OWN_METHODS = ("unshard", "reshard", "set_gradient_divide_factor")


class FirstCall(ModuleCall):
    """The call of a noted module: shards, and then calls what sharding has put in its place."""

    @disable_compilation
    def __call__(self, *args, **kwargs):
        module = self._module()
        use(module)
        return module(*args, **kwargs)

    def compile_as(self, compiled: Callable) -> None:
        """``compiled`` is what the user has compiled of the module."""
        self._compiled = compiled


class InputsToDevice(Carried):
    """A hook before the forward of a root: its inputs may be on the host, as with FSDP2."""

    def __init__(self, device: torch.device):
        self._device = device

    @disable_compilation
    def __call__(self, module: nn.Module, args, kwargs):
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if all(each.device == self._device for each in tensors):
            return None
        return tree_map_only(Tensor, lambda each: each.to(self._device), (args, kwargs))


class FirstMethod(CarriedReplacement):
    """The first call of a method that ``register_fsdp_forward_method`` was called for."""

    @disable_compilation
    def __call__(self, *args, **kwargs):
        module = self._module()
        use(module)
        return getattr(module, self._name)(*args, **kwargs)


def use(module: nn.Module) -> None:
    """Shard what waits around ``module``. Collective, if something does."""
    if note_of(module).engine is None:
        shard_noted(roots_around(module))


def shard_noted(roots: Sequence[nn.Module]) -> None:
    """Shard ``roots`` and what is noted inside them with one engine. Collective.

    Raises:
        ValueError, TypeError, RuntimeError: they cannot be sharded together. Nothing has changed.
    """
    notes = notes_in(roots)
    expert_mesh = _expert_mesh(notes)
    _check_together(notes, roots, has_experts=expert_mesh is not None)
    noted = {module: note for note in notes for module in note.living()}
    keys = {m: f"call {k} of fully_shard" for k, note in enumerate(notes) for m in note.living()}
    root = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
    keys.pop(root, None)
    policies = _policies(root, noted)
    for note in notes:
        move_to_device(note)

    def reshards(name: str, module: nn.Module) -> bool:
        return module not in noted or noted[module].reshard_after_forward is not False

    with _as_plain(noted, notes):
        shard(
            root,
            stage=3,
            mesh=notes[0].mesh,
            expert_mesh=expert_mesh,
            units=(lambda name, module: keys.get(module, False)) if keys else (),
            mp_policy=lambda name, module: policies.get(module),
            offload_policy=notes[0].offload_policy,
            reshard_after_forward=reshards,
            ignored_params=[p for note in notes for p in note.ignored_parameters()],
            sync_module_states=False,
        )
    _take_over(root, roots, notes)


def _expert_mesh(notes: Sequence[Note]) -> DeviceMesh | None:
    """The dimension that cuts experts, where the calls on another mesh than the first one are for
    experts: together these two meshes are the first one."""
    around = notes[0].mesh
    others = [note for note in notes if note.mesh != around]
    if not others:
        return None
    ranks = set(range(dist.get_world_size()) if around is None else around.mesh.flatten().tolist())
    cuts = set()
    for note in others:
        parameters = [p for module in note.living() for p in module.parameters()]
        mine = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
        cut = mine.pop() if len(mine) == 1 else None
        if cut is None or note.mesh is None or cut.ndim != 1 or note.mesh.ndim != 1:
            return None
        alike, apart = (set(mesh.mesh.tolist()) for mesh in (note.mesh, cut))
        fits = alike | apart <= ranks and alike & apart == {dist.get_rank()}
        if not fits or len(alike) * len(apart) != len(ranks):
            return None
        cuts.add(cut)
    return cuts.pop() if len(cuts) == 1 else None


def _check_together(
    notes: Sequence[Note], roots: Sequence[nn.Module], *, has_experts: bool
) -> None:
    """Raise where one engine cannot do what the calls have asked for."""
    inside = {module for root in roots for module in root.modules()}
    for note in notes:
        if note.engine is not None or not inside.issuperset(note.living()):
            raise RuntimeError(
                f"zero_ext: fully_shard: {note.name} was used before the call for the module "
                "around it, or is in one call with modules of another model. Call fully_shard() "
                "bottom-up, up to the outermost module, before the first use."
            )
        for what in ("offload_policy",) if has_experts else ("mesh", "offload_policy"):
            own, first = getattr(note, what), getattr(notes[0], what)
            if own != first:
                raise NotImplementedError(
                    f"zero_ext: fully_shard: {what}={own} for {note.name}, and {first} for "
                    f"{notes[0].name}. Calls for modules inside one another need the same. To "
                    "shard a part in another way, call zero_ext.shard() for it, and pass its "
                    "parameters as ignored_params."
                )
    for root in roots:
        for name, parameter in root.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(
                    f"zero_ext: parameter '{name}' of {type(root).__name__} is on the meta device. "
                    "Call module.to_empty(device=...) and initialise it before its first use."
                )


def _policies(
    root: nn.Module, noted: dict[nn.Module, Note]
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Gradients are reduced in one dtype. fp32 serves calls that say nothing, which FSDP2 would
    reduce in what they compute in."""
    said = {note.mp_policy.reduce_dtype for note in noted.values()}
    if len(said) > 1 and said != {None, torch.float32}:
        raise ValueError(
            f"zero_ext: fully_shard: calls give reduce_dtype={' and '.join(map(str, said))}. All "
            "gradients are reduced in one dtype: give every call the same."
        )
    one = next(iter(said - {None}), None)
    given = {root: MixedPrecisionPolicy(), **{m: note.mp_policy for m, note in noted.items()}}
    return {m: dataclasses.replace(policy, reduce_dtype=one) for m, policy in given.items()}


def move_to_device(note: Note) -> None:
    """As FSDP2: what the note is about moves to the mesh's device, except from the meta device."""
    kind = None if note.mesh is None else note.mesh.device_type
    if kind is None and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
    if kind in (None, "cpu"):
        device = torch.device("cpu")
    else:
        device = torch.device(kind, torch.accelerator.current_device_index())
    ignored = set(map(id, note.ignored_parameters()))
    for module in note.living():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device != device and not tensor.is_meta and id(tensor) not in ignored:
                if has_gather_hooks(tensor):
                    inner_of(tensor).data = inner_of(tensor).to(device)
                    follow(tensor, inner_of(tensor))
                else:
                    tensor.data = tensor.to(device)


@contextlib.contextmanager
def _as_plain(noted: dict[nn.Module, Note], notes: Sequence[Note]) -> Iterator[None]:
    """Without what a call has given its modules: their class, and what waits for the first use."""
    classes = {module: type(module) for module in noted}
    methods = [each for note in notes for each in note.forward_methods]
    saved = [(module.__dict__, {**module.__dict__}) for module in noted]
    for module, kind in classes.items():
        module.__class__ = kind.zero_plain_class
        remove_first(module, "_compiled_call_impl")
    for owner, name in methods:
        remove_first(owner(), name)
    try:
        yield
    except BaseException:
        for attributes, before in saved:
            attributes.update(before)
        raise
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


def remove_first(module: nn.Module, name: str) -> None:
    first = module.__dict__.get(name)
    if isinstance(first, FirstCall | FirstMethod):
        del module.__dict__[name]
        if (own := first.replaced()) is not None:
            module.__dict__[name] = own


def _take_over(root: nn.Module, roots: Sequence[nn.Module], notes: Sequence[Note]) -> None:
    """The methods of FSDPModule reach the engine from now on."""
    alone = note_of(root) is not None
    engine = NotedEngine(handle_of(root), notes, roots, None if alone else root)
    if alone:
        for name in _OWN_METHODS:
            del root.__dict__[name]
    for note in notes:
        sites = [site for module in note.living() for site in hooks_of(module)]
        note.engine, note.site = engine, next(iter(sites), None)
        if note.site is not None:
            note.site.set_reshard_after_backward(note.reshard_after_backward)
        for owner, name in note.forward_methods:
            register_forward_method(owner(), name)
    engine.follow_divide_factors()
    if (device := engine.handle.groups.device).type != "cpu":
        for each in roots:
            each.register_forward_pre_hook(InputsToDevice(device), prepend=True, with_kwargs=True)
