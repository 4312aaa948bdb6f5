"""Models built on the meta device: parameters get memory unit by unit, just before they are cut."""

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext.engine.units import Tree
from zero_ext.tensor.meshes import part_of


class MetaModules:
    """The modules of ``tree`` that have parameters or buffers on the meta device.

    Raises:
        ValueError: a module cannot be initialised: it has no ``reset_parameters()``, and no
            ``param_init_fn`` was passed. Nothing has changed then.
    """

    def __init__(
        self,
        tree: Tree,
        ignored: set[int],
        param_init_fn: Callable[[nn.Module], None] | None,
        device: torch.device,
    ):
        self._init = param_init_fn
        self._device = device
        self._modules: list[nn.Module] = []
        for module, name in tree.names.items():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_meta and id(tensor) not in ignored:
                    break
            else:
                continue
            if param_init_fn is None and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"zero_ext: '{name or type(module).__name__}' ({type(module).__name__}) is on "
                    "the meta device and has no reset_parameters(). Pass param_init_fn, which "
                    "initialises the parameters and buffers of one module."
                )
            self._modules.append(module)

    def materialise(self, members: Mapping[int, Tensor]) -> dict[int, nn.Parameter]:
        """Give memory and values to the parameters ``members`` that are on the meta device.

        Returns:
            The new Parameters, which stand in all modules that share the old ones.
        """
        old = {i: p for i, p in members.items() if p.is_meta}
        new = {i: _with_memory(p, self._device) for i, p in old.items()}
        initialised = self._put({id(p): new[i] for i, p in old.items()})
        self._initialise(initialised, {id(twin) for twin in new.values()})
        parts = {i: _part_of(p, new[i]) for i, p in old.items() if isinstance(p, DTensor)}
        self._put({id(new[i]): part for i, part in parts.items()})
        return new | parts

    def _put(self, twins: dict[int, nn.Parameter]) -> list[nn.Module]:
        """Replace the parameters with these ids. Returns the modules that have some."""
        found = []
        for module in self._modules:
            mine = [(k, p) for k, p in module._parameters.items() if id(p) in twins]
            if not mine:
                continue
            for key, parameter in mine:
                module._parameters[key] = twins[id(parameter)]
            found.append(module)
        return found

    def finish(self) -> None:
        """Initialise the modules that have buffers on the meta device and no parameters."""
        buffers = [(m, b) for m in self._modules for b in m._buffers.values() if b is not None]
        self._initialise([*dict.fromkeys(m for m, b in buffers if b.is_meta)], set())

    def _initialise(self, modules: list[nn.Module], new: set[int]) -> None:
        with torch.no_grad():
            for module in modules:
                for key, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        module._buffers[key] = torch.empty_like(buffer, device=self._device)
                with _hidden(module, new):
                    if self._init is not None:
                        self._init(module)
                    else:
                        module.reset_parameters()


@contextlib.contextmanager
def _hidden(module: nn.Module, new: set[int]):
    """An initialisation of the ``new`` parameters sees the others on the meta device: these have
    values already, or are cut and released."""
    others = {k: p for k, p in module._parameters.items() if p is not None and id(p) not in new}
    for key, parameter in others.items():
        if not parameter.is_meta:
            module._parameters[key] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
    try:
        yield
    finally:
        module._parameters.update(others)


def _with_memory(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """A parameter with memory; a whole, plain one for a DTensor, whose ranks cut equal values."""
    if isinstance(parameter, DTensor):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    data = torch.empty_like(parameter, device=device)
    twin = type(parameter).__new__(type(parameter), data, requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def _part_of(parameter: DTensor, whole: Tensor) -> nn.Parameter:
    """The parameter with this rank's part of ``whole``."""
    local = part_of(parameter, whole).clone(memory_format=torch.contiguous_format)
    where = parameter.device_mesh, parameter.placements
    shape = {"shape": parameter.shape, "stride": parameter.stride()}
    value = DTensor.from_local(local, *where, run_check=False, **shape)
    twin = nn.Parameter(value, requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin
