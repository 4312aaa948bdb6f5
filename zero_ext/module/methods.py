"""The methods that a module gains when it is sharded."""

import contextlib
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn

from zero_ext import _C
from zero_ext.engine.carried import Carried, CarriedMethod, CarriedReplacement
from zero_ext.engine.checks import check_bool, check_positive
from zero_ext.engine.handle import Handle
from zero_ext.module.forward_hooks import ForwardHooks
from zero_ext.ranks.agreement import calling

# The methods that a sharded module gains; zero_grad() is replaced as well.
_METHODS = (
    "no_sync",
    "stats",
    "set_gradient_divide_factor",
    "unshard",
    "reshard",
    "summon_full_params",
)


class _OfACopy(Carried):
    """Stands in a copy for one of ``_METHODS`` that its class has copied by itself."""

    def __call__(self, *args, **kwargs) -> NoReturn:
        raise RuntimeError(
            "zero_ext: this module is a copy of a sharded one, and a plain module itself. Call "
            "zero_ext.shard() on it first."
        )

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _OfACopy, ()


class _Method(CarriedMethod):
    __reduce_ex__ = _OfACopy.__reduce_ex__


class ShardedMethods:
    """The code of ``module.no_sync`` and of the other methods."""

    def __init__(self, handle: Handle, forward_hooks: ForwardHooks):
        self.handle = handle
        self.forward_hooks = forward_hooks

    def attach(self, module: nn.Module) -> None:
        for name in _METHODS:
            setattr(module, name, _Method(getattr(self, name)))

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate the gradients of backwards inside the context locally, in fp32 (stages 0, 1).

        Run the last backward before ``step`` outside. Exception: stages 2 and 3 reduce in every
        backward, because local sums would need the memory that they save. ``stats()`` counts that.
        """
        engine, buffers = self.handle.engine, self.forward_hooks.rank0_buffers
        engine.push_no_sync()
        if buffers is not None:
            buffers.no_syncs += 1
        try:
            yield
        finally:
            engine.pop_no_sync()
            if buffers is not None:
                buffers.no_syncs -= 1

    def stats(self) -> dict[str, int]:
        """See ``zero_ext.stats``."""
        return self.handle.engine.stats()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of by the number of ranks."""
        check_positive("the divide factor", factor)
        self.handle.engine.set_divide_factor(factor)

    def unshard(self) -> None:
        """Gather all parameters and keep them until ``reshard()`` or the next step. Collective with
        stage 3. Without effect with the other stages."""
        with calling("unshard()"):
            self.handle.engine.unshard()

    def reshard(self) -> None:
        """Release what ``unshard()`` gathered. This rank keeps what was written to its parts.
        Collective."""
        with calling("reshard()"):
            self.handle.reshard(keep_writes=True)

    @contextlib.contextmanager
    def summon_full_params(self, writeback: bool = True):
        """Make all parameters whole and readable inside the context, on every rank.

        Collective. Exception: with ``writeback=False`` one rank may do it alone where
        ``stats()["neighbors"]`` counts all other ranks. Inside another such context, or after
        ``unshard()``, the parameters stay in memory when the context ends.

        Args:
            writeback: With stage 3: keep what was written to the parameters, which must be the same
                on every rank. ``False`` discards it, also what inner contexts would keep. The other
                stages always keep what was written.
        """
        check_bool("writeback", writeback)
        handle, engine = self.handle, self.handle.engine
        held = engine.held_by_user
        if held and (writeback or handle.forgets_writes):
            yield
            return
        with calling("summon_full_params()"):
            if held:  # this context must not discard what was written before it
                self.reshard()
            engine.unshard()
        before, handle.forgets_writes = handle.forgets_writes, not writeback
        try:
            with self._restored_alone(writeback):
                yield
        finally:
            handle.forgets_writes = before
            with calling("summon_full_params()"):
                handle.reshard(keep_writes=writeback)
                if held:
                    engine.unshard()

    @contextlib.contextmanager
    def _restored_alone(self, writeback: bool):
        """Restore the parameters that are never released, as with a single rank: no gather does."""
        engine = self.handle.engine
        if writeback or engine.stage != 3:
            yield
            return
        kept = (p for i, p in enumerate(self.handle.parameters) if not engine.comes_and_goes(i))
        saved = [(parameter, parameter.detach().clone()) for parameter in kept]
        try:
            yield
        finally:
            for parameter, value in saved:
                parameter.data.copy_(value)  # autograd need not know: nothing has changed


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """``module.no_sync()``, which type checkers do not know of a plain module's class."""
    return module.no_sync()


def summon_full_params(
    module: nn.Module, writeback: bool = True
) -> contextlib.AbstractContextManager[None]:
    """``module.summon_full_params()``, which type checkers do not know."""
    return module.summon_full_params(writeback)


def refuse_taken_names(module: nn.Module) -> None:
    for name in _METHODS:
        own = getattr(module, name, None)
        if own is not None and not isinstance(own, Carried):
            raise ValueError(
                f"zero_ext: the {type(module).__name__} has a '{name}' of its own, which is what a "
                "sharded module's method is called. Rename it."
            )


class ZeroGrad(CarriedReplacement):
    """Discards the gradients of a sharded module: what ``.grad`` shows, and local sums.

    Parameters of the module that are not sharded lose their gradients as well.
    """

    def __init__(self, handle: Handle, module: nn.Module):
        super().__init__(module, "zero_grad")
        self._handle = handle

    def __call__(self, *args, **kwargs) -> None:
        module, handle = self._module(), self._handle
        if type(module).zero_grad is not nn.Module.zero_grad:  # which does more than torch's
            self._method()(*args, **kwargs)
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        mode = _C.ZeroGrad.to_none if set_to_none else _C.ZeroGrad.to_zero
        handle.engine.zero_grad(range(len(handle.parameters)), mode)
        for parameter in module.parameters():
            if parameter.grad is not None and not handle.holds(parameter):
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)


class SavePretrained(CarriedReplacement):
    """The module's own method, with whole parameters (stage 3).

    Every rank may call it. One rank may call it alone where all ranks share a host: it reads the
    other ranks' parts.
    """

    def __init__(self, module: nn.Module, methods: ShardedMethods):
        super().__init__(module, "save_pretrained")
        self._methods = methods

    def __call__(self, *args, **kwargs):
        save = self._method()
        if kwargs.get("state_dict") is not None:
            return save(*args, **kwargs)
        with self._methods.summon_full_params(writeback=False):
            return save(*args, **kwargs)


def replace_save_pretrained(modules: Iterable[nn.Module], methods: ShardedMethods) -> None:
    """Replace the method of each module that can save itself. Pipelines save their parts."""
    for each in modules:
        saves = callable(getattr(type(each), "save_pretrained", None))
        if saves and not isinstance(each, torch.jit.ScriptModule):
            each.__dict__["save_pretrained"] = SavePretrained(each, methods)
