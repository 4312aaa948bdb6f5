"""Other wrappers that reduce gradients: none is put around parameters that an engine shards.

``DistributedDataParallel`` and ``DataParallel`` register the module that they wrap, and torch calls
a hook for each module that is registered. ``replicate`` makes a ``DistributedDataParallel`` in its
first forward. ``fully_shard``, ``replicate`` and ``FullyShardedDataParallel`` look into the
registry of torch's composable functions for each module that they take. A sharded module has a
registry that raises then.
"""

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, _get_registry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_ext.engine.carried import Carried
from zero_ext.engine.registry import find

if TYPE_CHECKING:
    from zero_ext.engine.handle import Handle

_CLASSES = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_COMPOSABLE = ("fully_shard", "replicate")


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if another wrapper reduces gradients of ``module``, or will do it."""
    for name, each in module.named_modules():
        registry = _get_registry(each) or ()
        kinds = [api for api in _COMPOSABLE if api in registry] if registry else []
        if isinstance(each, _CLASSES):
            kinds = [kind.__name__ for kind in _CLASSES if isinstance(each, kind)]
        if kinds:
            which = f"submodule '{name}'" if name else "the module"
            raise ValueError(
                f"zero_ext: {which} is wrapped in {kinds[0]}, which handles its gradients already. "
                f"Shard the plain module instead, without {kinds[0]}."
            )


def claim(module: nn.Module, handle: "Handle") -> int | None:
    """Make torch's composable functions raise for ``module`` and each submodule that has
    parameters of ``handle``. Returns the index of one of them in ``module``, if any."""
    held = [find(p) for p in module._parameters.values() if p is not None]
    found = [entry[1] for entry in held if entry is not None and entry[0] is handle]
    for child in module.children():
        if (i := claim(child, handle)) is not None:
            found.append(i)
    if not found:
        return None
    others = _get_registry(module) or {}
    module.__dict__[REGISTRY_KEY] = _Claim(handle, found[0], others)
    return found[0]


class _Claim(Carried, dict):
    """A module's registry of composable functions, which functions that reduce gradients query.

    It keeps no engine alive: a submodule may outlive the sharded module.
    """

    _in_a_copy: ClassVar = {"_handle": None}

    def __init__(self, handle: "Handle", i: int, others: dict[str, Any]):
        super().__init__(others)
        self._handle: weakref.ref[Handle] | None = weakref.ref(handle)
        self._i = i  # the index of a parameter

    def replaced(self) -> dict[str, Any] | None:
        return dict(self) or None

    def __contains__(self, api: object) -> bool:
        handle = self._handle and self._handle()
        if handle is not None and (wrapper := _wrapper_that_runs()) is not None:
            _refuse(wrapper, handle, self._i)
        return super().__contains__(api)


def _wrapper_that_runs() -> str | None:
    """Others look into the registry too, to find modules of FSDP for example."""
    for frame in _callers():
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if module == _get_registry.__module__ and name == "wrapper":
            api = frame.f_locals["func"].__name__
            return api if api in _COMPOSABLE else None
        if module == FullyShardedDataParallel.__module__ and name == "__init__":
            return FullyShardedDataParallel.__name__
    return None


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _check_registered(wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
    """torch calls this when ``module`` becomes a submodule of ``wrapper``."""
    if not isinstance(wrapper, (DistributedDataParallel, DataParallel)) or module is None:
        return
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    for name, parameter in module.named_parameters():
        entry = find(parameter) if name not in ignored else None
        if entry is not None:
            # replicate() makes it of a list of the parameters.
            replicates = isinstance(module, nn.ParameterList)
            kind = "replicate" if replicates else type(wrapper).__name__
            _refuse(kind, *entry)


def _refuse(wrapper: str, handle: "Handle", i: int) -> NoReturn:
    raise ValueError(
        f"{handle.groups.where}{wrapper} was put around parameters that are sharded, among them "
        f"'{handle.engine.parameter_name(i)}'. Use the module without {wrapper}: its backward "
        "reduces the gradients."
    )


register_module_module_registration_hook(_check_registered)
