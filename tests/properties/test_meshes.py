"""Parameters that tensor parallelism has cut: sharding them changes no bit of the training.

The expected values are those of the plan alone, without sharding, on the same mesh.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from harness import ONE_UNIT_EACH, OWN_BACKEND, needs_own_gathers, step_and_wait
from parallel_models import (
    WIDTH,
    ByPlanAlone,
    Transformer,
    batch_of,
    local,
    loss_of,
    made_parallel,
    parts_of,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.testing import assert_close

import zero_ext
from zero_ext.tensor.meshes import local_of

pytestmark = pytest.mark.dist

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PLANS = pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
MICROS, STEPS, MAX_NORM = 2, 3, 0.5


@pytest.fixture
def mesh(world, no_stale_meshes) -> DeviceMesh:
    """(dp, tp): two ranks cut each tensor, so that four ranks do both."""
    tp = 2 if world % 2 == 0 else 1
    device = torch.get_default_device().type
    if device != "cpu" and not OWN_BACKEND:
        pytest.skip("tensor parallelism needs messages of the device's own backend")
    return init_device_mesh(device, (world // tp, tp), mesh_dim_names=("dp", "tp"))


def batches(step: int, world: int) -> list[Tensor]:
    return [batch_of(step, k) for k in range(MICROS * world)]


def sharded(mesh: DeviceMesh, stage: int, *, sequence: bool, **kwargs):
    model = made_parallel(mesh["tp"], sequence=sequence)
    return zero_ext.shard(model, stage, mesh=mesh["dp"], bucket_mb=ONE_UNIT_EACH, **kwargs)


def run_backwards(model, mesh: DeviceMesh, step: int) -> list[Tensor]:
    world, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    losses = []
    for micro in range(MICROS):
        loss = loss_of(model, batch_of(step, micro * world + rank))
        loss.backward()
        losses.append(loss.detach())
    return losses


def assert_parts(model, alone: ByPlanAlone) -> None:
    expected = {name: local(p) for name, p in alone.model.named_parameters()}
    for name, part in parts_of(model).items():
        assert torch.equal(part, expected[name]), name


@STAGES
def test_an_unwrapped_model_has_its_plan_and_values(mesh, stage):
    model = sharded(mesh, stage, sequence=False)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **ADAMW)
    run_backwards(model, mesh, step=0)
    optimizer.step()
    expected = parts_of(model)
    zero_ext.unwrap(model)
    alone = made_parallel(mesh["tp"], sequence=False)
    for (name, p), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(p, DTensor) == isinstance(plain, DTensor)
        assert torch.equal(local(p), expected[name]), name
        assert local(p).untyped_storage().nbytes() == local(p).nbytes, name
        local(plain).data.copy_(expected[name])
    for each in (model, alone):
        loss_of(each, batch_of(1, 0)).backward()
    for (name, p), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(local(p.grad), local(plain.grad)), name


@STAGES
@PLANS
def test_training_has_the_bits_of_the_plan_alone(mesh, stage, sequence):
    world, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    alone = ByPlanAlone(
        made_parallel(mesh["tp"], sequence=sequence), lambda p: torch.optim.AdamW(p, **ADAMW)
    )
    model = sharded(mesh, stage, sequence=sequence)
    clips = {"max_grad_norm": MAX_NORM}
    optimizer = zero_ext.optim.wrap(torch.optim.AdamW, model.parameters(), **ADAMW, **clips)
    losses = []
    for step in range(STEPS):
        gradients = alone.train(batches(step, world), world)
        factor = (MAX_NORM / (exact_norm(gradients, alone.model) + 1e-6)).float()
        assert factor < 1
        alone.step({name: gradient * factor for name, gradient in gradients.items()})
        losses += run_backwards(model, mesh, step)
        for name, p in model.named_parameters():
            whole = zero_ext.full_grad(p)
            assert whole.shape == p.shape
            part = whole if not isinstance(p, DTensor) else _part(whole, p)
            assert torch.equal(part, gradients[name]), name
        optimizer.step()
        optimizer.zero_grad()
    assert_parts(model, alone)
    mine = [alone.losses[k] for k in range(STEPS * MICROS * world) if k % world == rank]
    assert all(map(torch.equal, losses, mine))


MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize("stage", [0, 2, 3])
@PLANS
def test_muon_iterates_over_matrices_that_a_plan_has_cut(mesh, stage, sequence):
    world = mesh["dp"].size()

    def matrices(parameters) -> list[Tensor]:
        return [p for p in parameters if p.dim() == 2]

    alone = ByPlanAlone(
        made_parallel(mesh["tp"], sequence=sequence),
        lambda parameters: torch.optim.Muon(matrices(parameters), **MUON),
    )
    model = sharded(mesh, stage, sequence=sequence)
    optimizer = zero_ext.optim.Muon(matrices(model.parameters()), **MUON, owner_mb=1e-3)
    for step in range(2):
        gradients = alone.train(batches(step, world), world)
        alone.step(gradients)
        run_backwards(model, mesh, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_parts(model, alone)


class Squares(nn.Module):
    """Matrices whose cuts differ in size, so that the data ranks' ranges differ between plans."""

    def __init__(self, tp: DeviceMesh):
        super().__init__()
        torch.manual_seed(0)
        shapes = ((9, 6, 1), (4, 8, 0), (7, 9, 1), (9, 5, 0))
        self.matrices = nn.ParameterList(
            nn.Parameter(distribute_tensor(torch.randn(rows, columns), tp, [Shard(dim)]))
            for rows, columns, dim in shapes
        )

    def forward(self, factor: float) -> Tensor:
        return factor * sum(p.square().sum().full_tensor() for p in self.matrices)


