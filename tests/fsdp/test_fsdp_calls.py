"""The calls of zero_ext.fsdp and the class FSDPModule, on one rank."""

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torchs
from harness import MLP, assert_bits, rank_data
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import zero_ext
from zero_ext import fsdp
from zero_ext.fsdp import FSDPModule, fully_shard

PAGE = Path(__file__).parents[2] / "docs/fsdp2.md"


def by_layer(model: MLP) -> MLP:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def methods_of(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value)}


def test_every_method_of_fsdp2_is_ours_and_on_the_page():
    """Also those that raise: none falls through to torch's, which would look for its own state."""
    of_torch = {name for name in methods_of(torchs.FSDPModule) if not name.startswith("_")}
    assert of_torch <= {
        name for kind in FSDPModule.__mro__[:2] for name in vars(kind) if not name.startswith("_")
    }
    named = set(re.findall(r"`(\w+)[`(]", PAGE.read_text()))
    assert of_torch - named == set()
    assert set(fsdp.__all__) - named == set()


def test_a_module_keeps_its_names_and_gains_a_class():
    model = MLP()
    names = [*dict(model.named_parameters())]
    assert by_layer(model) is model
    assert isinstance(model, MLP) and type(model).__name__ == "FSDPMLP"
    assert isinstance(model.layers[0], FSDPModule) and isinstance(model, torchs.FSDPModule)
    assert not isinstance(model.layers, FSDPModule)
    assert [*dict(model.named_parameters())] == names
    both = [nn.Linear(2, 3), nn.Linear(3, 2)]
    assert fully_shard(both) is both and all(isinstance(each, FSDPModule) for each in both)
    sequence = fully_shard(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    assert type(sequence[:1]) is nn.Sequential


@pytest.mark.parametrize("used", [False, True], ids=["noted", "sharded"])
def test_copies_are_plain_modules_of_the_module_s_own_class(used):
    model, x = by_layer(MLP()), rank_data((3, 5), 0)
    if used:
        model(x)
    model.unshard() if used else None
    for each in model.layers if used else ():
        each.unshard()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is MLP and type(other.layers[0]) is nn.Linear
        assert not [name for name in vars(other) if "zero" in name]
        assert_bits(other(x), MLP()(x))
        fully_shard(other)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: fully_shard(fully_shard(m)), ValueError, "was called for this FSDPMLP already"),
        (lambda m: fully_shard(m.layers), ValueError, "a ModuleList has no forward"),
        (
            lambda m: fully_shard(fully_shard(m).layers[0]),
            ValueError,
            "a module around this Linear",
        ),
        (lambda m: fully_shard([]), ValueError, "a list of at least one"),
        (lambda m: fully_shard(zero_ext.shard(m, 3)), ValueError, "are sharded already"),
        (lambda m: fully_shard(m, mp_policy=torch.bfloat16), TypeError, "mp_policy must be"),
        (lambda m: fully_shard(m, offload_policy=True), TypeError, "offload_policy must be"),
        (lambda m: fully_shard(m, reshard_after_forward=3), ValueError, "a divisor of 1, not 3"),
        (
            lambda m: fully_shard(m, shard_placement_fn=lambda p: Replicate()),
            NotImplementedError,
            "returns R for 'layers.0.weight'",
        ),
        (
            lambda m: fully_shard(m, dp_mesh_dims=torchs.DataParallelMeshDims(shard="dp")),
            NotImplementedError,
            "dp_mesh_dims has no counterpart",
        ),
    ],
)
def test_wrong_calls_are_named(call, error, text):
    model = MLP()
    with pytest.raises(error, match=f"^zero_ext: .*{text}"):
        call(model)


def test_an_unwrapped_model_can_be_sharded_again():
    model, x = by_layer(MLP()), rank_data((3, 5), 0)
    model(x)
    assert zero_ext.unwrap(model) is model
    assert type(model) is MLP and type(model.layers[0]) is nn.Linear
    assert_bits(by_layer(model)(x), MLP()(x))
    assert zero_ext.stats(model)["units"] == 3


def test_modules_of_one_call_lie_in_one_model():
    models = [MLP(), MLP()]
    fully_shard([models[0].layers[0], models[1].layers[0]])
    fully_shard(models[0])
    with pytest.raises(RuntimeError, match="in one call with modules of another model"):
        models[0](rank_data((3, 5), 0))


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [("bf16", None, False), ("fp32", None, True), ("bf16", "fp32", False)],
)
def test_units_are_reduced_in_one_dtype(first, second, fits):
    """fp32 for units that say nothing is what they had, or more exact."""
    dtypes = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}
    model = MLP()
    half = {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=dtypes[first], **half)
    fully_shard(model.layers[0], mp_policy=policy)
    fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=dtypes[second]))
    if not fits:
        with pytest.raises(ValueError, match="give every call the same"):
            model(rank_data((3, 5), 0))
        return
    assert model(rank_data((3, 5), 0)).dtype == torch.float32


def test_an_outer_call_comes_before_the_first_use():
    model, x = MLP(), rank_data((3, 5), 0)
    fully_shard(model.layers[0])
    model(x)
    with pytest.raises(ValueError, match="before the first use"):
        fully_shard(model)


