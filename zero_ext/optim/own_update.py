"""OwnUpdate: optimizers of any class, whose own code updates this rank's masters."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext import _C
from zero_ext.engine.checks import check_positive
from zero_ext.optim import elementwise
from zero_ext.optim.arguments import Sharding, check_params
from zero_ext.optim.core import Core
from zero_ext.optim.groups import parameters_of
from zero_ext.optim.lending import OwnCode
from zero_ext.optim.owners import OWNER_MB, Owners
from zero_ext.optim.sharded import Sharded, shard_states
from zero_ext.optim.slices import Slices
from zero_ext.optim.whole import Whole


@functools.cache
def sharded_class(kind: type[torch.optim.Optimizer]) -> type[Sharded]:
    """``kind`` over sharded parameters. Methods beside ``step`` get masters as ``step`` does."""
    ours = vars(Sharded).keys() - vars(torch.optim.Optimizer).keys()
    if clash := sorted(name for name in ours if name[0] != "_" and hasattr(kind, name)):
        raise TypeError(
            f"zero_ext: {kind.__name__} has an attribute '{clash[0]}', which sharded optimizers "
            "have for their own purposes. Rename it."
        )
    methods = {
        name: _lending(function)
        for each in reversed(kind.__mro__)
        for name, function in vars(each).items()
        if isinstance(function, types.FunctionType)
        and not (name.startswith("_") or hasattr(OwnUpdate, name))
    }
    own = {"__doc__": kind.__doc__, "_zero_kind": kind}
    return type(kind.__name__, (OwnUpdate, kind), own | methods)


def _lending(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: "OwnUpdate", *args: Any, **kwargs: Any) -> Any:
        act = functools.partial(function, self, *args, **kwargs)
        core = getattr(self, "zero_core", None)
        if core is None or core.lent or core.state is None:
            return act()
        what = f"{function.__name__}()"
        self.follow_groups()
        core.handle.refuse_forgotten_writes(what)
        core.take_edits(self.param_groups)
        return core.states.call(self, what, act)

    return method


class OwnUpdate(Sharded):
    """The code of the class runs where ``Slices`` or ``Whole`` has lent it masters."""

    _zero_kind: type[torch.optim.Optimizer]  # which it shards

    def __init__(self, params, *args: Any, owner_mb: float = OWNER_MB, **kwargs: Any):
        check_positive("owner_mb", owner_mb)
        kind, sharding = self._zero_kind, Sharding.taken_from(kwargs)
        if args:
            signature = inspect.signature(kind)
            kwargs = signature.bind_partial(None, *args).arguments | kwargs
            del kwargs[next(iter(signature.parameters))]
        if not isinstance(params, Tensor):  # of which torch says what it must be
            params = [*check_params(params)]
        code = OwnCode(kind, kwargs, kind.step)
        if code.makes_states:
            self._zero_construct_apart(params, kwargs)
        else:
            super(Sharded, self).__init__(params, **kwargs)
        code.try_all(self.param_groups)
        self.shard_update(code, owner_mb, sharding)

    def _zero_construct_apart(self, params: Any, kwargs: dict[str, Any]) -> None:
        """The constructor makes states, here of parameters without memory."""
        given = torch.optim.Optimizer(params, {}).param_groups
        groups = []
        for group in given:
            apart: list[Any] = [
                torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                for p in group["params"]
            ]
            if "param_names" in group:
                apart = [*zip(group["param_names"], apart, strict=True)]
            groups.append({**group, "params": apart})
        super(Sharded, self).__init__(groups, **kwargs)
        for group, before in zip(self.param_groups, given, strict=True):
            group["params"] = before["params"]

    def shard_update(self, code: OwnCode, owner_mb: float, sharding: Sharding) -> None:
        """Shard what its constructor has made, or it had when it was adopted."""
        parameters = parameters_of(self.param_groups)
        first_states = {id(p): self.state[p] for p in parameters if self.state.get(p)}

        def make_states(core: Core) -> None:
            core.state = _C.OptimizerState(core.handle.engine, 0)
            core.in_python = True
            of_all = core.handle, core.state, code, first_states
            if code.whole:
                core.owners = Owners(
                    core.handle,
                    owner_mb=owner_mb,
                    element_bytes=2 * torch.float32.itemsize,  # master and gradient
                )
                core.states = Whole(*of_all, owners=core.owners)
            else:
                core.states = Slices(*of_all, settings=core.settings)

        shard_states(self, sharding, code.name, make_states)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Where owners update whole parameters, every rank gets all states, whole, and
        the call is collective."""
        core, own = self.zero_core, self.state
        if not isinstance(core.states, Whole):
            return torch.optim.Optimizer.state_dict(self)
        self.follow_groups()
        self.state = core.states.all_of(core.shown, core.trained)
        try:
            return torch.optim.Optimizer.state_dict(self)
        finally:
            self.state = own

    def _zero_check_keywords(self, keywords: dict[str, Any]) -> None:
        code = self.zero_core.states.code
        check_keywords(type(code.probe).__name__, code.probe.step, keywords)
        with contextlib.suppress(*[elementwise.WholeParametersError] if code.whole else ()):
            code.try_out({}, keywords)

    def _zero_update(self) -> None:
        self.zero_core.states.update(self, self.zero_core.keywords)


def check_keywords(name: str, step: Callable, keywords: dict[str, Any]) -> None:
    """Raise for what ``step``, the wrapped optimizer's, does not take, or no rank may pass alone.

    Raises:
        TypeError: naming the first keyword that is wrong.
    """
    for keyword, value in keywords.items():
        one = isinstance(value, Tensor) and value.numel() == 1
        if not (one or isinstance(value, Number | str | None)):
            of_shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TypeError(
                f"zero_ext: step({keyword}=…) of a wrapped {name} is a "
                f"{of_shape or type(value).__name__}. Ranks compare scalars alone, and step parts "
                "of parameters: pass numbers, strings, None or tensors of one element."
            )
    try:
        inspect.signature(step).bind(**keywords)
    except TypeError as error:
        raise TypeError(
            f"zero_ext: step() of the wrapped {name}: {error}. Its signature is "
            f"step{inspect.signature(step)}."
        ) from None
