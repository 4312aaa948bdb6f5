"""``unwrap``: a sharded module becomes a plain one again."""

import torch
from torch import nn

from zero_ext.engine.carried import Carried
from zero_ext.engine.checks import check_module
from zero_ext.module.plain_copies import FLAGS, HOOKS, is_ours
from zero_ext.module.sharding import AnyModule
from zero_ext.ranks.agreement import all_or_none
from zero_ext.state.model_state import full_value, handles_of


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
        whole = [(p, full_value(p).to(p.device, copy=True)) for p in handle.parameters]
        with all_or_none(handle.groups, "unwrap()"):  # no rank needs another one's parts any more
            for optimizer in list(handle.optimizers):
                optimizer.retire()
        handle.dissolve()
        for parameter, value in whole:
            parameter.data, parameter.grad = value, None
    for each in module.modules():
        _remove_ours(each)
    return module


def _remove_ours(module: nn.Module) -> None:
    """Delete the hooks, methods and attributes that sharding has added to ``module``."""
    for attribute in HOOKS:
        hooks = module.__dict__.get(attribute, {})
        for key in [k for k, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
            for flags in FLAGS:
                module.__dict__.get(flags, {}).pop(key, None)
    for name in [n for n, value in module.__dict__.items() if isinstance(value, Carried)]:
        own = module.__dict__.pop(name).replaced()
        if own is not None:
            module.__dict__[name] = own