@pytest.mark.world(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_owners_of_one_matrix_are_alike_over_the_plan(mesh, stage):
    alone, model = Squares(mesh["tp"]), Squares(mesh["tp"])
    expected = torch.optim.Muon(alone.parameters(), **MUON)
    zero_ext.shard(model, stage, mesh=mesh["dp"])
    optimizer = zero_ext.optim.Muon(model.parameters(), **MUON, owner_mb=1e-3)
    for _ in range(2):
        alone(3.0).backward()
        expected.step()
        expected.zero_grad()
        model(2.0 + 2.0 * mesh["dp"].get_local_rank()).backward()  # 2 and 4
        optimizer.step()
        optimizer.zero_grad()
    for name, part in parts_of(model).items():
        assert torch.equal(part, local(alone.get_parameter(name))), name


def _part(whole: Tensor, like: DTensor) -> Tensor:
    for dim, place in enumerate(like.placements):
        if place.is_shard():
            part = whole.chunk(like.device_mesh.size(dim), place.dim)
            whole = part[like.device_mesh.get_local_rank(dim)]
    return whole


def exact_norm(gradients: dict[str, Tensor], model) -> Tensor:
    """In float64 on the host, each element once."""
    total = torch.zeros((), dtype=torch.float64)
    for name, p in model.named_parameters():
        square = gradients[name].double().square().sum().cpu()
        if isinstance(p, DTensor):
            for dim, place in enumerate(p.placements):
                if place.is_shard():
                    square = square.to(p.device)
                    dist.all_reduce(square, group=p.device_mesh.get_group(dim))
                    square = square.cpu()
        total += square
    return total.sqrt()


@STAGES
@PLANS
def test_each_element_counts_once_in_the_norm(mesh, stage, sequence):
    world = mesh["dp"].size()
    alone = ByPlanAlone(
        made_parallel(mesh["tp"], sequence=sequence), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    gradients = alone.train(batches(0, world), world)
    expected = exact_norm(gradients, alone.model).float().to(torch.get_default_device())
    norms = []
    for way in ("step", "optimizer", "torch", "infinity"):
        model = sharded(mesh, stage, sequence=sequence)
        clips = {"max_grad_norm": 0.5} if way == "step" else {}
        optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1, **clips)
        run_backwards(model, mesh, 0)
        if way == "optimizer":
            norms.append(optimizer.clip_grad_norm_(0.5))
        elif way == "torch":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        elif way == "infinity":
            largest = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=torch.inf)
        optimizer.step()
        if way == "step":
            norms.append(torch.as_tensor(optimizer.grad_norm).to(expected.device))
        if way != "infinity":
            factor = torch.clamp(0.5 / (expected.double() + 1e-6), max=1.0).float()
            plain = made_parallel(mesh["tp"], sequence=sequence)
            for (name, part), (_, p) in zip(
                parts_of(model).items(), plain.named_parameters(), strict=True
            ):
                assert_close(part, local(p) - 0.1 * factor * gradients[name], rtol=1e-5, atol=1e-7)
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])
    assert_close(norms[0], expected, rtol=1e-6, atol=0)
    top = torch.stack([g.abs().max() for g in gradients.values()]).max()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    assert torch.equal(largest, top)


