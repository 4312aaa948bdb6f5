"""zero_ext.fsdp moves the inputs of a model to its device, as FSDP2 does."""

import pytest
import torch
from harness import MLP, assert_bits, rank_data
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.fsdp import fully_shard

pytestmark = pytest.mark.device


def test_inputs_may_be_on_the_host(anywhere: DeviceMesh | None, rank, device):
    x, model = rank_data((3, 5), rank).cpu(), MLP()
    for layer in model.layers:
        fully_shard(layer, mesh=anywhere)
    fully_shard(model, mesh=anywhere)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = MLP()(x.to(device))
    assert_bits(model(x), expected)
    output = model(x=x)
    assert_bits(output, expected)
    output.square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(model(x), expected)
