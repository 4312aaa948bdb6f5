"""Experts that lie on some of the ranks: sharding them changes no bit of the training.

The expected values are those of the same experts on the same mesh, without sharding.
"""

import pytest
import torch
import torch.distributed as dist
from expert_models import ByExpertsAlone, batch_of, loss_of, made_with_experts
from harness import ONE_UNIT_EACH, OWN_BACKEND
from parallel_models import local, parts_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import zero_ext
from zero_ext import fsdp
from zero_ext.tensor.meshes import part_of

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
MICROS, STEPS = 2, 3


@pytest.fixture
def mesh(world, no_stale_meshes) -> DeviceMesh:
    """(rows, ep): with four ranks two hold each expert, else each rank its own."""
    ep = 2 if world % 2 == 0 else world
    device = torch.get_default_device().type
    if device != "cpu" and not OWN_BACKEND:
        pytest.skip("tokens need messages of the device's own backend")
    return init_device_mesh(device, (world // ep, ep), mesh_dim_names=("rows", "ep"))


def sharded(mesh: DeviceMesh, stage: int, **kwargs):
    model = made_with_experts(mesh["ep"])
    return zero_ext.shard(model, stage, expert_mesh=mesh["ep"], bucket_mb=ONE_UNIT_EACH, **kwargs)


def run_backwards(model, mesh: DeviceMesh, step: int) -> list[Tensor]:
    losses = []
    for micro in range(MICROS):
        loss = loss_of(model, batch_of(step, micro * dist.get_world_size() + mesh.get_rank()))
        loss.backward()
        losses.append(loss.detach())
    return losses


def exact_norm(gradients: dict[str, Tensor], model, mesh: DeviceMesh) -> Tensor:
    """In float64, each element once."""
    squares = {name: gradient.double().square().sum() for name, gradient in gradients.items()}
    of_experts = sum(squares[n] for n, p in model.named_parameters() if isinstance(p, DTensor))
    dist.all_reduce(of_experts, group=mesh["ep"].get_group())
    shared = sum(squares[n] for n, p in model.named_parameters() if not isinstance(p, DTensor))
    return (of_experts + shared).sqrt()


@STAGES
def test_training_has_the_bits_of_experts_alone(mesh, stage):
    """With uneven tokens, accumulation and clipping."""
    alone = ByExpertsAlone(
        made_with_experts(mesh["ep"]), mesh["ep"], lambda p: torch.optim.AdamW(p, **ADAMW)
    )
    model = sharded(mesh, stage)
    wrapped = zero_ext.optim.wrap(
        torch.optim.AdamW, model.parameters(), max_grad_norm=0.05, **ADAMW
    )
    rows, row = mesh["rows"].size(), mesh["rows"].get_local_rank()
    losses = []
    for step in range(STEPS):
        gradients = alone.gradients(step, MICROS, rows)
        losses += run_backwards(model, mesh, step)
        for name, p in model.named_parameters():
            shown = zero_ext.full_grad(p)
            assert shown.shape == p.shape
            assert torch.equal(part_of(p, shown), gradients[name]), name
        norm = exact_norm(gradients, alone.model, mesh)
        factor = (0.05 / (norm + 1e-6)).float()
        assert factor < 1
        alone.step({name: gradient * factor for name, gradient in gradients.items()})
        wrapped.step()
        wrapped.zero_grad()
        assert_close(torch.as_tensor(wrapped.grad_norm), norm.float(), rtol=1e-6, atol=0)
    expected = {name: local(p) for name, p in alone.model.named_parameters()}
    for name, part in parts_of(model).items():
        assert torch.equal(part, expected[name]), name
    mine = [loss for k, loss in enumerate(alone.losses) if k % rows == row]
    assert all(map(torch.equal, losses, mine))


def test_fully_shard_takes_experts_on_their_own_mesh(mesh):
    """As torchtitan calls it: the experts over the ranks that have the same ones."""
    alone = ByExpertsAlone(
        made_with_experts(mesh["ep"]), mesh["ep"], lambda p: torch.optim.AdamW(p, **ADAMW)
    )
    model, rows = made_with_experts(mesh["ep"]), mesh["rows"].size()
    for layer in model.layers:
        fsdp.fully_shard(layer.experts, mesh=mesh["rows"])
        layer.experts.set_gradient_divide_factor(dist.get_world_size())
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        gradients = alone.gradients(step, MICROS, rows)
        norm = exact_norm(gradients, alone.model, mesh)
        alone.step(gradients)
        run_backwards(model, mesh, step)
        if step == 0:
            for name, p in model.named_parameters():
                assert torch.equal(part_of(p, zero_ext.full_grad(p)), gradients[name]), name
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert_close(torch.as_tensor(found), norm.float(), rtol=1e-6, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: local(p) for name, p in alone.model.named_parameters()}
    for name, part in parts_of(model).items():
        assert_close(part, expected[name], rtol=1e-5, atol=1e-6)  # an update in one expression


def test_fully_shard_rejects_experts_on_other_ranks(mesh):
    model = made_with_experts(mesh["ep"])
    fsdp.fully_shard(model.layers[0].experts, mesh=mesh["ep"])
    fsdp.fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"mesh=.* for FSDPExperts, and None for FSDPMix"):
        run_backwards(model, mesh, 0)


@STAGES
def test_each_element_counts_once_in_the_norm(mesh, stage):
    alone = ByExpertsAlone(
        made_with_experts(mesh["ep"]), mesh["ep"], lambda p: torch.optim.SGD(p, lr=0.1)
    )
    gradients = alone.gradients(0, MICROS, mesh["rows"].size())
    expected = exact_norm(gradients, alone.model, mesh).float()
    model = sharded(mesh, stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    run_backwards(model, mesh, 0)
    largest = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=torch.inf)
    stock = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    own = optimizer.clip_grad_norm_(1e9)
    assert torch.equal(stock, own)
    assert_close(own, expected, rtol=1e-6, atol=0)
    top = torch.stack([gradient.abs().max() for gradient in gradients.values()]).max()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    assert torch.equal(largest, top)


@STAGES
def test_a_nan_in_one_expert_skips_the_step_everywhere(mesh, stage):
    model = sharded(mesh, stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    before = parts_of(model)
    run_backwards(model, mesh, 0)
    if mesh.get_rank() == 1:
        part = local(model.layers[1].experts.up.grad).view(-1)
        part[:1] = torch.nan
    with pytest.warns(UserWarning, match="step skipped on all ranks"):
        optimizer.step()
        assert optimizer.skipped_steps == 1
    assert all(torch.equal(before[name], part) for name, part in parts_of(model).items())
    optimizer.zero_grad()
    run_backwards(model, mesh, 0)
    optimizer.step()
    assert not any(torch.equal(before[name], part) for name, part in parts_of(model).items())


@pytest.mark.parametrize("stages", [(2, 3), (3, 1)], ids=str)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(mesh, stages, shared_path):
    models = []
    for stage in stages:
        model = sharded(mesh, stage)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
        if not models:
            run_backwards(model, mesh, 0)
            optimizer.step()
            optimizer.zero_grad()
            zero_ext.checkpoint.save(shared_path / "ours", model, optimizer)
            values = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
            every = zero_ext.iter_full_params(model, dtype=torch.float32)
            yielded = {name: value.clone() for name, value in every}
        else:
            zero_ext.checkpoint.load(shared_path / "ours", model, optimizer)
        run_backwards(model, mesh, 1)
        optimizer.step()
        models.append(parts_of(model))
    assert all(map(torch.equal, *[each.values() for each in models]))
    count = 3 * mesh["ep"].size()
    assert values["layers.0.experts.up"].shape[0] == count
    assert all(torch.equal(yielded[name], value) for name, value in values.items())
    zero_ext.checkpoint.export_safetensors(model, shared_path / "exported")
    exported = load_file(shared_path / "exported" / "model.safetensors")
    assert exported["layers.0.experts.up"].shape[0] == count
    whole = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    assert all(torch.equal(exported[name], value.cpu()) for name, value in whole.items())


@STAGES
def test_ranks_may_run_different_numbers_of_backwards(mesh, stage):
    """Whole rows of ranks: the tokens of a row meet in its experts."""
    if mesh["rows"].size() == 1:
        pytest.skip("one row of ranks")
    row = mesh["rows"].get_local_rank()
    model = sharded(mesh, stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(1 + row):
        loss_of(model, batch_of(micro, mesh.get_rank())).backward()
    optimizer.step()
    again = sharded(mesh, 2)
    optimizer = zero_ext.optim.SGD(again.parameters(), lr=0.1)
    for micro in range(2):
        loss = loss_of(again, batch_of(micro, mesh.get_rank()))
        (loss if micro <= row else 0 * loss).backward()
    optimizer.step()
    for name, part in parts_of(model).items():
        assert_close(part, parts_of(again)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_are_frozen_and_unfrozen(mesh, stage):
    model, expected = sharded(mesh, stage), sharded(mesh, 2)
    trained = []
    for each, freezes in ((model, True), (expected, False)):
        each.layers[0].experts.requires_grad_(not freezes)
        optimizer = zero_ext.optim.SGD(each.parameters(), lr=0.1)
        if freezes:
            run_backwards(each, mesh, 0)
            optimizer.zero_grad()
            each.layers[0].experts.requires_grad_(True)
        run_backwards(each, mesh, 0)
        optimizer.step()
        trained.append(parts_of(each))
    assert all(map(torch.equal, *[each.values() for each in trained]))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_users_write_is_compared_between_ranks_with_the_same_experts(mesh, stage):
    """Other ranks have other experts, and may write other values."""
    model = sharded(mesh, stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    up, expert = model.layers[1].experts.up, mesh["ep"].get_local_rank()
    run_backwards(model, mesh, 0)
    for p in model.parameters():
        p.grad.zero_()
    up.grad.to_local().zero_()
    with model.summon_full_params(), torch.no_grad():
        up.to_local().fill_(expert + 1.0)
    up.grad = DTensor.from_local(
        torch.full_like(up.to_local(), 0.25 * expert), up.device_mesh, up.placements
    )
    optimizer.step()
    changed = parts_of(model)["layers.1.experts.up"]
    assert torch.equal(changed, torch.full_like(changed, expert + 1 - 0.25 * expert))
    if mesh["rows"].size() == 1:
        return
    row = mesh["rows"].get_local_rank()
    with model.summon_full_params(), torch.no_grad():
        up.to_local().fill_(float(row))
    if torch.get_default_device().type != "cpu":  # found later, without a name
        optimizer.step()
        with pytest.raises(RuntimeError, match="or the values that were written to parameters"):
            _ = optimizer.skipped_steps
        return
    message = r"step\(\): parameter 'layers.1.experts.up' was set to other values .*same experts"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with model.summon_full_params(), torch.no_grad():
        up.to_local().fill_(0.5)
    optimizer.step()
    run_backwards(model, mesh, 0)
    up.grad = DTensor.from_local(
        torch.full_like(up.to_local(), 0.25 * row), up.device_mesh, up.placements
    )
    with pytest.raises(RuntimeError, match=r"step\(\): .grad of parameter 'layers.1.experts.up'"):
        optimizer.step()


@STAGES
def test_a_parameter_of_all_ranks_that_one_has_written_is_named(mesh, stage):
    """Experts come before it, and have other values on other ranks."""
    if mesh.device_type != "cpu":
        pytest.skip("a step that is skipped on the device has no name")
    model = sharded(mesh, stage)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    run_backwards(model, mesh, 0)
    with model.summon_full_params(), torch.no_grad():
        model.head.bias.add_(1.0 if dist.get_rank() == 1 else 0.0)
    with pytest.raises(RuntimeError, match=r"step\(\): parameter 'head.bias' was set to other"):
        optimizer.step()


@pytest.mark.skipif(not OWN_BACKEND, reason="collectives of a device's own backend")
@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_sum_over_the_ranks_with_the_same_experts(mesh, stage):
    trained = []
    for reduction in ("exchange", "collective"):
        model = sharded(mesh, stage, reduction=reduction)
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.05)
        for step in range(2):
            run_backwards(model, mesh, step)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(parts_of(model))
    for name, part in trained[0].items():
        assert_close(trained[1][name], part, rtol=1e-5, atol=1e-6)


def test_the_table_of_reductions_names_ranks(mesh, world):
    model = sharded(mesh, 2)
    model.head.requires_grad_(False)
    table = zero_ext.gradient_reductions(model)
    own = mesh.mesh[:, mesh["ep"].get_local_rank()].tolist()
    ep = mesh["ep"].mesh.tolist()
    assert table["layers.0.experts.up"] == (
        f"summed over ranks {own}, divided by {world}; cut over ranks {ep}"
    )
    assert table["embedding.weight"] == f"summed over ranks {[*range(world)]}, divided by {world}"
    assert table["head.bias"] == "frozen"


def test_other_meshes_and_placements_are_rejected(mesh):
    ep, model = mesh["ep"], made_with_experts(mesh["ep"])
    with pytest.raises(
        ValueError, match=r"would cut it again.*pass their dimension as expert_mesh"
    ):
        zero_ext.shard(model, 2)
    with pytest.raises(ValueError, match=r"expert_mesh=.* must be one dimension with this rank"):
        zero_ext.shard(model, 2, expert_mesh=mesh)
    with pytest.raises(TypeError, match="expert_mesh must be a DeviceMesh, not a str"):
        zero_ext.shard(model, 2, expert_mesh="ep")
    if torch.get_default_device().type == "cpu":
        with pytest.raises(ValueError, match='reduction="exchange"'):
            zero_ext.shard(model, 2, expert_mesh=ep, reduction="collective")
    if mesh["rows"].size() > 1:
        with pytest.raises(ValueError, match="sharded over in one dimension"):
            zero_ext.shard(model, 2, expert_mesh=ep, mesh=mesh)
    value = torch.randn(3, 7)
    model.extra = torch.nn.Parameter(distribute_tensor(value, ep, [Replicate()]))
    with pytest.raises(TypeError, match=r"'extra' is a DTensor with placements .*plain parameter"):
        zero_ext.shard(model, 2, expert_mesh=ep)
    model.extra = torch.nn.Parameter(
        distribute_tensor(torch.randn(2 * ep.size(), 7), ep, [Shard(0)])
    )
    zero_ext.shard(model, 2, expert_mesh=ep)
    with pytest.raises(TypeError, match=r"Muon needs whole parameters, and 'extra' is .* to AdamW"):
        zero_ext.optim.Muon([model.extra])
