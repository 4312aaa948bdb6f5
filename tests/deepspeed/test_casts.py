"""torch_autocast, and the buffers that stay in fp32."""

import pytest
import torch
from harness import assert_bits, mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext
from zero_ext.deepspeed.config import Config

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Model(nn.Module):
    """Autocast runs the linear layers in half precision, and the norm in fp32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.first, self.norm, self.last = nn.Linear(5, 13), nn.LayerNorm(13), nn.Linear(13, 7)
        self.dtypes = []

    def forward(self, x):
        x = self.first(x)
        self.dtypes.append(x.dtype)
        return self.last(self.norm(x.float()))


def engine_of(mesh, stage, autocast, **config):
    return initialized(
        mesh,
        Model(),
        stage,
        SGD,
        gradient_accumulation_steps=1,
        torch_autocast=autocast,
        **config,
    )


def device_type() -> str:
    return torch.get_default_device().type


@pytest.mark.parametrize("name", ["bfloat16", "torch.float16"])
@STAGES
def test_forwards_run_in_autocast(anywhere, rank, stage, name):
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
    safe = ["torch.nn.Linear"] if stage == 1 else None
    section = {"enabled": True, "dtype": name, "lower_precision_safe_modules": safe}
    engine = engine_of(anywhere, stage, section)
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == dtype
    plain, ranks = Model(), [rank] if anywhere is None else range(anywhere.size())
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device_type(), enabled=dtype == torch.float16)
    engine.backward(mean_square(engine, train_batch(rank)))
    assert engine.module.dtypes == [dtype]
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    engine.step()
    for peer in ranks:
        with torch.autocast(device_type(), dtype):
            loss = mean_square(plain, train_batch(peer))
        scaler.scale(loss / len(ranks)).backward()
    if dtype == torch.float16:  # not scaler.step(): it needs a device that it knows
        for p in plain.parameters():
            p.grad /= scaler.get_scale()
    torchs.step()
    for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True):
        # The scaled loss rounds elsewhere in half precision where ranks divide it.
        torch.testing.assert_close(zero_ext.full_tensor(p), q.detach(), rtol=1e-3, atol=2e-4)
    assert engine.dynamic_loss_scale() == (dtype == torch.float16)
    if dtype == torch.float16:
        assert engine.loss_scale() == 2.0**16
        loss = mean_square(engine, train_batch(rank, 1))
        engine.backward(loss * float("inf"))
        engine.step()
        assert not engine.was_step_applied() and engine.loss_scale() == 2.0**15


@STAGES
def test_safe_modules_mean_gradients_that_lose_nothing_in_half_precision(anywhere, rank, stage):
    """DeepSpeed sends those of lower_precision_safe_modules in autocast's dtype and adds them up in
    it. Each rank's have that dtype's precision already. Here their sums are in fp32, so that they
    differ from DeepSpeed's by its rounding alone, and the list changes nothing."""
    by_list = []
    for safe in (None, ["torch.nn.LayerNorm"]):
        section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": safe}
        engine = engine_of(anywhere, stage, section)
        engine.backward(mean_square(engine, train_batch(rank)))
        by_list.append([zero_ext.full_grad(p) for p in engine.module.parameters()])
    of_ranks = []
    for peer in [rank] if anywhere is None else range(anywhere.size()):
        plain = Model()
        with torch.autocast(device_type(), torch.bfloat16):
            loss = mean_square(plain, train_batch(peer))
        loss.backward()
        of_ranks.append([p.grad for p in plain.parameters()])
    count = len(of_ranks)
    for k, name in enumerate(name for name, _ in plain.named_parameters()):
        ours, parts = by_list[0][k], [gradients[k] for gradients in of_ranks]
        assert_bits(by_list[1][k], ours, name)
        exact = sum(part.double() for part in parts) / count
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-9, msg=name)
        if not name.startswith("norm"):  # a torch.nn.Linear: safe by default
            lower = [part.bfloat16() for part in parts]
            assert all(torch.equal(a.float(), b) for a, b in zip(lower, parts, strict=True)), name
            deepspeeds = sum(part / count for part in lower).double()
            rounding = 2.0**-8 * sum(part.double().abs() for part in parts)
            assert ((ours - deepspeeds).abs() <= rounding).all(), name


def test_autocast_around_the_engine(anywhere, rank):
    batch = train_batch(rank)
    without = engine_of(anywhere, 1, {"enabled": False, "dtype": "nonsense"})
    expected = without(batch)
    with torch.autocast(device_type(), torch.bfloat16):
        with pytest.warns(UserWarning, match=r"autocast around the engine is switched off"):
            output = without(batch)
        assert_bits(output, expected)
        inside = engine_of(anywhere, 1, {"enabled": True, "dtype": "fp16"})
        inside(batch)
    assert not without.torch_autocast_enabled() and without.module.dtypes == [torch.float32] * 2
    assert inside.module.dtypes == [torch.float16]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True}, "'torch_autocast.dtype' is None: choose 'bf16' or 'fp16'"),
        ({"enabled": True, "dtype": "fp32"}, "'torch_autocast.dtype' is 'fp32': choose"),
        ({"enabled": True, "dtype": "fp8"}, "'torch_autocast.dtype' is 'fp8': choose"),
        ({"enabled": "yes"}, "'torch_autocast.enabled' is 'yes', not true or false"),
        (
            {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": [nn.Linear]},
            "lower_precision_safe_modules' is .*, not a list of names",
        ),
        ({"enabled": True, "dtype": "bf16", "dtyp": 3}, "'torch_autocast.dtyp' is 3: there is no"),
    ],
    ids=str,
)
def test_bad_sections(section, message):
    with pytest.raises(ValueError, match=message) as raised:
        Config.read({"train_batch_size": 2, "torch_autocast": section}, 1)
    assert "errors" not in str(raised.value)  # one


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("bias_*on",)
    _keep_in_fp32_modules = frozenset({"angles"})

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        for name in ("bias_correction", "angles", "other"):
            self.register_buffer(name, torch.full((3,), 1.001))
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))


def buffers_of(mesh, mode, **types):
    model = nn.Sequential(Router(), nn.Linear(5, 5))
    model.register_buffer("angles", torch.ones(2))  # no list of its own module names it
    config = {"data_types": {"buffer_dtype": "fp16", **types}, mode: {"enabled": True}}
    engine = initialized(mesh, model, 2, **config)
    kept = {n: b for n, b in engine.module.named_buffers() if b.dtype == torch.float32}
    assert all(torch.equal(b, torch.full_like(b, 1.001)) for n, b in kept.items() if b.numel() == 3)
    assert engine.module[0].count.dtype == torch.int64
    return set(kept)


@pytest.mark.parametrize("said", [{}, {"keep_in_fp32_modules": "auto"}])
def test_buffers_that_a_model_of_transformers_keeps_in_fp32(anywhere, said):
    assert buffers_of(anywhere, "bf16", **said) == {"0.bias_correction"}
    assert buffers_of(anywhere, "fp16", **said) == {"0.bias_correction", "0.angles"}


def test_buffers_that_the_file_keeps_in_fp32(anywhere):
    def kept(*patterns):
        return buffers_of(anywhere, "bf16", keep_in_fp32_modules=list(patterns))

    assert kept() == set()
    assert kept("angles") == {"angles", "0.angles"}
    assert kept("0.*gles", "low", "count") == {"0.angles", "0.low"}
    with pytest.raises(ValueError, match="keep_in_fp32_modules' is 'angles', not a list of names"):
        buffers_of(anywhere, "bf16", keep_in_fp32_modules="angles")
