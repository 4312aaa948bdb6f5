"""Parameters whose class has FSDP2's hooks around a gather, such as float8 weights: the tensors
that forwards and backwards use in their place.

Note [Low-precision parameters]
The parameter is gathered as any other, in the dtype of its unit. When a use begins, its class makes
of the whole tensor what modules compute with: ``fsdp_pre_all_gather`` is called as on one rank, and
``fsdp_post_all_gather`` gets what it returned. So a scale is that of the whole tensor, without a
message, and its bits are those of one process. The module has the result in the parameter's place
while a forward is inside the unit, or a backward inside a call of it. Where forwards gather
nothing, they enter and leave all units together for this alone: every stage has the same bits.
Autograd passes the result's gradient to the parameter, as if they were one. Graphs keep tensors
over the result's memory, which is freed when the unit is released, and filled by the next use.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero_ext import _C, _torch
from zero_ext.engine.units import Tree
from zero_ext.ranks.groups import Groups, mesh_of_this_rank
from zero_ext.tensor.meshes import local_gradient
from zero_ext.tensor.wrapped import POST, PRE, has_gather_hooks, inner_of, names_inside


def check_class(where: str, parameter: Tensor) -> None:
    """Raise if the hooks of a parameter's class cannot be called as described above."""
    kind = type(parameter)
    what = f"{where} is a {kind.__name__}, which"
    for has, lacks in ((PRE, POST), (POST, PRE)):
        if not callable(getattr(kind, lacks, None)):
            raise TypeError(f"{what} has {has} and no {lacks}. Give the class both.")
    inside = names_inside(parameter)
    if len(inside) != 1 or getattr(parameter, inside[0]).dtype != parameter.dtype:
        raise TypeError(
            f"{what} must wrap one tensor of its own shape {tuple(parameter.shape)} and dtype "
            f"{parameter.dtype}, the one that is trained, and wraps {inside}. "
            "Leave it out (ignored_params)."
        )
    if (count := _arguments_of_pre(parameter)) not in (1, 5):
        raise TypeError(
            f"{what} has a {PRE} of {count} arguments. FSDP2 calls it with one, mesh, or with "
            "mesh, outer_size, outer_stride, module, mp_policy: give it these."
        )
    if parameter.is_meta:
        raise TypeError(
            f"{what} is on the meta device. Give it values before sharding it: "
            "module.to_empty(device=...), then an initialisation."
        )