def test_a_part_may_be_sharded_by_itself_and_ignored():
    """As a remedy for parts that another mesh or policy is meant for."""
    model, x, expected = MLP(), rank_data((3, 5), 0), MLP()
    zero_ext.shard(model.layers[1], 3)
    fully_shard(model, ignored_params={*model.layers[1].parameters()})
    for each in (model, expected):
        each(x).sum().backward()
    for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_bits(ours.grad, other.grad)


def test_calls_that_one_engine_cannot_follow_change_nothing():
    model, x = MLP(), rank_data((3, 5), 0)
    fully_shard(model.layers[0], offload_policy=fsdp.CPUOffloadPolicy())
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match=r"offload_policy=.* for FSDPLinear, and .* for FSDPMLP"
        ):
            model(x)
    assert isinstance(model.layers[0], FSDPModule)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(1)])
def test_what_changes_no_result_is_accepted(placement):
    model = MLP()
    fully_shard(model, reshard_after_forward=1, shard_placement_fn=lambda p: placement)
    model.set_requires_gradient_sync(False, recurse=False)
    model.set_is_last_backward(True)
    model.set_modules_to_forward_prefetch([model])
    fsdp.share_comm_ctx([model])
    loss = model(rank_data((3, 5), 0)).sum()
    loss.backward()
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()  # torch 2.15's pipelines wait for it
    assert_bits(loss, MLP()(rank_data((3, 5), 0)).sum())
    assert model.layers[0].weight.grad is not None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.set_all_reduce_hook(print), NotImplementedError, "set_all_reduce_hook"),
        (lambda m: m.set_custom_all_gather(None), NotImplementedError, "set_custom_all_gather"),
        (lambda m: m.set_custom_reduce_scatter(None), NotImplementedError, "set_custom_reduce"),
        (lambda m: m._get_fsdp_state(), NotImplementedError, "not one of zero_ext.fsdp"),
        (lambda m: m.set_reshard_after_forward(2), TypeError, "reshard_after_forward must be"),
        (lambda m: m.set_gradient_divide_factor(0), ValueError, "the divide factor must be pos"),
        (lambda m: m.set_modules_to_backward_prefetch([nn.ReLU()]), ValueError, "not a ReLU"),
        (lambda m: fsdp.share_comm_ctx([nn.ReLU()]), ValueError, "not a ReLU"),
        (lambda m: fsdp.register_fsdp_forward_method(m, "no"), ValueError, "has no method 'no'"),
    ],
)
def test_methods_that_cannot_work_are_named(call, error, text):
    with pytest.raises(error, match=f"^zero_ext: .*{text}"):
        call(by_layer(MLP()))


def test_an_optimizer_of_parameters_outside_the_calls_is_rejected():
    """FSDP2 would let each rank train these by itself."""
    model = MLP()
    fully_shard(model.layers[0])
    with pytest.raises(
        ValueError, match=r"AdamW steps 'parameter 2 of group 0'.*no call of fully_"
    ):
        torch.optim.AdamW(model.parameters())
    ignoring = MLP()
    fully_shard(ignoring, ignored_params={ignoring.layers[0].weight})
    with pytest.raises(ValueError, match="no call of fully_shard"):
        torch.optim.AdamW(ignoring.parameters())


def test_a_step_inside_a_backward_is_named():
    model = by_layer(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match="a step of SGD inside a backward"):
        model(rank_data((3, 5), 0)).sum().backward()


def test_other_optimizers_stay_what_they_are():
    by_layer(MLP())
    plain = torch.optim.AdamW(MLP().parameters())
    assert type(plain) is torch.optim.AdamW
    sharded = zero_ext.shard(MLP(), 3)
    assert type(torch.optim.AdamW(sharded.parameters())) is torch.optim.AdamW


def test_a_fused_optimizer_is_scaled_back_by_a_grad_scaler():
    """It would unscale by itself, which the one that takes its place does not."""
    models = [by_layer(MLP()), MLP()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler.scale(model(rank_data((3, 5), 0)).square().mean()).backward()
        scaler.step(optimizer)
    scaler.update()
    for ours, expected in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(ours), expected, rtol=0, atol=1e-6)


def test_a_step_that_was_put_in_the_place_of_the_class_s_is_kept():
    model, calls = by_layer(MLP()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(rank_data((3, 5), 0)).sum().backward()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    schedule.step()  # which warns of an optimizer that has not stepped
    assert calls == [1]
    assert isinstance(optimizer, zero_ext.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "around"])
def test_compiled_modules_are_sharded(when):
    model, x = MLP(), rank_data((3, 5), 0)
    if when == "before":
        model.compile(backend="aot_eager")
    by_layer(model)
    if when == "after":
        model.compile(backend="aot_eager")
    called = torch.compile(model, backend="aot_eager") if when == "around" else model
    for _ in range(2):
        output = called(x)
    assert_bits(output, MLP()(x))
    output.sum().backward()
    assert zero_ext.stats(model)["units"] == 3
