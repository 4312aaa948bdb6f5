"""How gradients are reduced, as a table."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from zero_ext._torch import spec_of
from zero_ext.engine.checks import check_module
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.tensor.meshes import dimensions_of, is_cut_over


def gradient_reductions(module: nn.Module) -> dict[str, str]:
    """How each parameter's gradient is reduced, to print or to compare with a mesh::

        for name, text in zero_ext.gradient_reductions(model).items():
            print(f"{name:40} {text}")

    Sends nothing.

    Returns:
        By the parameter's name: over which ranks it is averaged, or that an expert's is summed over
        some of them; which ranks of other mesh dimensions have other parts of it, and which have
        the same gradient, because nothing reduces it over them. The first two steps compare plain
        parameters there. ``"frozen"``, and ``"not sharded"``: nothing is done.
    Raises:
        TypeError: ``module`` is no module.
    """
    check_module(module, "gradient_reductions()")
    return {name: _described(parameter) for name, parameter in module.named_parameters()}


def _described(parameter: Tensor) -> str:
    entry = find(parameter)
    if entry is None:
        return "not sharded"
    if not parameter.requires_grad:
        return "frozen"
    handle, _ = entry
    groups, divisor = handle.groups, handle.engine.gradient_divisor
    ranks = list(groups.global_ranks)
    if is_cut_over(parameter, groups.expert_mesh):
        ranks = [ranks[k] for k in groups.experts.places]
    summed = f"summed over ranks {ranks}, divided by {divisor:g}"
    return "; ".join([summed, *_on_other_dimensions(handle, parameter)])


def _on_other_dimensions(handle: Handle, parameter: Tensor) -> list[str]:
    if handle.across_meshes is None:
        return []
    of_parameter: dict[dist.ProcessGroup, bool] = {}
    if isinstance(parameter, DTensor):
        spec = spec_of(parameter)
        cuts = [isinstance(each, Shard) for each in spec.placements]
        of_parameter = dict(zip(dimensions_of(spec), cuts, strict=True))
    parts = []
    for group in dict.fromkeys((*of_parameter, *handle.across_meshes.groups)):
        ranks = dist.get_process_group_ranks(group)
        parts.append(f"{'cut over' if of_parameter.get(group) else 'alike on'} ranks {ranks}")
    return parts
