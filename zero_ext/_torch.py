"""All Python that leans on parts of torch which its documentation does not promise.

Checked with torch 2.11, 2.13, 2.14 and 2.15. ``csrc/core/torch_internals.h`` is the same for C++.
"""

from operator import attrgetter

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "TorchDispatchMode",  # sees each operation below autograd
    "tree_flatten",  # nested containers, as torch's operators take them apart
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# The names and types of an operator's arguments, and which of them it writes to.
schema_of = attrgetter("_schema")
