"""A class of weights with FSDP2's hooks around a gather, as torchao's float8 recipe has one: float8
data with one scale for the tensor, emulated on the CPU. And the same without any class."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0
aten = torch.ops.aten
_STAYS_ONE = {
    *(aten.detach.default, aten.clone.default, aten._to_copy.default, aten.copy_.default),
    *(aten.view.default, aten.as_strided.default, aten.split.Tensor, aten.slice.Tensor),
    *(aten.new_zeros.default, aten.empty_like.default),
}


def scale_of(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    largest = values.abs().amax().float()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest / LARGEST


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() / scale).to(FLOAT8)


class Float8(Tensor):
    """What forwards compute with: the product of float8 data and a scale."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype):
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype):
        self.float8, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.as_strided.default):
            return cls(args[0].float8, args[0].scale, args[0].dtype)
        whole = lambda t: (t.float8.float() * t.scale).to(t.dtype)  # noqa: E731
        args, kwargs = tree_map_only(cls, whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class Float8Weight(Tensor):
    """A weight in high precision that is gathered as float8. Without hooks it is that weight."""

    fails = 0  # how many of the next calls of the first hook raise

    @staticmethod
    def __new__(cls, values: Tensor):
        strides, dtype = values.stride(), values.dtype
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=strides, dtype=dtype, device=values.device
        )

    def __init__(self, values: Tensor):
        self.high = values

    def __tensor_flatten__(self):
        return ["high"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context, size, stride):
        return cls(parts["high"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.high, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, out) if func in _STAYS_ONE else out

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_size == module.weight.shape and outer_stride == module.weight.stride()
        if type(self).fails > 0:
            type(self).fails -= 1
            raise RuntimeError("the first hook fails")
        scale = scale_of(self.high, None if mesh is None else mesh.get_group())
        return (rounded(self.high, scale),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype, *, out: Tensor | None = None
    ):
        (data,), (scale,) = outputs, metadata
        if out is None:
            return Float8(data, scale, dtype), (data,)
        assert isinstance(out, Float8) and out.float8.data_ptr() == data.data_ptr()
        out.scale = scale
        return None


class SentAsItIs(Float8Weight):
    """Rounded after the gather, as torchao's int8 recipe does it. The first hook of FSDP2's first
    version: it gets the mesh alone."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.high,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype, *, out: Tensor | None = None
    ):
        scale = scale_of(outputs[0])
        data = rounded(outputs[0], scale)
        if out is None:
            return Float8(data, scale, dtype), (data,)
        assert isinstance(out, Float8)
        out.float8.copy_(data)
        out.scale = scale
        return None


def with_float8_weights(model: nn.Module, kind: type[Tensor] = Float8Weight) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


class _AsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        scale = scale_of(weight)
        return (rounded(weight, scale).float() * scale).to(weight.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class RoundedLinear(nn.Linear):
    """The same computation with a plain weight: rounded in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _AsWeight.apply(self.weight), self.bias)
