"""What a sharded module does before and after each forward: checks, and casts of ``mp_policy``."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from zero_ext.engine.carried import Carried, CarriedMethod
from zero_ext.engine.handle import Handle
from zero_ext.module.places import Place, children_of, is_sharded_by, places_of


class ForwardHooks(Carried):
    """Run around each forward of the sharded module and each method that was registered."""

    def __init__(self, module: nn.Module, handle: Handle, mp_policy: MixedPrecisionPolicy):
        self._handle: Handle | None = handle
        self._mp_policy = mp_policy
        self._places = places_of(module, handle)
        self._children = children_of(module, handle)

    def _in_a_copy(self) -> dict[str, Any]:
        return {"_handle": None, "_mp_policy": None, "_places": (), "_children": ()}

    def attach(self, module: nn.Module) -> None:
        before = CarriedMethod(self.before_forward)
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(CarriedMethod(self.after_forward))

    def before_forward(self, module: nn.Module, args, kwargs):
        if self._handle is None:
            return args, kwargs
        for place in self._places:
            _, parameters, key, parameter = place
            try:
                found = parameters[key]
            except KeyError:  # a scripted module's dictionary has no get()
                found = None
            if found is not parameter:
                self._refuse_another(place, found)
        for _, modules, kept in self._children:
            if modules != kept:  # one call for all of them: modules are compared by identity
                self._refuse_other_modules()
                break
        self._handle.check_whole()
        while unfrozen := self._handle.engine.before_forward():
            self._handle.adopt(unfrozen)
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after_forward(self, module: nn.Module, args, output):
        if self._handle is None or self._mp_policy.output_dtype is None:
            return output
        return _cast(output, self._mp_policy.output_dtype)

    def _refuse_another(self, place: Place, found: torch.Tensor | None) -> None:
        """Raise if another Parameter was put in the place: it would be neither reduced nor stepped.

        functional_call() puts plain tensors there, whose gradients belong to its caller.
        """
        trains = isinstance(found, nn.Parameter) and found.requires_grad
        if not trains or not torch.is_grad_enabled() or not place.parameter.requires_grad:
            return
        raise RuntimeError(
            f"{self._handle.groups.where}parameter '{place.name}' was replaced by another one "
            f"({found.dtype} on {found.device}) after it was sharded: by .to(device), by "
            "load_state_dict(assign=True) or by an assignment. Do that before sharding, or copy "
            "the values into the sharded parameter."
        )

    def _refuse_other_modules(self) -> None:
        """Raise if a module that was put in another's place would not be trained. One that wraps
        sharded parameters is welcome, and so is one whose parameters an optimizer has added."""
        for prefix, modules, kept in self._children if torch.is_grad_enabled() else ():
            for key, before in kept.items():
                found = modules.get(key)
                if before is None or found is None or found is before:
                    continue
                if any(is_sharded_by(self._handle, p) for p in before.parameters()):
                    self._refuse_another_module(prefix + key, found)

    def _refuse_another_module(self, place: str, found: nn.Module) -> None:
        for name, parameter in found.named_parameters():
            if parameter.requires_grad and not is_sharded_by(self._handle, parameter):
                raise RuntimeError(
                    f"{self._handle.groups.where}submodule '{place}' was replaced by another "
                    f"{type(found).__name__} after it was sharded: its parameter '{name}' would be "
                    "neither reduced nor stepped. Replace it before sharding."
                )


def _cast(values, dtype: torch.dtype):
    def cast(value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(cast, values)
