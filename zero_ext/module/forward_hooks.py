"""Hooks before and after each forward of a sharded module: checks, and casts of ``mp_policy``."""

import copy
import dataclasses
import functools
from collections.abc import Iterable
from itertools import chain, compress, repeat
from operator import contains, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero_ext import _torch
from zero_ext.engine.carried import Carried, CarriedMethod
from zero_ext.engine.checks import reject_wrapper
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.engine.units import Tree
from zero_ext.module.policies import Policies, input_dtype
from zero_ext.ranks.agreement import naming
from zero_ext.ranks.collectives import copy_from_rank_0
from zero_ext.ranks.groups import Groups


class Rank0Buffers:
    """``shard(broadcast_buffers=True)``: gives every rank rank 0's buffers before a forward, in the
    forwards in which DDP does so.

    Those are the first forward, and each that follows a forward that was recorded for a backward
    outside of ``no_sync()``.
    """

    def __init__(self, groups: Groups):
        self._groups = groups
        self._due = True
        self.no_syncs = 0  # contexts that are open

    def before_forward(self, module: nn.Module) -> None:
        if self._due:
            with naming("a forward with broadcast_buffers=True"):
                # Listed anew each time: a forward may put another tensor in a buffer's place.
                copy_from_rank_0(self._groups, module.buffers())

    def after_forward(self) -> None:
        self._due = torch.is_grad_enabled() and self.no_syncs == 0


# The own parameters or submodules of one module, whose name is the first: those of now, and those
# when they were sharded.
_Table = tuple[str, dict[str, Any], dict[str, Any]]

_END = object()
_values = methodcaller("values")  # a scripted module's tables are no dictionaries


class ForwardHooks:
    """Run around each forward of the sharded module and each method that was registered."""

    def __init__(
        self, tree: Tree, handle: Handle, mp_policy: MixedPrecisionPolicy, ignored: set[str]
    ):
        """``ignored``: the names of parameters that were left alone."""
        self._handle = handle
        broadcasts = handle.options.broadcast_buffers
        self.rank0_buffers = Rank0Buffers(handle.groups) if broadcasts else None
        self._mp_policy = mp_policy
        self._ignored = ignored
        entries = handle.entries
        self._parameters: list[_Table] = []
        for module, name in tree.owners(entries.keys()).items():
            table = module._parameters
            self._parameters.append((name, table, dict(table.items())))
        self._modules: list[_Table] = []
        holders = tree.holders(entries.keys())
        for module, name in tree.names.items():
            # A scripted module has another class there: its submodules cannot be replaced.
            table = module._modules
            if module in holders and table and type(table) is dict:
                self._modules.append((name, table, table.copy()))
        tables = [*self._parameters, *self._modules]
        self._now = [now for _, now, _ in tables]
        self._kept = [*chain.from_iterable([kept.values() for *_, kept in tables]), _END]
        # Of one parameter of each module.
        self._attributes = []
        for *_, kept in self._parameters:
            one = next(filter(entries.__contains__, map(id, kept.values())))
            self._attributes.append(entries[one][0].__dict__)

    def attach(self, module: nn.Module) -> None:
        before = CarriedMethod(self.before_forward)
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(CarriedMethod(self.after_forward))

    def before_forward(self, module: nn.Module, args, kwargs):
        now = chain.from_iterable(map(_values, self._now))
        if not all(map(is_, chain(now, (_END,)), self._kept)):
            self._refuse_changes(module)
        flattened = map(contains, self._attributes, repeat(_torch.FLATTENED))
        for name, *_ in compress(self._parameters, flattened):
            reject_wrapper(self._handle.groups, "FullyShardedDataParallel", name)
        self._handle.check_whole()
        while unfrozen := self._handle.engine.before_forward():
            self._handle.adopt(unfrozen)
        if self.rank0_buffers is not None:
            self.rank0_buffers.before_forward(module)
        dtype = input_dtype(self._mp_policy)
        return (args, kwargs) if dtype is None else _cast_arguments(args, kwargs, dtype)

    def after_forward(self, module: nn.Module, args, output):
        if self.rank0_buffers is not None:
            self.rank0_buffers.after_forward()
        if self._mp_policy.output_dtype is None:
            return output
        return cast_floating(output, self._mp_policy.output_dtype)

    def _refuse_changes(self, module: nn.Module) -> None:
        """Raise if a parameter would not be trained, because it or its module came later."""
        if not torch.is_grad_enabled():
            return
        for name, now, kept in self._parameters:
            found = dict(now.items())  # a scripted module's table has no get()
            for key, parameter in kept.items():
                trained = self._handle.holds(parameter) and parameter.requires_grad
                if trained and found.get(key) is not parameter:
                    place = f"{name}.{key}" if name else key
                    self._refuse_another(module.get_submodule(name), key, place, found.get(key))
        for name, now, kept in self._parameters:
            if len(now) != len(kept):
                what = "a parameter was added or parametrized"
                self._refuse_new(what, name, module.get_submodule(name))
        for name, now, kept in self._modules:
            for key, found in now.items():
                before, place = kept.get(key), f"{name}.{key}" if name else key
                if found is None or found is before:
                    continue
                another = f"was replaced by another {type(found).__name__}"
                what = f"submodule '{place}' {'was added' if before is None else another}"
                self._refuse_new(what, place, found)

    def _refuse_another(self, owner: nn.Module, key: str, place: str, found: Tensor | None) -> None:
        """Raise if another Parameter was put in the place: it would be neither reduced nor stepped.

        functional_call() puts plain tensors there, whose gradients belong to its caller.
        """
        if found is not None and not isinstance(found, nn.Parameter):
            return
        if (wrapper := _torch.wrapper_around(owner, key)) is not None:
            reject_wrapper(self._handle.groups, wrapper, place)
        if found is None or not found.requires_grad:
            return
        raise RuntimeError(
            f"{self._handle.groups.where}parameter '{place}' was replaced by another one "
            f"({found.dtype} on {found.device}) after it was sharded: by .to(device), by "
            "load_state_dict(assign=True) or by an assignment. Do that before sharding, or copy "
            "the values into the sharded parameter."
        )

    def _refuse_new(self, what: str, place: str, module: nn.Module) -> None:
        """Raise if a parameter of ``module`` would not be trained. One that wraps sharded ones is
        welcome, and so is one whose parameters an optimizer has added. What stands where ignored
        parameters stood is the caller's."""
        for name, parameter in module.named_parameters(place):
            if parameter.requires_grad and find(parameter) is None and name not in self._ignored:
                raise RuntimeError(
                    f"{self._handle.groups.where}{what} after the module was sharded: '{name}' "
                    "would be neither reduced nor stepped. Do it before sharding."
                )


