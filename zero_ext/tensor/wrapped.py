"""Parameters of a class that wraps one plain tensor, and has FSDP2's two hooks around a gather.

``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` make what a forward computes with out of the
parameter: a float8 tensor, for example. An engine shards the plain tensor inside, see
``zero_ext/engine/low_precision.py``.
"""

from torch import Tensor

from zero_ext._torch import is_traceable_wrapper_subclass

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def has_gather_hooks(tensor: Tensor) -> bool:
    return hasattr(type(tensor), PRE) or hasattr(type(tensor), POST)


def names_inside(parameter: Tensor) -> list[str]:
    """The attributes that hold floating-point tensors of the parameter's shape."""
    if not is_traceable_wrapper_subclass(parameter):
        return []
    found = [(name, getattr(parameter, name)) for name in parameter.__tensor_flatten__()[0]]
    shape = parameter.shape
    return [name for name, each in found if each.shape == shape and each.is_floating_point()]


def inner_of(parameter: Tensor) -> Tensor:
    """The tensor that an engine shards, inside a parameter with one such attribute."""
    return getattr(parameter, names_inside(parameter)[0])


def follow(parameter: Tensor, inner: Tensor) -> None:
    """Let the parameter have the dtype and the device of ``inner``, whose values the caller gives
    its inner tensor."""
    (name,) = names_inside(parameter)
    names, context = parameter.__tensor_flatten__()
    parts = {each: getattr(parameter, each) for each in names} | {name: inner}
    like = type(parameter).__tensor_unflatten__(parts, context, inner.shape, inner.stride())
    parameter.data = like