@STAGES
def test_a_step_is_skipped_on_all_ranks_or_on_none(mesh, stage):
    model = sharded(mesh, stage, sequence=False)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    before = parts_of(model)
    run_backwards(model, mesh, 0)
    if mesh.get_rank() == 0:  # one element of one rank's slice
        parts = [local(p.grad) for p in model.parameters()]
        next(part for part in parts if part.numel()).view(-1)[0] = torch.nan
    with pytest.warns(UserWarning, match="step skipped on all ranks"):
        optimizer.step()
        assert optimizer.skipped_steps == 1
    assert all(torch.equal(before[name], part) for name, part in parts_of(model).items())
    optimizer.zero_grad()
    run_backwards(model, mesh, 0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not any(torch.equal(before[name], part) for name, part in parts_of(model).items())


@STAGES
def test_data_ranks_may_run_different_numbers_of_backwards(mesh, stage):
    needs_own_gathers(stage)
    rank, world = mesh["dp"].get_local_rank(), mesh["dp"].size()
    model = sharded(mesh, stage, sequence=False)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(1 + rank):
        loss_of(model, batch_of(micro, rank)).backward()
    optimizer.step()
    optimizer_fn = functools.partial(torch.optim.SGD, lr=0.1, foreach=False)
    alone = ByPlanAlone(made_parallel(mesh["tp"]), optimizer_fn)
    ran = [batch_of(micro, each) for micro in range(world) for each in range(micro, world)]
    alone.step(alone.train(ran, world))
    expected = {name: local(p) for name, p in alone.model.named_parameters()}
    for name, part in parts_of(model).items():
        assert_close(part, expected[name], rtol=1e-5, atol=1e-7)


@STAGES
def test_whole_values_are_those_of_the_whole_model(mesh, stage):
    model = sharded(mesh, stage, sequence=True)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    run_backwards(model, mesh, 0)
    optimizer.step()
    parts = parts_of(model)
    for name, p in model.named_parameters():
        whole = zero_ext.full_tensor(p)
        assert type(whole) is Tensor and whole.shape == p.shape, name
        assert torch.equal(_part(whole, p) if isinstance(p, DTensor) else whole, parts[name]), name
        zero_ext.set_full_param(p, whole + 1)
        zero_ext.set_full_state(optimizer, p, "exp_avg", torch.full_like(whole, 3.0))
        assert torch.equal(zero_ext.full_state(optimizer, p, "exp_avg"), torch.full_like(whole, 3))
    changed = parts_of(model)
    assert all(torch.equal(changed[name], parts[name] + 1) for name in parts)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(mesh, stage, shared_path):
    model = sharded(mesh, stage, sequence=True)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    run_backwards(model, mesh, 0)
    optimizer.step()
    optimizer.zero_grad()
    values = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    zero_ext.checkpoint.save(shared_path / "ours", model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared_path / "torch")
    run_backwards(model, mesh, 1)
    optimizer.step()
    trained = parts_of(model)

    again = sharded(mesh, 3 if stage == 1 else 1, sequence=True)
    optimizer = zero_ext.optim.AdamW(again.parameters(), lr=0.1)
    zero_ext.checkpoint.load(shared_path / "ours", again, optimizer)
    run_backwards(again, mesh, 1)
    optimizer.step()
    assert all(torch.equal(part, trained[name]) for name, part in parts_of(again).items())

    plain = {"model": Transformer().state_dict()}  # in one process, of whole parameters
    dcp.load(plain, checkpoint_id=shared_path / "torch", no_dist=True)
    assert_same(plain["model"], values)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=shared_path / "torch")
    again.load_state_dict(state["model"])
    assert_same({name: zero_ext.full_tensor(p) for name, p in again.named_parameters()}, values)
    zero_ext.checkpoint.export_safetensors(again, shared_path / "exported")
    exported = load_file(shared_path / "exported" / "model.safetensors")
    assert_same(exported, values)


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_rank_iterates_over_whole_parameters(mesh, stage):
    model = sharded(mesh, stage, sequence=False)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    run_backwards(model, mesh, 0)
    optimizer.step()
    expected = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    assert_same(dict(zero_ext.iter_full_params(model)), expected)
    rounded = {name: value.bfloat16() for name, value in expected.items()}
    seen = dict(zero_ext.iter_full_params(model, dtype=torch.bfloat16, rank0_only=True))
    assert_same(seen, rounded if mesh.get_rank() == 0 else {})
    next(iter(zero_ext.iter_full_params(model, bucket_mb=1e-6)))  # left early on every rank
    averages = zero_ext.EMA(model, decay=0.5)
    averages.update()
    run_backwards(model, mesh, 1)
    optimizer.step()
    with averages.swap():
        inside = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    assert_same(inside, expected)