class InputCast(Carried):
    """A hook before the forward of a unit's module: casts what floats to ``param_dtype``.

    Inside a larger graph torch.compile traces it. Called by torch's code it runs as it is:
    torch.compile would make a graph of it alone, again for each kind of input.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def __call__(self, module: nn.Module, args, kwargs=None):  # torch.ao passes no kwargs
        traced = torch.compiler.is_compiling()
        cast = _cast_arguments if traced else _cast_arguments_uncompiled
        args, kwargs = cast(args, kwargs, self._dtype)
        return args if kwargs is None else (args, kwargs)


_torch.run_as_it_is(InputCast.__call__)  # not when it is inlined


class OutputCast(Carried):
    """A hook after the forward of a module that has a policy of its own."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def __call__(self, module: nn.Module, args, output):
        return cast_floating(output, self._dtype)


_torch.run_as_it_is(OutputCast.__call__)


def cast_inputs(modules: Iterable[nn.Module], policies: Policies) -> None:
    """Cast the inputs of each forward of ``modules``, before other hooks see them."""
    hook_of = functools.cache(InputCast)  # what torch.compile made for one block serves the others
    for module in modules:
        if (dtype := input_dtype(policies.in_force[module])) is not None:
            module.register_forward_pre_hook(hook_of(dtype), with_kwargs=True, prepend=True)


def cast_outputs(policies: Policies) -> None:
    """Cast what modules with policies of their own return."""
    for module, policy in policies.own.items():
        if policy.output_dtype is not None:
            module.register_forward_hook(OutputCast(policy.output_dtype))


def _cast_arguments(args: tuple, kwargs: dict[str, Any] | None, dtype: torch.dtype):
    args = tuple([cast_floating(value, dtype) for value in args])
    return args, kwargs and {name: cast_floating(value, dtype) for name, value in kwargs.items()}


_cast_arguments_uncompiled = torch.compiler.disable(_cast_arguments)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with all floating-point tensors in ``dtype``. A container that has none in another
    dtype stays the same object: a list or a cache that a forward writes to, for example."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    leaves, structure = _torch.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:  # no container that torch knows
        return _cast_fields(value, dtype) if dataclasses.is_dataclass(value) else value
    cast = [cast_floating(leaf, dtype) for leaf in leaves]
    if all(new is old for new, old in zip(cast, leaves, strict=True)):
        return value
    return _torch.tree_unflatten(cast, structure)


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    changed = {name: cast_floating(field, dtype) for name, field in fields.items()}
    changed = {name: field for name, field in changed.items() if field is not fields[name]}
    if isinstance(value, type) or not changed:
        return value
    value = copy.copy(value)
    for name, field in changed.items():
        object.__setattr__(value, name, field)  # also of a frozen one
    return value
