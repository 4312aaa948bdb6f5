"""torch's own functions for norms and clipping, on the gradients that engines show."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from harness import Odd, assert_bits, mean_square, rank_data
from reference import gradients_of, own_values
from setups import SMALL_BUCKET_MB, backward, backward_of_all, full, small_mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import zero_ext

STAGES = range(4)


def reduced(model, mesh, rank, stage, **sharding):
    """The model, sharded, with gradients, and its optimizer."""
    zero_ext.shard(model, stage, mesh=mesh, **sharding)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    shape = (2, 3, 4, 4) if isinstance(model, Odd) else (4, 5)
    mean_square(model, rank_data(shape, rank)).backward()
    return model, optimizer


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("model_class", [small_mlp, Odd])
def test_the_norm_has_the_bits_of_the_optimizers_own(anywhere, rank, model_class):
    """In every stage, with every size of units, and in every memory order."""
    norms, clipped = [], []
    for stage in STAGES:
        for bucket_mb in (25.0, SMALL_BUCKET_MB):
            model, optimizer = reduced(model_class(), anywhere, rank, stage, bucket_mb=bucket_mb)
            norms += [
                get_total_norm(gradients(model), foreach=foreach) for foreach in (None, True, False)
            ]
            norms.append(optimizer.clip_grad_norm_(1e9))
            norms.append(clip_grad_norm_(model.parameters(), 0.01))
            clipped.append({k: g for k, g in gradients_of(model).items() if g is not None})
    for k, norm in enumerate(norms):
        assert_bits(norm, norms[0], f"norm {k}")
    for each in clipped:
        for name, gradient in each.items():
            assert_bits(gradient, clipped[0][name], name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_lists_with_other_tensors_too(anywhere, rank, norm_type):
    """They count as replicated, whatever their dtype."""
    if norm_type == math.inf and anywhere is not None and torch.__version__ < "2.13":
        pytest.skip("this torch has no infinity norm of a tensor of which a rank holds nothing")
    for stage in STAGES:
        model, _ = reduced(small_mlp(), anywhere, rank, stage, bucket_mb=SMALL_BUCKET_MB)
        for dtypes in ([torch.float32], [torch.bfloat16, torch.float32], [torch.float64]):
            if torch.float64 in dtypes and torch.get_default_device().type != "cpu":
                continue
            others = [rank_data((7, 13), 0).to(dtype) for dtype in dtypes]
            for foreach in (None, False):
                total = get_total_norm([*others, *gradients(model)], norm_type, foreach=foreach)
                whole = [*map(full, gradients(model)), *others]
                expected = torch.cat([t.double().flatten() for t in whole]).norm(norm_type)
                # torch rounds the norm of a half-precision tensor to its dtype.
                rounds = torch.bfloat16 in dtypes and norm_type != 2
                assert total.item() == pytest.approx(expected.item(), rel=1e-2 if rounds else 1e-5)
        each = torch._foreach_norm(gradients(model), norm_type)
        for norm, gradient in zip(each, gradients(model), strict=True):
            expected = full(gradient).double().norm(norm_type).item()
            assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_norms_that_are_not_finite(anywhere, rank):
    for stage in STAGES:
        model, _ = reduced(small_mlp(), anywhere, rank, stage)
        for bad in (math.inf, math.nan):
            with torch.no_grad():
                own_values(model.layers[1].bias.grad)[:1].fill_(bad)
            total = get_total_norm(gradients(model))
            assert math.isnan(total) if math.isnan(bad) else total == math.inf
            with pytest.raises(RuntimeError, match="norm of the gradients is non-finite"):
                clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_gradients_of_several_meshes_raise(mesh, rank, world):
    """Experts on some ranks, the rest on all: each rank would have another norm."""
    each = world // 2 if world >= 4 else 1
    teams = [list(range(first, min(first + each, world))) for first in range(0, world, each)]
    groups = [dist.new_group(team) for team in teams]
    some = DeviceMesh.from_group(groups[rank // each], mesh.device_type)
    for stage, expert_stage in ((0, 0), (1, 2), (2, 1), (3, 3), (0, 2)):
        dense, _ = reduced(small_mlp(), mesh, rank, stage)
        expert, _ = reduced(small_mlp(), some, rank, expert_stage)
        both = nn.ModuleDict({"dense": dense, "expert": expert})
        before = [own_values(g).clone() for g in gradients(both)]
        everyone, team = list(range(world)), teams[rank // each]
        message = re.escape(
            f"several meshes: 'layers.0.weight' is averaged over ranks {everyone}, "
            f"'layers.0.weight' over ranks {team}, and every rank would get another norm. Take"
        )
        for norm_type, foreach in ((2.0, None), (2.0, False), (1.0, None), (math.inf, None)):
            with pytest.raises(RuntimeError, match=message):
                clip_grad_norm_(both.parameters(), 1e-3, norm_type, foreach=foreach)
        with pytest.raises(RuntimeError, match=f"is averaged over ranks .{team[0]}"):
            get_total_norm([*gradients(expert), *gradients(dense)])
        for gradient, value in zip(gradients(both), before, strict=True):
            assert_bits(own_values(gradient), value)
        # What the message names.
        squares = get_total_norm(gradients(expert)).cpu() ** 2 / len(team)
        dist.all_reduce(squares)
        total = (squares.to(before[0].device) + get_total_norm(gradients(dense)) ** 2).sqrt()
        nn.utils.clip_grads_with_norm_(both.parameters(), total / 2, total)
        for gradient, value in zip(gradients(both), before, strict=True):
            torch.testing.assert_close(own_values(gradient), value / 2, rtol=1e-5, atol=1e-9)


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_several_models_over_the_same_ranks_have_one_norm(mesh, replicas_of, rank, world):
    """Also where they are replicas of other sizes."""
    for stage, other_mesh, other_stage in (
        (2, mesh, 2),
        (1, replicas_of(1), 2),
        (3, replicas_of(1), 0),
        (0, mesh, 3),
    ):
        one, _ = reduced(small_mlp(), mesh, rank, stage)
        other, _ = reduced(small_mlp(), other_mesh, rank, other_stage)
        both = nn.ModuleList([one, other])
        plain = nn.ModuleList([small_mlp(), small_mlp()])
        for model in plain:
            backward_of_all(model, world)
        norm = clip_grad_norm_(both.parameters(), 1e-3)
        torch.testing.assert_close(norm, clip_grad_norm_(plain.parameters(), 1e-3))


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_were_not_reduced_are_not_clipped(mesh, rank, stage):
    model = zero_ext.shard(small_mlp(), stage, mesh=mesh)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.5)
    never = r"{}\(\): 2 backward\(s\) inside no_sync\(\) were never reduced"
    with model.no_sync():
        backward(model, rank, micro=0)
        backward(model, rank, micro=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=never.format("clip_grad_norm_")):
            clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match=never.format("clip_grad_value_")):
            nn.utils.clip_grad_value_(model.layers[0].weight, 0.1)
        with pytest.raises(RuntimeError, match=never.format("clip_grad_norm_")):
            optimizer.clip_grad_norm_(0.1)
    backward(model, rank, micro=2)
    assert clip_grad_norm_(model.parameters(), 0.1) > 0.1
    clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_nor_are_those_of_some_micro_batches(anywhere, rank, stage):
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere, accumulation_steps=3)
    zero_ext.optim.SGD(model.parameters(), lr=0.5)
    for done in (1, 2):
        backward(model, rank, micro=done)
        message = rf"clip_grad_norm_\(\) after {done} of 3 backwards of accumulation_steps=3"
        with pytest.raises(RuntimeError, match=message):
            clip_grad_norm_(model.parameters(), 0.1)
    backward(model, rank, micro=3)
    assert clip_grad_norm_(model.parameters(), 0.1) > 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_after_the_backward_is_not_in_the_norm(anywhere, rank, stage):
    model, _ = reduced(small_mlp(), anywhere, rank, stage)
    model.layers[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.cat([full(p.grad).double().flatten() for p in trained]).norm()
    torch.testing.assert_close(clip_grad_norm_(trained, 0.01).double(), expected)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_differ_between_ranks_do_not_clip_the_others(mesh, rank, world, stage):
    """Those of ignored parameters, which each rank has by itself."""
    model = small_mlp()
    own = list(model.layers[-1].parameters())
    zero_ext.shard(model, stage, mesh=mesh, ignored_params=own)
    mean_square(model, rank_data((4, 5), rank)).backward()
    before = gradients_of(model)
    message = r"the norms that clip_grad_norm_\(\) clips by differ.* 2 of the parameters are not sh"
    with pytest.raises(ValueError, match=message):
        clip_grad_norm_(model.parameters(), 0.01)
    for name, gradient in gradients_of(model).items():
        assert_bits(gradient, before[name], name)
    for parameter in own:
        dist.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= world
    plain = small_mlp()
    for r in range(world):
        (mean_square(plain, rank_data((4, 5), r)) / world).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm.cpu(), clip_grad_norm_(plain.parameters(), 0.01).cpu())


def test_plain_models_get_torchs_functions(team):
    model = small_mlp()
    backward(model, 0)
    norm = torch.stack(torch._foreach_norm(gradients(model))).norm()
    assert_bits(clip_grad_norm_(model.parameters(), 1.0), norm)
    assert clip_grad_norm_(small_mlp().parameters(), 1.0) == 0.0
    assert get_total_norm(iter(gradients(model))) > 0
