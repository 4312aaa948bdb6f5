"""The values that one process computes, and their comparison to the last bit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def reference_gradients(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Sequence[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    scale: float = 1.0,
) -> dict[str, Tensor | None]:
    """The gradients of one process, added in (micro-batch, rank) order, in plain torch.

    They have the bits that the library promises where ``scale`` is a power of two.

    Args:
        make_model: Makes the model, with the same values each time.
        batches: ``batches[micro][rank]`` is what ``loss`` gets as its second argument.
        loss: Of the model and a batch: one number, a Tensor of shape [].
        scale: What each gradient is multiplied by. One over the number of ranks gives the average
            that ``p.grad`` shows.
    Returns:
        By parameter name: fp32 Tensors of the parameters' shapes; None where no batch reached one.
    """
    model = make_model()
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in model.named_parameters())
    for batch in (batch for ranks in batches for batch in ranks):
        model.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if sums[name] is None:
                sums[name] = torch.zeros_like(parameter, dtype=torch.float32)
            sums[name] += scale * parameter.grad.float()
    return sums


def assert_bits(actual: Any, expected: Any, name: str = "tensor") -> None:
    """Every element equal, NaN to NaN, wherever the tensors are.

    Args:
        actual, expected: Tensors, or mappings or sequences of them.
    Raises:
        AssertionError: with how many elements differ, where the first one is, and by how much.
    """
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"{name}: {list(actual)} for {list(expected)}"
        for key in expected:
            assert_bits(actual[key], expected[key], f"{name} '{key}'")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{name}: {len(actual)} for {len(expected)}"
        for index, each in enumerate(expected):
            assert_bits(actual[index], each, f"{name}[{index}]")
    elif isinstance(expected, Tensor):
        _assert_equal(actual, expected, name)
    else:
        assert actual == expected, f"{name}: {actual!r}, expected {expected!r}"


def _assert_equal(actual: Tensor, expected: Tensor, name: str) -> None:
    __tracebackhide__ = True
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    assert actual.dtype == expected.dtype, (
        f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    differs = ~((actual == expected) | (actual.isnan() & expected.isnan()))
    if not differs.any():
        return
    indices = differs.nonzero()
    first = tuple(indices[0].tolist())
    largest = (actual.double() - expected.double())[differs].abs().max().item()
    raise AssertionError(
        f"{name}: {len(indices)} of {actual.numel()} elements differ, first at {list(first)}: "
        f"{actual[first].item()!r}, expected {expected[first].item()!r}; largest difference "
        f"{largest:.3g}"
    )
