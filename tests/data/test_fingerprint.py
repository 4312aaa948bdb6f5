"""Fingerprints: the formula, what they depend on, and what not."""

import pytest
import torch
from harness import GATHERS_TOGETHER, assert_bits, mean_square, rank_data
from torch import nn

import zero_ext
from zero_ext import _C, fingerprint, fingerprints, parameter_fingerprints

WORD, STRIDE = 2**64 - 1, 0x9E3779B97F4A7C15


def sums_by_hand(words: list[int], key: int, first: int) -> list[int]:
    low = high = 0
    for i, word in enumerate(words, first):
        p = key + i * STRIDE & WORD
        q = (p & 0xFFFFFFFF) * (p >> 32)
        low += word * ((p ^ q) | 1)
        high += word * (((q << 32 | q >> 32) & WORD) - p & WORD | 1)
    return [low & WORD, high & WORD]


@pytest.mark.parametrize("kernels", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("numel", [0, 1, 7, 13, 1083])
def test_kernel_and_torch_have_the_formula_s_bits(kernels, numel):
    try:
        before = torch.ops.zero_ext._use_instruction_set(kernels)
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        words = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int32, device="cpu")
        key, first = 0xFEDCBA9876543210, 2**33 + 5
        expected = sums_by_hand([word & 0xFFFFFFFF for word in words.tolist()], key, first)
        (found,) = _C.hash_sums([words], [key], [first])
        assert [number & WORD for number in found.tolist()] == expected
        by_torch = fingerprints.sums_by_torch(words.to(torch.get_default_device()), key, first)
        assert_bits(by_torch.cpu(), found, "sums")
        parts = [words[: numel // 3], words[numel // 3 :]]
        found = _C.hash_sums(parts, [key, key], [first, first + numel // 3]).sum(0)
        assert [number & WORD for number in found.tolist()] == expected
    finally:
        torch.ops.zero_ext._use_instruction_set(before)


def test_chunks_of_a_device_add_up(monkeypatch):
    monkeypatch.setattr(fingerprints, "_CHUNK_NUMEL", 5)
    words = torch.randn(1083)
    found = fingerprints.sums_by_torch(words, 3, 11)
    assert_bits(found.cpu(), _C.hash_sums([words.cpu()], [3], [11])[0], "sums")


class Model(nn.Module):
    """Odd sizes, a tied head, a frozen layer, a transposed weight, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.second = nn.Linear(13, 7)
        self.second.weight = nn.Parameter(torch.randn(13, 7).t())
        self.third = nn.Linear(13, 7, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("scale", torch.full((), 1.5))

    def forward(self, x):
        x = self.frozen(torch.tanh(self.first(x)))
        return self.scale * self.third(x) + self.second(x)


def optimizers_of(model, muon=zero_ext.optim.Muon, adamw=zero_ext.optim.AdamW):
    matrices = [model.first.weight, model.second.weight]
    return muon(matrices, lr=0.01), adamw([model.first.bias, model.second.bias], lr=0.01)


def trained(mesh, stage: int, rank: int, world: int, steps: int = 2, dtype=torch.float32):
    """After steps of four micro-batches, summed in their order."""
    model = zero_ext.shard(Model().to(dtype), stage, mesh=mesh, bucket_mb=1e-4)
    model.set_gradient_divide_factor(1.0)
    optimizers = optimizers_of(model)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        numbers = range(rank, 4, world)
        for k in numbers:
            mean_square(model, rank_data((3, 7), k, step, dtype=dtype)).backward()
        for optimizer in optimizers:
            optimizer.step(divide_by=len(numbers))
    return model, optimizers


uneven = pytest.mark.skipif(GATHERS_TOGETHER, reason="every rank enters every gather")


@pytest.mark.dist
@uneven
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_and_stages_have_one_process_s_fingerprint(mesh, rank, world, stage, dtype):
    several, one = (
        trained(mesh, stage, rank, world, dtype=dtype),
        trained("alone", 1, 0, 1, 2, dtype),
    )
    for gradients in (False, True):
        found, expected = (
            parameter_fingerprints(model, *optimizers, gradients=gradients)
            for model, optimizers in (several, one)
        )
        assert found == expected
        assert len(set(found.values())) == 7
        found, expected = (
            fingerprint(model, *optimizers, gradients=gradients)
            for model, optimizers in (several, one)
        )
        assert found == expected and len(found) == 32


@pytest.mark.dist
@uneven
def test_states_at_owners_count_once(mesh, rank, world):
    found = []
    for where, first, ranks in ((mesh, rank, world), ("alone", 0, 1)):
        torch.manual_seed(0)
        model = zero_ext.shard(nn.Linear(7, 13), 2, mesh=where)
        model.set_gradient_divide_factor(1.0)
        optimizer = zero_ext.optim.wrap(torch.optim.Adafactor, model.parameters(), lr=0.01)
        for k in range(first, 4, ranks):
            mean_square(model, rank_data((3, 7), k)).backward()
        optimizer.step(divide_by=len(range(first, 4, ranks)))
        found.append(parameter_fingerprints(model, optimizer))
    assert found[0] == found[1]


def test_a_plain_model_has_the_fingerprint_of_the_same_values(anywhere):
    plain, sharded = Model(), zero_ext.shard(Model(), 3, mesh=anywhere)
    if anywhere is None:
        assert fingerprint(plain) == fingerprint(sharded)
    assert set(parameter_fingerprints(plain)) == {
        *("first.weight", "first.bias", "frozen.weight", "frozen.bias"),
        *("second.weight", "second.bias", "scale"),
    }


def test_one_bit_of_any_value_changes_it():
    model, optimizers = trained("alone", 1, 0, 1)
    seen = {fingerprint(model, *optimizers)}
    before = parameter_fingerprints(model, *optimizers)
    momentum = optimizers[0].state[model.first.weight]["momentum_buffer"]
    step = optimizers[1].state[model.first.bias]["step"]
    values = [model.first.weight.data, model.frozen.bias.data, model.scale, momentum, step]
    names = ["first.weight", "frozen.bias", "scale", "first.weight", "first.bias"]
    for name, value in zip(names, values, strict=True):
        place = (0,) * value.dim()
        value[place].view(torch.int32).bitwise_xor_(1)
        after = parameter_fingerprints(model, *optimizers)
        assert {n for n in after if after[n] != before[n]} == {name}
        seen.add(fingerprint(model, *optimizers))
        value[place].view(torch.int32).bitwise_xor_(1)
    weight = model.first.weight.data
    weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()
    seen.add(fingerprint(model, *optimizers))
    assert len(seen) == 7


def test_zeros_and_nothing_differ():
    seen = {
        fingerprint(nn.ParameterList(torch.zeros(n) for n in sizes))
        for sizes in ([], [0], [2], [2, 2])
    }
    model = nn.Linear(2, 2)
    seen |= {fingerprint(model), fingerprint(model, gradients=True)}
    model.weight.grad = torch.zeros(2, 2)
    seen.add(fingerprint(model, gradients=True))
    assert len(seen) == 6


def test_other_dtypes_keep_their_bits():
    for dtype, bit in ((torch.int64, 40), (torch.uint8, 3), (torch.bool, 0)):
        model = nn.Module()
        model.register_buffer("value", torch.zeros(3, dtype=dtype))
        before = fingerprint(model)
        model.value[1] = 1 << bit
        assert fingerprint(model) != before


def test_a_foreign_parameter_is_an_error():
    with pytest.raises(ValueError, match="is not one of the module's"):
        fingerprint(Model(), torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1))
