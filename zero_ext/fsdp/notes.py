"""Notes: what calls of ``fully_shard`` have asked for, until their modules are sharded.

Note [When modules are sharded]
A call cannot know whether an outer one follows. So it leaves a note on its modules, and all modules
inside an outermost noted one are sharded together when one of them is first used: by its forward,
by ``state_dict()``, ``load_state_dict()``, ``unshard()``, or when an optimizer of their parameters
is made. The Parameter objects stay, so nobody needs to see when that happens.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils.hooks import RemovableHandle

from zero_ext.engine.carried import Carried, CarriedMethod
from zero_ext.engine.handle import Handle
from zero_ext.engine.unit_hooks import SiteHooks

_ATTRIBUTE = "_zero_fsdp_note"
# The notes whose modules are not sharded yet, in the order of the calls.
_waiting: "list[weakref.ref[Note]]" = []
# For modules inside a call's modules, the note of the last such call.
_inside: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Note]]" = weakref.WeakKeyDictionary()
_engines: "weakref.WeakSet[NotedEngine]" = weakref.WeakSet()


@dataclass(eq=False)
class Note(Carried):
    """One call of ``fully_shard``. Its modules carry it, and it holds them weakly.

    Attributes:
        ignored: The modules and keys of parameters that are left alone.
        reshard_after_forward: None: the default.
        divide_factor: None: the number of ranks.
        engine: What has sharded the modules; None before.
        site: Where the units are gathered; None where all parameters belong to inner notes.
        end_of_unshard: The hook of a forward that ends what ``unshard()`` has begun.
    """

    modules: list[weakref.ref[nn.Module]]
    mesh: DeviceMesh | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored: list[tuple[weakref.ref[nn.Module], str]]
    reshard_after_forward: bool | None
    reshard_after_backward: bool = True
    divide_factor: float | None = None
    forward_methods: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    engine: "NotedEngine | None" = None
    site: SiteHooks | None = None
    end_of_unshard: RemovableHandle | None = None

    def leave(self) -> None:
        """On the modules of the call."""
        for module in self.living():
            module.__dict__[_ATTRIBUTE] = self
            _inside.update((m, weakref.ref(self)) for m in module.modules() if m is not module)
        _waiting.append(weakref.ref(self))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return type(None), ()

    @property
    def name(self) -> str:
        """For messages."""
        return " and ".join(type(module).__name__ for module in self.living())

    def living(self) -> list[nn.Module]:
        return [module for each in self.modules if (module := each()) is not None]

    def ignored_parameters(self) -> Iterator[Tensor]:
        for owner, key in self.ignored:
            parameter = getattr(owner(), "_parameters", {}).get(key)
            if parameter is not None:
                yield parameter


class NotedEngine:
    """One engine, and the notes of what it has sharded.

    ``holder``: the list that was sharded where there is no single root. Nothing else holds it.
    """

    def __init__(
        self,
        handle: Handle,
        notes: Sequence[Note],
        roots: Sequence[nn.Module],
        holder: nn.ModuleList | None,
    ):
        self.handle, self._holder = handle, holder
        self._notes = [weakref.ref(note) for note in notes]
        self._roots = [weakref.ref(root) for root in roots]
        self._rejecting: list[RemovableHandle] = []
        _engines.add(self)

    def follow_divide_factors(self) -> None:
        """Set the factor that all notes have. Until they have one, a forward raises."""
        for hook in self._rejecting:
            hook.remove()
        self._rejecting.clear()
        factors = {note.divide_factor for note in self._with_units()}
        if factors == {None, self.handle.groups.world}:  # by which the others are divided, too
            factors.discard(None)
        if len(factors) > 1:
            hook = CarriedMethod(self._reject_factors)
            roots = [root for each in self._roots if (root := each()) is not None]
            self._rejecting += [root.register_forward_pre_hook(hook) for root in roots]
        elif (factor := next(iter(factors), None)) is not None:
            self.handle.engine.set_divide_factor(factor)

    def _with_units(self) -> list[Note]:
        return [note for each in self._notes if (note := each()) is not None and note.site]

    def _reject_factors(self, module: nn.Module, args: Any) -> NoReturn:
        first = {note.divide_factor: note.name for note in reversed(self._with_units())}
        each = ", ".join(f"{name}: {factor}" for factor, name in first.items())
        raise NotImplementedError(
            f"zero_ext: set_gradient_divide_factor: modules have different factors ({each}; None "
            "is the number of ranks). Call it with one factor for every FSDPModule."
        )


def note_of(module: nn.Module) -> Note | None:
    return module.__dict__.get(_ATTRIBUTE)


def waiting() -> list[Note]:
    notes = [note for each in _waiting if (note := each()) is not None and note.engine is None]
    _waiting[:] = map(weakref.ref, notes)
    return notes


def notes_in(modules: Iterable[nn.Module]) -> list[Note]:
    """The notes of ``modules`` and of all modules in them, each once."""
    found = (note_of(each) for module in modules for each in module.modules())
    return list(dict.fromkeys(note for note in found if note is not None))


def is_inside(module: nn.Module) -> bool:
    """Whether a call was made for a module around this one."""
    note = _inside[module]() if module in _inside else None
    return note is not None and any(note_of(each) is note for each in note.living())


def any_of_fsdp(parameters: Iterable[Tensor]) -> bool:
    """Whether noted modules were sharded that have one of these."""
    return any(each.handle.holds(p) for p in parameters for each in _engines)


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that lie in no other one, in their order."""
    inside = {each for module in modules for each in module.modules() if each is not module}
    return [module for module in modules if module not in inside]


def _roots() -> list[nn.Module]:
    """The outermost waiting modules, in the order of the calls."""
    return outermost([module for note in waiting() for module in note.living()])


def roots_around(module: nn.Module) -> list[nn.Module]:
    """The outermost waiting module that holds ``module``, with those of the same call."""
    roots = _roots()
    root = next((root for root in roots if any(each is module for each in root.modules())), None)
    return [each for each in roots if root is not None and note_of(each) is note_of(root)]


def roots_with(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost waiting modules that have some of ``parameters``."""
    ids, roots = {id(parameter) for parameter in parameters}, _roots()
    notes = {note_of(m) for m in roots if not ids.isdisjoint(map(id, m.parameters()))}
    return [m for m in roots if note_of(m) in notes]
