"""Other libraries' names for arguments of ``shard`` and methods of a sharded module, and the names
here."""

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from zero_ext.engine.carried import Carried

_ARGUMENTS = {
    "auto_wrap_policy": "Pass units=Block, the class of the blocks.",
    "bucket_cap_mb": "Pass bucket_mb=.",
    "cpu_offload": "Pass offload_policy=torch.distributed.fsdp.CPUOffloadPolicy().",
    "device_ids": "Leave it out: move the module to its device before.",
    "device_mesh": "Pass mesh=.",
    "dp_mesh": "Pass mesh=.",
    "dp_mesh_dims": "Pass the mesh of the ranks to shard over: mesh=whole_mesh['dp'].",
    "find_unused_parameters": "Leave it out: unused parameters are always allowed.",
    "gradient_as_bucket_view": "Leave it out: it changes nothing here.",
    "ignored_modules": "Pass ignored_params=module.parameters().",
    "mixed_precision": "Pass mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(…).",
    "process_group": "Pass mesh=DeviceMesh.from_group(group, device_type).",
    "sharding_strategy": "Pass stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP, and stage=0 for "
    "NO_SHARD.",
    "static_graph": "Leave it out: it changes nothing here.",
    "use_orig_params": "Leave it out: the Parameter objects are always kept.",
    "zero_stage": "Pass stage=.",
}
_ATTRIBUTES = {
    "clip_grad_norm_": "Call optimizer.clip_grad_norm_(max_norm).",
    "join": "Leave it out: ranks may have different numbers of batches.",
    "module": "Leave it out: shard() returns the module itself, without a wrapper.",
    "set_is_last_backward": "Leave it out: a step may have any number of backwards.",
    "set_reduce_scatter_divide_factor": "Call model.set_gradient_divide_factor(factor).",
    "set_reshard_after_backward": "Call model.unshard(), which lasts until the next step.",
    "set_reshard_after_forward": "Pass reshard_after_forward= to shard().",
    **dict.fromkeys(
        ("require_backward_grad_sync", "set_requires_gradient_sync"),
        "Run all backwards of a step but the last one inside 'with model.no_sync():'.",
    ),
    **dict.fromkeys(
        ("set_modules_to_backward_prefetch", "set_modules_to_forward_prefetch"),
        "Leave it out: units are gathered in the order of the last pass, see shard(prefetch_mb=).",
    ),
    **dict.fromkeys(
        ("no_sync", "reshard", "unshard"), "Call it on the module that was given to shard()."
    ),
}
_TABLES = ("_modules", "_buffers", "_parameters")  # of a module, where it looks for attributes


def reject_foreign(arguments: dict[str, Any]) -> NoReturn:
    """Raise for the first argument that ``shard`` does not have.

    Raises:
        TypeError: with the argument that does the same, where another library has this one.
    """
    name = next(iter(arguments))
    remedy = _ARGUMENTS.get(name, "See help(zero_ext.shard) for those that it has.")
    raise TypeError(f"zero_ext: shard() has no argument '{name}'. {remedy}")


def attach(modules: Iterable[nn.Module]) -> None:
    """Names of ``_ATTRIBUTES`` that a module does not have raise their remedies from now on."""
    for each in modules:
        tables = [*map(each.__dict__.get, _TABLES)]
        if [*map(type, tables)] == [dict] * len(_TABLES) and {} in tables:  # and no MissingNames
            each.__dict__[_TABLES[tables.index({})]] = MissingNames(each)


class MissingNames(Carried, dict):
    """A dictionary of a module that was empty, such as that of its buffers.

    ``nn.Module.__getattr__`` and ``__setattr__`` look for a name in it. So ``hasattr`` stays False,
    and the class stays the user's.
    """

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __contains__(self, name: object) -> bool:
        if name in _ATTRIBUTES:  # seldom: all other names are looked for here, too
            self._explain(name)
        return dict.__contains__(self, name)

    def _explain(self, name: str) -> None:
        """Raise, unless the module has such a name of its own."""
        module = self._module()
        if module is None or hasattr(type(module), name):
            return
        tables = (module.__dict__, *(module.__dict__[each] for each in _TABLES))
        if not any(dict.__contains__(table, name) for table in tables):
            raise AttributeError(
                f"zero_ext: a sharded {type(module).__name__} has no '{name}'. {_ATTRIBUTES[name]}"
            )

    def replaced(self) -> dict:
        return dict(self)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return dict, (dict(self),)
