"""zero_ext.no_sync and summon_full_params: a sharded module's methods, for type checkers."""

import pytest
import torch
from harness import MLP, assert_bits, mean_square, rank_data
from setups import SMALL_BUCKET_MB
from torch import nn

import zero_ext


@pytest.mark.parametrize("stage", [1, 3])
def test_they_are_the_module_s_methods(anywhere, rank, stage):
    model = zero_ext.shard(MLP(13), stage, mesh=anywhere, bucket_mb=SMALL_BUCKET_MB)
    with zero_ext.no_sync(model):
        mean_square(model, rank_data((4, 5), rank)).backward()
    kept = 0 if stage == 1 else model.stats()["units"]
    assert zero_ext.stats(model)["reductions"] == kept
    before = zero_ext.full_tensor(model.layers[0].weight)
    with zero_ext.summon_full_params(model), torch.no_grad():
        model.layers[0].weight.add_(1)
    assert_bits(zero_ext.full_tensor(model.layers[0].weight), before + 1)
    with zero_ext.summon_full_params(model, writeback=False), torch.no_grad():
        assert_bits(model.layers[0].weight.detach().clone(), before + 1)


def test_a_plain_module_has_none():
    with pytest.raises(AttributeError, match="no_sync"):
        zero_ext.no_sync(nn.Linear(3, 5))
