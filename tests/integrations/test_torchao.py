"""torchao's float8 recipe, emulated on the CPU: ``make test-packages``."""

import pytest
import torch
from harness import ONE_UNIT_EACH, assert_bits, mean_square, rank_batches
from reference import OneProcess, fma_gradients
from torch import nn

import zero_ext
from zero_ext import fsdp

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]


def float8_model(*, gathers: bool) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layers = nn.Linear(7, 57), nn.Tanh(), nn.Linear(57, 19), nn.Tanh(), nn.Linear(19, 13)
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    return float8.convert_to_float8_training(nn.Sequential(*layers), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_has_the_bits_of_one_process(stage, dtype, world, rank):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype)
    options = {"mp_policy": policy, "bucket_mb": ONE_UNIT_EACH}
    model = zero_ext.shard(float8_model(gathers=True), stage, units=nn.Linear, **options)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    plain = float8_model(gathers=False)
    masters = {name: p.detach().clone() for name, p in plain.named_parameters()}
    reference = OneProcess(plain.to(dtype), lambda p: torch.optim.SGD(p, lr=0.5), masters)
    for step in range(3):
        batches = rank_batches((3, 7), world, step, dtype=dtype)
        loss = mean_square(model, batches[0][rank])
        assert_bits(loss, mean_square(reference.model, batches[0][rank]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(fma_gradients(reference.model, batches, world))
    for name, parameter in model.named_parameters():
        assert_bits(zero_ext.full_tensor(parameter), reference.masters[name], name)
