"""What other libraries call an argument of ``shard``, and what it is here."""

from typing import Any, NoReturn

_REMEDIES = {
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


def reject_foreign(arguments: dict[str, Any]) -> NoReturn:
    """Raise for the first argument that ``shard`` does not have.

    Raises:
        TypeError: with the argument that does the same, where another library has this one.
    """
    name = next(iter(arguments))
    remedy = _REMEDIES.get(name, "See help(zero_ext.shard) for those that it has.")
    raise TypeError(f"zero_ext: shard() has no argument '{name}'. {remedy}")
