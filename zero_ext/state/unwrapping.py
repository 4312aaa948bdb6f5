"""``unwrap``: a sharded module becomes a plain one again."""

import torch

from zero_ext.engine.checks import check_module
from zero_ext.module.plain_copies import remove_ours
from zero_ext.module.sharding import AnyModule
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.model_state import full_value, handles_of
from zero_ext.tensor.meshes import local_of, part_of


@torch.inference_mode(False)
@torch.no_grad()
def unwrap(module: AnyModule) -> AnyModule:
    """Undo ``shard``: ``module`` is plain again, in place, and can be sharded anew. Collective.

    Each rank gets the whole parameters, in their own dtype: the bits that only masters had are
    lost. Gradients are dropped. Optimizers of the module retire: they have no groups any more.

    Args:
        module: A sharded module. One that is not sharded stays as it is.
    Returns:
        ``module``.
    Raises:
        TypeError: it is no module.
        RuntimeError: a backward is running, or states are offloaded.
    """
    check_module(module, "unwrap()")
    for handle in handles_of(module):
        with all_or_none(handle.groups, "unwrap()"):
            handle.refuse_forgotten_writes("unwrap()")
        # What an engine shards of a parameter: all of it, or the tensor inside that has the values.
        values = [(p, part_of(p, full_value(p)).to(p.device, copy=True)) for p in handle.parameters]
        with all_or_none(handle.groups, "unwrap()"):  # no rank needs another one's parts any more
            for optimizer in list(handle.optimizers):
                optimizer.retire()
        handle.dissolve()
        for parameter, value in values:
            local_of(parameter).data, parameter.grad = value, None
    for each in module.modules():
        remove_ours(each.__dict__)
        each.__class__ = getattr(type(each), "zero_plain_class", type(each))
    return module
