"""Checkpoints of the engine: frozen parameters left out, and the moments of a run to save at."""

import pytest
import torch
from harness import assert_bits, mean_square
from setups import train_batch
from test_initialize import STAGES, initialized
from torch import nn

import zero_ext
from zero_ext import checkpoint

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Adapted(nn.Module):
    """A frozen base with a buffer, a tied frozen weight, an adapter and a head."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(5, 13)
        self.twin = nn.Linear(5, 13, bias=False)
        self.twin.weight = self.base.weight
        self.adapter, self.head = nn.Linear(5, 13, bias=False), nn.Linear(13, 7)
        self.register_buffer("seen", torch.zeros(3))
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        self.seen += 1
        return self.head(torch.tanh(self.base(x) + self.twin(x) + self.adapter(x)))


FROZEN = {"base.weight", "base.bias", "twin.weight"}
TRAINED = {"adapter.weight", "head.weight", "head.bias"}


def engine_of(mesh, stage, seed=1, model=None, **config):
    model = Adapted(seed) if model is None else model
    return initialized(mesh, model, stage, SGD, gradient_accumulation_steps=2, **config)


def run(engine, rank, steps, micros=2):
    dtype = next(engine.parameters()).dtype
    for step in steps:
        for micro in range(micros):
            engine.backward(mean_square(engine, train_batch(rank, step, micro, dtype)))
            engine.step()


def assert_same(one, other) -> None:
    for p, q in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))
        if p.requires_grad and one.global_steps:
            states = [
                zero_ext.full_state(e.optimizer, x, "momentum_buffer")
                for e, x in ((one, p), (other, q))
            ]
            assert_bits(*states)


@STAGES
def test_a_checkpoint_without_frozen_parameters(anywhere, rank, path, stage):
    engine = engine_of(anywhere, stage)
    run(engine, rank, range(2))
    engine.save_checkpoint(path / "all")
    engine.save_checkpoint(path / "trained", exclude_frozen_parameters=True)
    for folder, names in (("all", TRAINED | FROZEN), ("trained", TRAINED)):
        state = checkpoint.read_whole(path / folder / "global_step2")[0]
        assert state.keys() == names | {"seen"}
    again = engine_of(anywhere, stage)
    with pytest.raises((ValueError, RuntimeError), match=r"lacks 'base\.bias', 'base\.weight'"):
        again.load_checkpoint(path / "trained")
    with pytest.warns(UserWarning, match=r"lacks 'base\.bias', .*: passed over"):
        again.load_checkpoint(path / "trained", load_module_strict=False)
    assert again.seen.tolist() == [4.0] * 3
    assert_same(engine, again)
    run(engine, rank, range(2, 4))
    run(again, rank, range(2, 4))
    assert_same(engine, again)
    other = engine_of(anywhere, 3 - stage, seed=2)
    base = zero_ext.full_tensor(other.base.weight)
    with pytest.warns(UserWarning, match="passed over"):
        other.load_checkpoint(path / "trained", load_module_strict=False)
    assert_bits(zero_ext.full_tensor(other.base.weight), base)  # its own
    trained = checkpoint.read_whole(path / "trained" / "global_step2")[0]
    for name in sorted(TRAINED):
        value = zero_ext.full_tensor(other.module.get_parameter(name))
        assert_bits(value.cpu(), trained[name], name)


@STAGES
def test_weights_without_frozen_parameters(anywhere, path, stage):
    engine = engine_of(anywhere, stage, bf16={"enabled": True})
    engine.save_16bit_model(path, "trained.bin", exclude_frozen_parameters=True)
    engine.save_fp16_model(path, "all.bin")
    saved = {name: torch.load(path / f"{name}.bin") for name in ("trained", "all")}
    assert saved["trained"].keys() == TRAINED | {"seen"} == saved["all"].keys() - FROZEN
    assert saved["all"].keys() == Adapted().state_dict().keys()
    assert saved["trained"]["head.weight"].dtype == torch.bfloat16
    assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == TRAINED | {"seen"}


def test_a_model_with_a_state_of_its_own(anywhere, path):
    class Partly(Adapted):
        def state_dict(self, *arguments, **keywords):
            state = super().state_dict(*arguments, **keywords)
            return {name: value for name, value in state.items() if "weight" in name}

    engine = engine_of(anywhere, 1, model=Partly())
    engine.save_checkpoint(path, "tag", exclude_frozen_parameters=True)
    state = checkpoint.read_whole(path / "tag")[0]
    assert state.keys() == {"adapter.weight", "head.weight"}


@pytest.mark.parametrize("frozen", ["none", "all but one"])
def test_hardly_anything_is_left_out_or_left(anywhere, rank, path, frozen):
    model = Adapted().requires_grad_(frozen == "none")
    model.head.bias.requires_grad_(True)
    engine = engine_of(anywhere, 3, model=model)
    run(engine, rank, [0])
    engine.save_checkpoint(path, exclude_frozen_parameters=True)
    state = checkpoint.read_whole(path / "global_step1")[0]
    every = FROZEN | TRAINED if frozen == "none" else {"head.bias"}
    assert state.keys() == every | {"seen"}


@STAGES
def test_saved_before_the_first_step_and_right_after_loading(anywhere, rank, path, stage):
    first = engine_of(anywhere, stage)
    first.save_checkpoint(path / "a")
    assert first.load_checkpoint(path / "a") == (str(path / "a" / "global_step0"), {})
    second = engine_of(anywhere, stage, seed=2)
    second.load_checkpoint(path / "a")
    second.save_checkpoint(path / "b")
    third = engine_of(anywhere, stage, seed=3)
    third.load_checkpoint(path / "b")
    plain = engine_of(anywhere, stage)
    for engine in (first, third, plain):
        run(engine, rank, range(2))
    assert_same(first, plain)
    assert_same(third, plain)


@STAGES
def test_saved_in_the_middle_of_an_accumulation(anywhere, rank, path, stage):
    engine = engine_of(anywhere, stage)
    run(engine, rank, [0])
    run(engine, rank, [1], micros=1)
    engine.save_checkpoint(path)
    assert engine.micro_steps == 3
    again = engine_of(anywhere, stage, seed=2)
    again.load_checkpoint(path)
    assert (again.micro_steps, again.global_steps) == (2, 1)  # the half is dropped
    run(again, rank, [1])
    engine.backward(mean_square(engine, train_batch(rank, 1, 1)))
    engine.step()
    assert_same(engine, again)


@STAGES
def test_loaded_without_the_optimizers_states(anywhere, rank, path, stage):
    engine = engine_of(anywhere, stage)
    run(engine, rank, range(2))
    engine.save_checkpoint(path)
    for settings in ({"load_optimizer_states": False}, {"load_module_only": True}):
        again = engine_of(anywhere, stage, seed=2)
        again.load_checkpoint(path, **settings)
        assert again.global_steps == (2 if "load_optimizer_states" in settings else 0)
        for p, q in zip(engine.module.parameters(), again.module.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q))
            if q.requires_grad:
                state = zero_ext.full_state(again.optimizer, q, "momentum_buffer")
                assert not state.count_nonzero()


def test_calls_that_make_no_sense(anywhere, path):
    engine = engine_of(anywhere, 1)
    with pytest.raises(ValueError, match=r"save_checkpoint\(''\): name a folder"):
        engine.save_checkpoint("")
    with pytest.raises(ValueError, match=r"load_checkpoint\(\) has no custom_load_fn"):
        engine.load_checkpoint(path, custom_load_fn=lambda src, dst: None)
