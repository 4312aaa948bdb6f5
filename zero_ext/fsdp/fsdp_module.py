"""FSDPModule: the class that modules gain from ``fully_shard``, with the methods of torch's."""

import copyreg
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import UnshardHandle

from zero_ext.engine.carried import CarriedMethod
from zero_ext.engine.checks import check_bool, check_positive
from zero_ext.fsdp import first_use
from zero_ext.fsdp.notes import Note, note_of, notes_in


def _without_effect(reason: str) -> Callable[..., None]:
    """A method that changes no result here, for this reason."""

    def method(self, *args: Any, **kwargs: Any) -> None:
        pass

    method.__doc__ = f"Has no effect. {reason}"
    return method


def _missing(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"zero_ext: FSDPModule.{name}() has no counterpart. {reason}")

    method.__doc__ = f"Raises NotImplementedError. {reason}"
    return method


_REDUCED = "Every backward reduces, and adds to the sum that p.grad shows."
_Reduced = getattr(torch_fsdp, "GradientReductionHandle", UnshardHandle)  # since torch 2.15
_MESSAGES = "How messages travel is chosen by zero_ext; results are the same."
_ORDER = "What is gathered ahead follows the order of the last pass: zero_ext.shard(prefetch_mb=)."


class _Settings:
    """Methods that decide how FSDP2 works, and no result."""

    set_requires_gradient_sync = _without_effect(_REDUCED)
    set_requires_all_reduce = _without_effect(_REDUCED)
    set_is_last_backward = _without_effect("Every backward ends by itself.")
    set_manual_backward_finalization = _without_effect("Every backward ends by itself.")
    reset_iter_state = _without_effect("A forward or a backward that raised is undone by itself.")
    set_unshard_in_backward = _without_effect("A backward gathers the units that it enters.")
    set_keep_unsharded_storage = _without_effect("Memory of released units is kept for the next.")
    set_post_optim_event = _without_effect("Gathers wait for the update of their own parameters.")
    set_reduce_scatter_unused_params = _without_effect("Unused parameters are always allowed.")
    set_allocate_memory_from_process_group_for_comm = _without_effect(_MESSAGES)
    set_symm_mem_for_comm = _without_effect(_MESSAGES)
    set_force_sum_reduction_for_comms = _without_effect(_MESSAGES)
    set_reduce_scatter_max_input_buffers = _without_effect(_MESSAGES)
    set_separate_reduce_scatter_group = _without_effect(_MESSAGES)
    _set_unshard_async_op = _without_effect(_MESSAGES)

    set_all_reduce_hook = _missing(
        "set_all_reduce_hook", "Reduce over all ranks with a two-dimensional mesh (HSDP)."
    )
    set_custom_all_gather = _missing("set_custom_all_gather", "Leave it out.")
    set_custom_reduce_scatter = _missing("set_custom_reduce_scatter", "Leave it out.")


class FSDPModule(_Settings, torch_fsdp.FSDPModule):
    """The class of a module that ``fully_shard`` was called for, beside its own class.

    It is a subclass of torch's, so that ``isinstance`` of torch's pipelines is true. Methods that
    act on units shard what waits for its first use.
    """

    zero_plain_class: type[nn.Module]  # the module's own

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the module's own class: what ``type(module)(...)`` makes is not sharded."""
        return cls.zero_plain_class(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        """Copies are plain modules of the module's own class."""
        make, arguments, *rest = super().__reduce_ex__(protocol)
        kind, own = type(self), self.zero_plain_class
        if make is copyreg.__newobj__:  # pickle wants the object's present class for it
            make = object.__new__
        return make, tuple([own if each is kind else each for each in arguments]), *rest

    def _apply(self, fn, recurse=True):
        # Torch's FSDPModule would put other Parameters in their places.
        return self.zero_plain_class._apply(self, fn, recurse)

    def state_dict(self, *args, **kwargs):
        first_use.use(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        first_use.use(self)
        return super().load_state_dict(*args, **kwargs)

    def compile(self, *args, **kwargs) -> None:
        call = self.__dict__.get("_compiled_call_impl")
        super().compile(*args, **kwargs)
        if isinstance(call, first_use.FirstCall):
            call.compile_as(self._compiled_call_impl)
            self.__dict__["_compiled_call_impl"] = call

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own units. Collective.

        They stay until ``reshard()``, the next step, or the end of the module's next forward with
        ``reshard_after_forward``. With ``async_op`` the gather is only started.
        """
        first_use.use(self)
        if not async_op:
            _hold(self)
            return None
        if (site := note_of(self).site) is not None:
            site.start_gathers()
        return _Gather(self)

    def reshard(self) -> None:
        """Release the module's own units. What was written to their parameters is lost."""
        _release(self)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units are released between forward and backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        for note in _notes(self, recurse):
            note.reshard_after_forward = reshard_after_forward
            if note.site is not None:
                note.site.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether units are released after each backward. A step always releases them."""
        check_bool("reshard_after_backward", reshard_after_backward)
        for note in _notes(self, recurse):
            note.reshard_after_backward = reshard_after_backward
            if note.site is not None:
                note.site.set_reshard_after_backward(reshard_after_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of by the number of ranks.

        It must be the same for all modules before their next forward, which raises otherwise.
        """
        check_positive("the divide factor", factor)
        note = note_of(self)
        note.divide_factor = factor
        if note.engine is not None:
            note.engine.follow_divide_factors()

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Has no effect but checks. ``shard(prefetch_mb=)`` gathers ahead in the last order."""
        check_fsdp_modules(modules)

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Has no effect. Every backward ends by itself. With ``async_op`` returns an object with
        ``wait()``, which waits for nothing."""
        return _Reduced() if async_op else None

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            "zero_ext: this method of torch's FSDPModule is not one of zero_ext.fsdp. See "
            "docs/fsdp2.md for those that are."
        )


class _Gather(UnshardHandle):
    def __init__(self, module: nn.Module):
        self._module: nn.Module | None = module

    def wait(self) -> None:
        if self._module is not None:
            _hold(self._module)
        self._module = None


def _hold(module: nn.Module) -> None:
    """As with FSDP2, the module's next forward ends what ``unshard`` has begun."""
    note = note_of(module)
    if note.site is None:
        return
    note.site.unshard()
    ends = note.reshard_after_forward is not False and not note.site.is_root
    if ends and note.end_of_unshard is None:
        hook = CarriedMethod(lambda module, *_: _release(module))
        note.end_of_unshard = module.register_forward_hook(hook, always_call=True)


def _release(module: nn.Module) -> None:
    note = note_of(module)
    if note.end_of_unshard is not None:
        note.end_of_unshard.remove()
        note.end_of_unshard = None
    if note.site is not None:
        note.site.reshard()


@functools.cache
def fsdp_class_of(kind: type[nn.Module]) -> type[nn.Module]:
    attributes = {"__module__": kind.__module__, "zero_plain_class": kind}
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), attributes)


def check_fsdp_modules(modules: Iterable[nn.Module]) -> None:
    for each in modules:
        if not isinstance(each, FSDPModule):
            raise ValueError(f"zero_ext: expected an FSDPModule, not a {type(each).__name__}.")


def _notes(module: nn.Module, recurse: bool) -> list[Note]:
    return notes_in([module]) if recurse else [note_of(module)]
