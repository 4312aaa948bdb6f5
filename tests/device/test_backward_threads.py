"""Backwards of several threads over one model on a device, whose hooks run on one thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import assert_bits
from setups import full_gradients
from torch import nn

import zero_ext

pytestmark = pytest.mark.device
TWO_THREADS = "another thread runs a backward of the same model on this device"
PATIENCE_S = 30


class WaitOnHost(torch.autograd.Function):
    """Its backward runs on the thread that called backward, after the device's gradients."""

    @staticmethod
    def forward(ctx, x, arrived, goes_on):
        ctx.events = arrived, goes_on
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        arrived, goes_on = ctx.events
        arrived.set()
        assert goes_on.wait(PATIENCE_S)
        return grad, None, None


def make(device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(device)


def loss_of(model, device, value: float, events=None):
    x = torch.full((2, 4), value, device="cpu", requires_grad=events is not None)
    return model((WaitOnHost.apply(x, *events) if events else x).to(device)).sum()


def in_a_hook(loss, device):
    """A loss whose backward is run by the hook of a leaf."""
    leaf = torch.ones((), device=device, requires_grad=True)
    leaf.register_hook(lambda _grad: loss.backward())
    return 1 * leaf


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_a_second_backward_meanwhile_raises_and_loses_nothing(device, stage, inner, local):
    model, plain = zero_ext.shard(make(device), stage), make(device)
    arrived, goes_on = threading.Event(), threading.Event()
    if local:  # what was before stays as it was
        for each in (model, plain):
            loss_of(each, device, 3.0).backward()
    first = loss_of(model, device, 1.0, (arrived, goes_on))
    second = loss_of(model, device, 2.0)
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(first.backward)
        assert arrived.wait(PATIENCE_S)
        try:
            with pytest.raises(RuntimeError, match=TWO_THREADS):
                (in_a_hook(second, device) if inner else second).backward()
        finally:
            goes_on.set()
        if inner:  # whose gradients were mixed with the first one's
            with pytest.raises(RuntimeError, match=TWO_THREADS):
                ended.result()
        else:
            ended.result()
    for value in (2.0,) if not inner else (1.0, 2.0):
        loss_of(model, device, value).backward()
    for value in (1.0, 2.0):
        loss_of(plain, device, value).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in full_gradients(model).items():
        assert_bits(gradient, expected[name], name)


def test_threads_may_take_turns(device):
    model, plain = zero_ext.shard(make(device), 1), make(device)
    for value in (1.0, 2.0, 3.0):
        for each in (model, plain):
            with ThreadPoolExecutor(1) as other:
                other.submit(loss_of(each, device, value).backward).result()
    for name, gradient in full_gradients(model).items():
        assert_bits(gradient, plain.get_parameter(name).grad, name)


@pytest.mark.parametrize("ends_on_host", [False, True], ids=["", "ends-on-host"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_inner_backward_of_a_hook_on_the_host(device, stage, ends_on_host):
    """It may end on the device's thread, which is not the one that waits for it."""
    model, plain = zero_ext.shard(make(device), stage), make(device)
    came = threading.Event()
    came.set()
    events = (came, came) if ends_on_host else None  # the node that waits is the last one

    def run(each, made_before: bool):
        made = loss_of(each, device, 2.0, events) if made_before else None
        leaf = torch.ones((), device="cpu", requires_grad=True)

        def hook(_grad):
            with torch.enable_grad():
                (loss_of(each, device, 1.0, events) if made is None else made).backward()

        leaf.register_hook(hook)
        (2 * leaf).backward()

    for _ in range(3):
        run(plain, made_before=False)
        run(model, made_before=False)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="has seen nothing of the backwards around it"):
            run(model, made_before=True)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model.stats()  # the backward has been undone
    for name, gradient in full_gradients(model).items():
        assert_bits(gradient, expected[name], name)
