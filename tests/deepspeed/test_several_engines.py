"""Several engines under one loss, casts of quantised storage, and what scripts ask parameters."""

import pytest
import torch
from harness import mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed
from zero_ext.deepspeed.zero import ZeroParamStatus

FP8 = torch.float8_e4m3fn


class Scaled(nn.Linear):
    """Its gradient is the mean of its inputs, whatever its values are."""

    def __init__(self):
        super().__init__(5, 7, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return super().forward(x).sum(1).mean()


def moved(engine) -> torch.Tensor:
    """How far the parameters of one engine have gone down."""
    return -zero_ext.full_tensor(engine.module.weight).cpu()


def expected(rank, mesh, micros, steps) -> torch.Tensor:
    """The average over micro-batches and ranks."""
    ranks = [rank] if mesh is None else range(mesh.size())
    means = [train_batch(r, 0, micro).mean(0) for r in ranks for micro in range(micros)]
    return (torch.stack(means).sum(0) / (len(ranks) * steps)).expand(7, 5).cpu()


@STAGES
@pytest.mark.parametrize("accumulates", [(3, 3), (1, 3), (3, 1)], ids=str)
def test_the_backward_that_runs_divides(anywhere, rank, stage, accumulates):
    """Engine A divides the loss; B's own setting does not count. Their optimizers may differ."""
    a, b = (
        initialized(
            anywhere,
            Scaled(),
            stage,
            {"type": "SGD", "params": {"lr": 1.0}},
            gradient_accumulation_steps=steps,
        )
        for steps in accumulates
    )
    micros = 3
    for micro in range(micros):
        batch, last = train_batch(rank, 0, micro), micro == micros - 1
        for engine in (a, b):
            engine.set_gradient_accumulation_boundary(last)
        a.backward(a(batch) + b(batch))
        if last:
            a.step()
            b.step()
    right = expected(rank, anywhere, micros, accumulates[0])
    torch.testing.assert_close(moved(a), right)
    torch.testing.assert_close(moved(b), right)


def test_each_engine_divides_its_own_losses_afterwards(anywhere, rank):
    a, b = (
        initialized(anywhere, Scaled(), 2, {"type": "SGD", "params": {"lr": 1.0}}) for _ in "ab"
    )
    batch = train_batch(rank, 0, 0)
    a.backward(a(batch))
    b(batch).backward()  # not through the engine: its gradients are divided
    for engine in (a, b):
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    right = expected(rank, anywhere, 1, 3)
    torch.testing.assert_close(moved(a), right)
    torch.testing.assert_close(moved(b), right)


def test_a_scaled_loss_and_an_engine_without_a_scale(anywhere, rank):
    """The loss scale is the one of the backward, too."""
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    fp16 = {"enabled": True, "loss_scale": 128.0}
    a = initialized(anywhere, Scaled(), 1, sgd, fp16=fp16, gradient_accumulation_steps=1)
    b = initialized(anywhere, Scaled(), 1, sgd, gradient_accumulation_steps=1)
    batch = torch.ones(4, 5)
    a.backward(a(batch.half()).float() + b(batch))
    for engine in (a, b):
        engine.step()
    for engine in (a, b):
        torch.testing.assert_close(moved(engine), torch.ones(7, 5, device="cpu"))


def test_an_engine_that_was_destroyed_is_no_obstacle(anywhere, rank):
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    a, b, c = (initialized(anywhere, Scaled(), 2, sgd) for _ in "abc")
    b.destroy()
    zero_ext.unwrap(c.module)
    a.backward(a(train_batch(rank, 0, 0)))
    assert a.optimizer is not None


class Quantised(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.stored = nn.Parameter(torch.ones(64, 64).to(FP8), requires_grad=False)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))
        self.register_buffer("codes", torch.ones(4).to(FP8))


@STAGES
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_quantised_storage_keeps_its_dtype(anywhere, device, stage, half):
    if device.type != "cpu":
        pytest.skip("the emulated device has no fp8")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    engine = initialized(
        anywhere, Quantised(), stage, **{half: {"enabled": True}}, data_types={"buffer_dtype": half}
    )
    model = engine.module
    assert (model.weight.dtype, model.stored.dtype) == (dtype, FP8)
    assert (model.scale.dtype, model.codes.dtype) == (dtype, FP8)


def test_zero_init_keeps_quantised_storage(anywhere, device):
    if device.type != "cpu":
        pytest.skip("the emulated device has no fp8")
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        model = nn.Sequential(Quantised())
    assert (model[0].weight.dtype, model[0].stored.dtype) == (torch.bfloat16, FP8)


@STAGES
def test_scripts_find_the_parameters_that_they_gather(anywhere, rank, stage):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 13))
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    initialized(anywhere, model, stage)
    for number, (name, p) in enumerate(model.named_parameters()):
        wanted = [p] if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE else []
        assert len(wanted) == (stage == 3)
        with deepspeed.zero.GatheredParameters(wanted, enabled=len(wanted) > 0):
            assert p.data.cpu().shape == plain[name].shape
            if stage == 3:
                assert p.ds_status == ZeroParamStatus.AVAILABLE
                assert (p.ds_id, p.ds_shape, p.ds_numel) == (number, p.shape, p.numel())
        if stage == 3:
            assert p.ds_status == 2


def test_a_plain_model_has_no_status_left(anywhere, rank):
    engine = initialized(anywhere, nn.Linear(5, 7), 3)
    model = engine.module
    engine.destroy()
    assert not hasattr(model.weight, "ds_id")
    mean_square(model, train_batch(rank)).backward()
