"""The example of docs/testing.md, as it stands there."""

import re
from pathlib import Path

# example
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from zero_ext.testing import Fault, assert_bits, reference_gradients

pytest_plugins = ["zero_ext.testing.plugin"]


def make_model():
    torch.manual_seed(0)
    return nn.Linear(7, 13)


def loss(model, rank):
    return model(torch.full((2, 7), 1.0 + rank)).square().mean()


def gradients():  # runs on every rank
    model = zero_ext.shard(make_model(), stage=3)
    loss(model, dist.get_rank()).backward()
    return {name: zero_ext.full_grad(p) for name, p in model.named_parameters()}


def test_two_ranks_have_the_bits_of_one_process(zero_ext_ranks):
    expected = reference_gradients(make_model, [[0, 1]], loss, scale=1 / 2)
    late = Fault(rank=1, action="delay", at="torch.Tensor.backward", seconds=0.1)
    for found in zero_ext_ranks(2).run(gradients, fault=late):
        assert_bits(found, expected)


# end


def test_the_docs_have_it():
    here = Path(__file__)
    example = re.search("# example\n(.*)\n\n\n# end", here.read_text(), re.S)[1]
    assert f"```python\n{example}\n```" in (here.parents[2] / "docs/testing.md").read_text()