@STAGES
def test_what_users_write_is_used(mesh, stage):
    model = sharded(mesh, stage, sequence=True)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad(), model.summon_full_params(writeback=True):
        for p in model.parameters():
            p.mul_(2)
            local_of(p).add_(1)  # not through the DTensor
    expected = {name: 2 * local(p) + 1 for name, p in made_parallel(mesh["tp"]).named_parameters()}
    assert all(torch.equal(part, expected[name]) for name, part in parts_of(model).items())
    run_backwards(model, mesh, 0)
    for k, p in enumerate(model.parameters()):
        if k % 2:
            p.grad.mul_(0.5)
        else:
            p.grad = p.grad * 0.5
    halves = {name: zero_ext.full_grad(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if name.startswith("layers"):
            ones = torch.ones(p.shape)
            p.grad = distribute(ones, p) if isinstance(p, DTensor) else ones
            halves[name] = ones
    before = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(zero_ext.full_tensor(p), before[name] - halves[name]), name


def distribute(value: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(value, like.device_mesh, like.placements)


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_may_be_unfrozen(mesh, stage):
    model = made_parallel(mesh["tp"], sequence=True)
    model.layers[0].requires_grad_(False)
    zero_ext.shard(model, stage, mesh=mesh["dp"])
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    for train in (False, True):
        model.layers[0].requires_grad_(train)
        before = {name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}
        run_backwards(model, mesh, 0)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            moved = not torch.equal(zero_ext.full_tensor(p), before[name])
            assert moved == (train or not name.startswith("layers.0.")), name


@STAGES
def test_bf16_has_the_bits_of_casts_by_hand(mesh, stage):
    """The gradient of a bf16 parameter is rounded where the cast's backward would round it."""
    world = mesh["dp"].size()
    plain = made_parallel(mesh["tp"]).to(torch.bfloat16)
    gradients = ByPlanAlone(plain, lambda p: torch.optim.SGD(p, lr=0.1)).train(
        batches(0, world), world
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(mesh, stage, sequence=False, mp_policy=policy)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    run_backwards(model, mesh, 0)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        whole = zero_ext.full_grad(p)
        part = _part(whole, p) if isinstance(p, DTensor) else whole
        assert torch.equal(part, gradients[name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_scaler_and_clipping_by_value(mesh, stage):
    model = sharded(mesh, stage, sequence=True)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    rank = mesh["dp"].get_local_rank()
    run_backwards(model, mesh, 0)
    expected = {name: zero_ext.full_grad(p) for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for micro in range(MICROS):
        batch = batch_of(0, micro * mesh["dp"].size() + rank)
        scaler.scale(loss_of(model, batch)).backward()
    scaler.unscale_(optimizer)
    assert_same({name: zero_ext.full_grad(p) for name, p in model.named_parameters()}, expected)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    clipped = {name: value.clamp(-1e-3, 1e-3) for name, value in expected.items()}
    assert_same({name: zero_ext.full_grad(p) for name, p in model.named_parameters()}, clipped)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_no_dimension_reduces_is_named(mesh, stage):
    """A norm outside of a sequence plan, and models that are seeded by rank."""
    if mesh["tp"].size() == 1:
        pytest.skip("nothing is cut")
    model = made_parallel(mesh["tp"], sequence=True)
    model.layers[1].between = nn.RMSNorm(WIDTH)  # sees the tokens of this rank alone
    zero_ext.shard(model, stage, mesh=mesh["dp"])
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    before = parts_of(model)
    run_backwards(model, mesh, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradient of 'layers.1.between.weight' differs"):
            optimizer.step()
    assert all(torch.equal(before[name], part) for name, part in parts_of(model).items())

    model = made_parallel(mesh["tp"])
    with torch.no_grad():
        model.layers[0].between.weight.fill_(1.0 + mesh["tp"].get_local_rank())
    values = [local(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"'layers.0.between.weight' is not cut by .* Seed"):
        zero_ext.shard(model, stage, mesh=mesh["dp"])
    assert all(map(torch.equal, values, map(local, model.parameters())))
    run_backwards(model, mesh, 0)


def made_on_meta(mesh: DeviceMesh) -> Transformer:
    with torch.device("meta"):
        return made_parallel(mesh["tp"], sequence=True)


def test_a_model_on_the_meta_device_has_the_values_of_one_without_a_plan(mesh):
    with torch.device("meta"):
        plain = Transformer()
    torch.manual_seed(1)
    zero_ext.shard(plain, 3, mesh=mesh["dp"])
    expected = {name: zero_ext.full_tensor(p) for name, p in plain.named_parameters()}
    model = made_on_meta(mesh)
    torch.manual_seed(1)
    zero_ext.shard(model, 3, mesh=mesh["dp"])
    assert_same({name: zero_ext.full_tensor(p) for name, p in model.named_parameters()}, expected)
    other = sharded(mesh, 3, sequence=True)
    for name, p in other.named_parameters():
        zero_ext.set_full_param(p, expected[name])
    for each in (model, other):
        optimizer = zero_ext.optim.AdamW(each.parameters(), lr=0.1)
        run_backwards(each, mesh, 0)
        optimizer.step()
    assert_same(parts_of(model), parts_of(other))
    if mesh["tp"].size() > 1:
        model = made_on_meta(mesh)
        torch.manual_seed(mesh["tp"].get_local_rank())
        with pytest.raises(ValueError, match=r"'layers.0.attention.o.bias' is not cut by .* Seed"):
            zero_ext.shard(model, 3, mesh=mesh["dp"])


def test_mistakes_with_meshes_are_named(mesh, shared_path):
    model = sharded(mesh, 2, sequence=False)
    cut = mesh["tp"].size() > 1
    matrices = [p for name, p in model.named_parameters() if name.endswith("q.weight")]
    if cut:
        with pytest.raises(TypeError, match=r"Muon with split=2 needs whole .*q.weight"):
            zero_ext.optim.Muon(matrices, split=2)
        with pytest.raises(TypeError, match=r"Adafactor needs whole parameters"):
            zero_ext.optim.wrap(torch.optim.Adafactor, model.parameters())
        with pytest.raises(ValueError, match=r"would cut it again.*mesh=mesh\['dp'\]"):
            zero_ext.shard(made_parallel(mesh["tp"]))
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    if cut:
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * mesh["tp"].get_local_rank()
        before = parts_of(model)
        run_backwards(model, mesh, 0)
        on_host = torch.get_default_device().type == "cpu"  # else a device skips the step first
        message = (
            "ranks on another dimension of the mesh reject it"
            if on_host
            else "optimizers' settings"
        )
        with pytest.raises(RuntimeError, match=message):
            step_and_wait(optimizer)
        assert all(torch.equal(before[name], part) for name, part in parts_of(model).items())
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    with pytest.raises(NotImplementedError, match=r"fingerprint.*DTensor on another dimension"):
        zero_ext.fingerprint(model)
    run = zero_ext.elastic.Run(model, optimizer, folder=shared_path, run_id="meshes")
    with pytest.raises(NotImplementedError, match="tensor parallelism"), run:
        pass
    with pytest.raises(TypeError, match=r"on the meta device, .* stage 3"):
        zero_ext.shard(made_on_meta(mesh), 2, mesh=mesh["dp"])
    partial = nn.Linear(3, 3, bias=False)
    value = DTensor.from_local(torch.ones(3, 3), mesh["tp"], [Partial()], run_check=False)
    partial.weight = nn.Parameter(value)
    with pytest.raises(TypeError, match="only Shard and Replicate"):
        zero_ext.shard(partial, mesh=mesh["dp"])


def test_wrong_compositions_are_named(mesh, world):
    """docs/stages.md lists these and those of the tests above and of test_experts.py."""
    if mesh["tp"].size() == 1:
        pytest.skip("nothing is cut")
    model = made_parallel(mesh["tp"])
    for other in (mesh, mesh["tp"], None):
        with pytest.raises(ValueError, match="would cut it again"):
            zero_ext.shard(model, 2, mesh=other)
    with pytest.raises(RuntimeError, match="should only be called once"):  # torch's
        made_parallel(mesh["tp"], model=model)
    zero_ext.shard(model, 2, mesh=mesh["dp"])
    head = model.head.weight
    data = init_device_mesh(mesh.device_type, (world,))
    with pytest.raises(RuntimeError, match="a gradient lies on the mesh"):
        head.backward(distribute_tensor(torch.ones(head.shape), data, head.placements))
    planned = Transformer()
    zero_ext.shard(planned, 1, mesh=mesh["dp"])
    made_parallel(mesh["tp"], model=planned)
    with pytest.raises(RuntimeError, match=r"was replaced by another one.* Do that before"):
        loss_of(planned, batch_of(0, 0))
    others = [rank for rank in range(world) if rank != mesh.get_rank()]
    foreign = DeviceMesh(mesh.device_type, others, _init_backend=False)
    with pytest.raises(ValueError, match="is without this rank"):
        zero_ext.shard(nn.Linear(3, 3), mesh=foreign)
