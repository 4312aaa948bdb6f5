"""mp_policy: what each module and each parameter is computed in, and what modules cast."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero_ext.engine.checks import DTYPES
from zero_ext.engine.units import Tree

# Values of ``shard(mp_policy=)``. A function of a module's name and the module returns the policy
# of the module and of the modules inside it; None: the policy of the module around it.
ModulePolicy = MixedPrecisionPolicy | Callable[[str, nn.Module], MixedPrecisionPolicy | None] | None


class Policies(NamedTuple):
    """
    Attributes:
        root: That of the sharded module.
        in_force: The policy of each module.
        own: Those that a function has returned for modules inside it.
        dtypes: What a function has parameters computed in, by id; None: in their own dtype.
    """

    root: MixedPrecisionPolicy
    in_force: dict[nn.Module, MixedPrecisionPolicy]
    own: dict[nn.Module, MixedPrecisionPolicy]
    dtypes: dict[int, torch.dtype | None] | None = None

    @staticmethod
    def of(tree: Tree, given: ModulePolicy) -> "Policies":
        """
        Raises:
            TypeError: something is no policy.
            ValueError: a parameter of two modules, or the gradients, would have two dtypes.
        """
        function = callable(given) and not isinstance(given, type | MixedPrecisionPolicy)
        root = (
            check_mp_policy(given("", tree.root) if function else given) or MixedPrecisionPolicy()
        )
        if not function:
            return Policies(root, dict.fromkeys(tree.names, root), {})
        in_force, own = {tree.root: root}, {}
        for place, module in enumerate(tree.modules):
            if module in in_force:
                continue
            in_force[module] = in_force[tree.modules[tree.parents[place]]]
            policy = check_mp_policy(given(tree.names[module], module))
            if policy is None:
                continue
            in_force[module] = own[module] = policy
            if policy.reduce_dtype not in (None, root.reduce_dtype):
                raise ValueError(
                    f"zero_ext: mp_policy gives '{tree.names[module]}' reduce_dtype="
                    f"{policy.reduce_dtype}, and the whole module {root.reduce_dtype}. All "
                    "gradients are reduced in one dtype: give it for the whole module."
                )
        return Policies(root, in_force, own, _dtypes(tree, in_force))


def input_dtype(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype that inputs of units are cast to; None: they are not."""
    return policy.param_dtype if policy.cast_forward_inputs else None


def _dtypes(
    tree: Tree, in_force: dict[nn.Module, MixedPrecisionPolicy]
) -> dict[int, torch.dtype | None]:
    found: dict[int, torch.dtype | None] = {}
    for module, name in tree.names.items():
        dtype = in_force[module].param_dtype
        for key, parameter in module._parameters.items():
            if parameter is not None and found.setdefault(id(parameter), dtype) is not dtype:
                raise ValueError(
                    f"zero_ext: '{name}.{key}' is a parameter of two modules, and mp_policy gives "
                    f"one param_dtype={dtype} and the other {found[id(parameter)]}. Give both one."
                )
    return found


def check_mp_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    if not isinstance(policy, MixedPrecisionPolicy | None):
        dtype = policy if isinstance(policy, torch.dtype) else "torch.bfloat16"
        raise TypeError(
            "zero_ext: mp_policy must be torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype="
            f"{dtype}), a function of a module's name and the module that returns one, or None, "
            f"not {policy!r}."
        )
    if policy is not None and policy.param_dtype not in (None, *DTYPES):
        raise ValueError(f"zero_ext: mp_policy: {policy.param_dtype} is not one of {DTYPES}.")
    if policy is not None and not isinstance(policy.output_dtype, torch.dtype | None):
        raise TypeError(
            f"zero_ext: mp_policy: output_dtype must be a torch.dtype or None, not "
            f"{policy.output_dtype!r}."
        )
    return policy