def check_seen(groups: Groups, stage: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if no unit would tell a parameter of such a class when modules use it."""
    if stage == 3 or any(p.requires_grad for _, p in parameters):
        return
    for name, parameter in parameters:
        if has_gather_hooks(parameter):
            raise ValueError(
                f"{groups.where}parameter '{name}' is a {type(parameter).__name__}, whose hooks "
                "run as forwards of trained parameters begin, and nothing is trained. Shard the "
                "module with stage=3."
            )


def _arguments_of_pre(parameter: Tensor) -> int:
    return len(inspect.signature(getattr(parameter, PRE)).parameters)


class _AsParameter(torch.autograd.Function):
    """``low`` in the parameter's place: its gradient is the parameter's."""

    @staticmethod
    def forward(ctx, parameter: Tensor, low: Tensor) -> Tensor:
        return low.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class LowPrecision:
    """See the note above. Of one parameter.

    Args:
        where: The beginning of a message about it.
    """

    def __init__(self, where: str, parameter: Tensor):
        self._where, self.parameter = where, parameter
        self._mesh: DeviceMesh | None = None  # of this rank alone
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []  # all that have it
        self._takes_all = _arguments_of_pre(parameter) == 5
        self._shown: list[Tensor] = []  # in the parameter's places, while it is in use
        self.lie_in(-1)

    def add_place(self, module: nn.Module, key: str, mesh: DeviceMesh | None) -> None:
        self._places.append((weakref.ref(module), key))
        self._mesh = mesh

    def lie_in(self, unit: int) -> None:
        """``unit``: a number of the unit that the parameter lies in, see ``watch``."""
        self.unit = unit
        self._low: Tensor | None = None  # what POST has returned
        self._sent: tuple[Tensor, ...] = ()  # what it was made of
        self._own: list[Tensor] = []  # tensors over memory that comes and goes
        self._made_of = (0, 0)  # its versions
        self._has_memory = False

    def follow(self, in_memory: bool, in_use: bool) -> None:
        """The unit has come or gone, or its use begins or ends."""
        if in_use and not self._shown:
            self._fill()  # also where it stayed in memory: users may have written to it
            with torch.enable_grad():
                shown = [_AsParameter.apply(self.parameter, self._low) for _ in self._places]
            self._put([self.parameter] * len(shown), shown)
            self._shown = shown
        elif self._shown and not in_use:
            self._put(self._shown, [self.parameter] * len(self._shown))
            self._shown = []
        if self._has_memory and not in_memory:
            self._empty()

    def _put(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Where others have put another tensor, as ``functional_call`` does, it stays."""
        for (module, key), before, after in zip(self._places, old, new, strict=True):
            owner = module()
            if owner is not None and owner._parameters.get(key) is before:
                owner._parameters[key] = after

    @torch.no_grad()
    def _fill(self) -> None:
        made, metadata = self._call_pre()
        dtype, post = self.parameter.dtype, getattr(self.parameter, POST)
        if self._low is None:
            sent = tuple(t if self._is_inside(t) else t.contiguous().clone() for t in made)
            low, inner = self._checked(post(sent, metadata, dtype))
            self._low, self._sent = low, sent
            storages = {t.untyped_storage().data_ptr(): t for t in (*sent, *inner)}
            self._own = [t for t in storages.values() if not self._is_inside(t)]
        else:
            for each in () if self._has_memory else self._own:
                _C.give_memory(each)
            same = self._versions == self._made_of
            with _torch.keep_versions((*self._sent, self._low)):
                for each, value in zip(self._sent, made, strict=True):
                    if not self._is_inside(each):
                        each.copy_(value)
                post(self._sent, metadata, dtype, out=self._low)
            if not same:  # graphs have kept tensors of other values
                torch.autograd.graph.increment_version((*self._own, self._low))
        self._made_of = self._versions
        self._has_memory = True

    @property
    def _versions(self) -> tuple[int, int]:
        """They change as users, updates and loads write to the parameter."""
        return self.parameter._version, inner_of(self.parameter)._version

    def _call_pre(self) -> tuple[Sequence[Tensor], object]:
        parameter = self.parameter
        pre: Callable = getattr(parameter, PRE)
        if not self._takes_all:
            return pre(self._mesh)
        module = self._places[0][0]()
        policy = MixedPrecisionPolicy(param_dtype=parameter.dtype)
        return pre(self._mesh, parameter.shape, parameter.stride(), module, policy)

    def _is_inside(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of the gathered parameter."""
        own = inner_of(self.parameter).untyped_storage()
        return tensor.untyped_storage().data_ptr() == own.data_ptr()

    def _checked(self, returned) -> tuple[Tensor, Sequence[Tensor]]:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"{self._where}: {POST} must return a tensor and a tuple of the tensors inside it, "
                f"not a {type(returned).__name__}."
            )
        low, inner = returned
        if low.shape != self.parameter.shape:
            raise ValueError(
                f"{self._where}: {POST} returned a tensor of shape {tuple(low.shape)}, the "
                f"parameter has {tuple(self.parameter.shape)}. Return one of that shape."
            )
        return low, inner

    def _empty(self) -> None:
        for each in self._own:
            _C.take_memory(
                each,
                f"{self._where}: what {POST} made of it is released outside of the forwards and "
                "backwards of its module. Read it there.",
            )
        self._has_memory = False


def register(
    groups: Groups, engine: _C.Engine, parameters: Sequence[Tensor], first: int
) -> dict[int, LowPrecision]:
    """Let the engine shard what is inside those of ``parameters`` that have such classes. Returns
    these by their indices; the first of all is ``first``."""
    others = [(i, p) for i, p in enumerate(parameters, first) if type(p) is not nn.Parameter]
    found = {}
    for i, parameter in others:
        if has_gather_hooks(parameter):
            engine.set_local(i, inner_of(parameter), 0, False)
            where = f"{groups.where}parameter '{engine.parameter_name(i)}'"
            found[i] = LowPrecision(where, parameter)
    if found:
        engine.set_to_local(lambda i, gradient: local_gradient(gradient))
    return found


def show(
    found: Mapping[int, LowPrecision], tree: Tree, engine: _C.Engine, device: torch.device
) -> None:
    """Let the modules of ``tree`` see what the hooks make, from now on."""
    if not found:
        return
    mesh, by_id = mesh_of_this_rank(device), {id(each.parameter): each for each in found.values()}
    for module in tree.owners(by_id.keys()):
        for key, parameter in module._parameters.items():
            if id(parameter) in by_id:
                by_id[id(parameter)].add_place(module, key, mesh)
    watch(engine, found)


def watch(engine: _C.Engine, found: Mapping[int, LowPrecision]) -> None:
    """Let the units of ``found`` tell them what happens to them. Where forwards gather nothing, all
    units are used together, and the first one tells them, also those in no unit."""
    units: dict[int, list[LowPrecision]] = {}
    for i, each in found.items():
        trained = 0 if engine.stage < 3 else engine.unit_of(i)
        each.lie_in(trained if trained >= 0 else -1 - engine.frozen_unit_of(i))
        units.setdefault(each.unit, []).append(each)
    for unit, members in units.items():
        engine.watch_unit(max(unit, -1 - unit), unit < 0, _watcher(unit, members))


def _watcher(unit: int, members: Sequence[LowPrecision]) -> Callable[[bool, bool], None]:
    """The engine holds it, and it holds nothing that holds the engine."""
    held = [weakref.ref(each) for each in members]

    def tell(in_memory: bool, in_use: bool) -> None:
        for each in [reference() for reference in held]:
            if each is not None and each.unit == unit:  # else it was unfrozen since
                each.follow(in_memory, in_use)

    return tell
