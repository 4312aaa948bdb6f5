"""ShardTensor against one process's plain tensors, on every number of ranks."""

import copy
import io
import math
import pickle
from itertools import pairwise
from operator import iadd, imod, imul, ipow, isub, itruediv

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import assert_bits, rank_data
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from zero_ext.tensor.boxes import boxes
from zero_ext.tensor.shard_tensor import Maker, ShardTensor

# Parameters that straddle ranks, lie on one rank, are scalars, have no elements.
SHAPES = [(7, 5), (), (0, 4), (3,), (2, 3, 4), (1,), (40,), (5, 1, 2, 2), (11, 3)]


def make(local, shape, bounds, mesh, stride=None):
    ranks = tuple(mesh.mesh.flatten().tolist())
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return Maker(mesh, ranks).make(local, shape, bounds, stride)


def cut(shapes, world, seed=0):
    """Bounds of every shape: the flat concatenation cut into ``world`` equal ranges, as in a
    unit.
    """
    total = sum(math.prod(shape) for shape in shapes)
    length = -(-total // world)
    begin, result = 0, []
    for shape in shapes:
        numel = math.prod(shape)
        result.append(
            [min(max(rank * length - begin, 0), numel) for rank in range(world)] + [numel]
        )
        begin += numel
    return result


def shard_all(tensors, mesh, bounds=None):
    """The tensors as ShardTensors over one flat buffer of this rank, and that buffer."""
    rank = mesh.get_local_rank()
    bounds = bounds or cut([t.shape for t in tensors], mesh.size())
    flat = torch.cat(
        [t.reshape(-1)[b[rank] : b[rank + 1]] for t, b in zip(tensors, bounds, strict=True)]
    )
    sizes = [b[rank + 1] - b[rank] for b in bounds]
    shards = [
        make(local, t.shape, b, mesh)
        for local, t, b in zip(flat.split(sizes), tensors, bounds, strict=True)
    ]
    return shards, flat


def full_tensors(seed=0, shapes=SHAPES):
    """Equal on all ranks, so that every rank knows what one process would have."""
    return [rank_data(shape, rank=0, step=seed, micro=i) for i, shape in enumerate(shapes)]


def parameters_with(gradients):
    parameters = [nn.Parameter(torch.zeros(g.shape)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


@pytest.fixture
def pair(mesh):
    """(plain parameters, sharded parameters, this rank's flat gradient buffer), with equal
    gradients.
    """
    shards, flat = shard_all(full_tensors(), mesh)
    return parameters_with(full_tensors()), parameters_with(shards), flat


def assert_gradients(sharded, plain, **tolerance):
    """Every gradient is still the ShardTensor over its buffer, and gathers to the plain one."""
    for i, (a, b) in enumerate(zip(sharded, plain, strict=True)):
        assert type(a.grad) is ShardTensor
        if tolerance:
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, **tolerance)
        else:
            assert_bits(a.grad.full_tensor(), b.grad, f"gradient {i}")


# One rounding of the sum's order, in a norm and in the factor made of it.
ROUNDING = {"rtol": 1e-6, "atol": 0}


@pytest.mark.dist
class TestClipping:
    @pytest.mark.parametrize("foreach", [True, False, None])
    @pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0, 3.0, 0.0])
    def test_clip_grad_norm_is_one_process(self, pair, norm_type, foreach):
        plain, sharded, flat = pair
        if norm_type == math.inf:  # torch has no infinity norm of a parameter without elements
            plain[2].grad = None
        address = flat.data_ptr()
        expected = nn.utils.clip_grad_norm_(plain, 0.7, norm_type)
        actual = nn.utils.clip_grad_norm_(sharded, 0.7, norm_type, foreach=foreach)
        assert type(actual) is torch.Tensor
        torch.testing.assert_close(actual, expected, **ROUNDING)
        if norm_type == math.inf:
            plain[2].grad = torch.empty(0, 4)
        assert_gradients(sharded, plain, **ROUNDING)
        held = torch.cat([p.grad.to_local() for p in sharded])
        assert flat.data_ptr() == address and torch.equal(flat, held)

    def test_gradients_below_the_limit_keep_their_bits(self, pair):
        plain, sharded, _ = pair
        nn.utils.clip_grad_norm_(sharded, 1e6)
        assert_gradients(sharded, plain)

    def test_minus_infinity_norm_ignores_ranks_without_elements(self, mesh):
        tensor = rank_data((3,), 0)
        (shard,), _ = shard_all([tensor], mesh, [[0] * mesh.size() + [3]])
        assert shard.norm(-math.inf) == tensor.norm(-math.inf)
        torch.testing.assert_close(shard.norm(-1.5), tensor.norm(-1.5))

    def test_total_norm_then_clip(self, pair):
        plain, sharded, _ = pair
        total = nn.utils.get_total_norm([p.grad for p in sharded])
        torch.testing.assert_close(
            total, nn.utils.get_total_norm([p.grad for p in plain]), **ROUNDING
        )
        nn.utils.clip_grads_with_norm_(sharded, 0.5, total)
        nn.utils.clip_grads_with_norm_(plain, 0.5, total)
        assert_gradients(sharded, plain)

    @pytest.mark.parametrize("foreach", [True, False, None])
    def test_clip_grad_value_is_one_process(self, pair, foreach):
        plain, sharded, _ = pair
        nn.utils.clip_grad_value_(plain, 0.3)
        nn.utils.clip_grad_value_(sharded, 0.3, foreach=foreach)
        assert_gradients(sharded, plain)

    @pytest.mark.parametrize("foreach", [True, False])
    def test_nonfinite_value_of_one_rank_is_an_error_on_all(self, mesh, world, rank, foreach):
        (shard,), _ = shard_all([torch.ones(world)], mesh, [list(range(world + 1))])
        if rank == world - 1:
            shard.to_local()[0] = math.inf
        (parameter,) = parameters_with([shard])
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True, foreach=foreach)

    def test_plain_gradients_in_the_same_list_count_once(self, pair):
        plain, sharded, _ = pair
        sharded[0].grad = plain[0].grad.clone()
        actual = nn.utils.clip_grad_norm_(sharded, 0.7)
        torch.testing.assert_close(actual, nn.utils.clip_grad_norm_(plain, 0.7), **ROUNDING)
        torch.testing.assert_close(sharded[0].grad, plain[0].grad, **ROUNDING)
        assert_gradients(sharded[1:], plain[1:], **ROUNDING)

    def test_two_meshes_are_reduced_each_on_its_own(self, mesh, world):
        other = dist.device_mesh.DeviceMesh("cpu", list(range(world)))
        tensors = full_tensors()
        first, _ = shard_all(tensors[::2], mesh)
        second, _ = shard_all(tensors[1::2], other)
        actual = nn.utils.get_total_norm(first + second)
        torch.testing.assert_close(actual, nn.utils.get_total_norm(tensors), **ROUNDING)

    def test_many_parameters_cost_one_all_reduce(self, mesh, monkeypatch):
        tensors = full_tensors(shapes=[(8, 9)] * 1083)
        parameters = parameters_with(shard_all(tensors, mesh)[0])
        calls, all_reduce = [], dist.all_reduce
        monkeypatch.setattr(
            dist, "all_reduce", lambda *a, **k: calls.append(1) or all_reduce(*a, **k)
        )
        actual = nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.testing.assert_close(actual, nn.utils.get_total_norm(tensors), **ROUNDING)
        assert len(calls) == 1


@pytest.mark.dist
class TestGradScaler:
    def make_scaler(self):
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
        scaler.scale(torch.ones(()))
        return scaler

    def test_unscale_divides_the_buffer(self, pair):
        plain, sharded, _ = pair
        scaler = self.make_scaler()
        optimizer = torch.optim.SGD(sharded, lr=1.0)
        scaler.unscale_(optimizer)
        for parameter in plain:
            parameter.grad /= 4
        assert_gradients(sharded, plain)
        assert scaler._found_inf_per_device(optimizer)[sharded[0].device] == 0

    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_nonfinite_value_of_one_rank_is_found_on_all(self, pair, rank, world, value):
        _, sharded, flat = pair
        if rank == world - 1:
            flat[-1] = value
        scaler = self.make_scaler()
        optimizer = torch.optim.SGD(sharded, lr=1.0)
        scaler.unscale_(optimizer)
        assert scaler._found_inf_per_device(optimizer)[sharded[0].device] == 1


ELEMENTWISE = {
    "mul": lambda x, y: x * 2.5,
    "add shard": lambda x, y: x + y,
    "sub, div": lambda x, y: (x - y) / 3,
    "rsub": lambda x, y: 1 - x,
    "scalar tensor": lambda x, y: x * torch.tensor(0.3),
    "sqrt of abs": lambda x, y: x.abs().sqrt(),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.1),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "nan_to_num": lambda x, y: (x / 0).nan_to_num(0.0),
    "isfinite": lambda x, y: (x / (y > 0)).isfinite(),
    "double": lambda x, y: x.double() + 1,
    "bfloat16": lambda x, y: x.to(torch.bfloat16),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "full_like": lambda x, y: torch.full_like(x, 3.0, dtype=torch.float64),
    "clone, detach": lambda x, y: x.clone().detach(),
    "mul_": lambda x, y: x.mul_(3),
    "add_ shard": lambda x, y: x.add_(y, alpha=-2),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(2),
    "fill_ tensor": lambda x, y: x.fill_(torch.tensor(2.0)),
    "copy_ shard": lambda x, y: x.copy_(y),
    "copy_ scalar": lambda x, y: x.copy_(torch.tensor(5.0)),
    "masked_fill_": lambda x, y: x.masked_fill_(x > y, 7.0),
    "clamp_": lambda x, y: x.clamp_(max=0.1),
    "data": lambda x, y: x.data.mul_(2),
    "out=": lambda x, y: torch.mul(x, y, out=x),
    "foreach": lambda x, y: torch._foreach_add([x], [y], alpha=2)[0],
    "foreach_lerp_": lambda x, y: (torch._foreach_lerp_([x], [y], 0.5), x)[1],
    "foreach_copy_": lambda x, y: (torch._foreach_copy_([x], [y]), x)[1],
}
IN_PLACE = ("_", "_ shard", "_ scalar", "_ tensor", "out=", "data")

WITH_PLAIN_OPERANDS = {
    "rows": lambda x: x * (x.norm(dim=-1, keepdim=True) if x.dim() else x.norm()),
    "rows, in place": lambda x: x.div_(1 + (x.norm(dim=-1, keepdim=True) if x.dim() else x.norm())),
    "columns": lambda x: x - (x.mean(0) if x.dim() and x.numel() else 0.5),
    "centralised": lambda x: x.sub_(x.mean(tuple(range(1, x.dim())), keepdim=True)),
    "a whole tensor": lambda x: x.add(torch.ones(x.shape).cumsum(0), alpha=0.5),
    "one element": lambda x: torch.full((1,) * x.dim(), 3.0) * x,
    "a mask": lambda x: x.masked_fill(torch.ones(x.shape).cumsum(0) > 2, 7.0),
    "where": lambda x: torch.where(torch.ones(x.shape).cumsum(0) > 2, x, 1.5 * x),
    "fp64": lambda x: (x if x.dim() else x.double()) * torch.full(x.shape[-1:], 3.0).double(),
    "foreach": lambda x: torch._foreach_mul([x], [torch.ones(x.shape).cumsum(0)])[0],
    "foreach_": lambda x: (torch._foreach_add_([x], [torch.ones(x.shape[-1:])], alpha=2), x)[1],
}

READ_ONLY = {
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "vector_norm fp64": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "any": lambda x: (x > 2).any(),
    "isnan any": lambda x: x.isnan().any(),
    "all": lambda x: (x > -1).all(),
    "isfinite all": lambda x: x.isfinite().all(),
    "max": lambda x: x.max() if x.numel() else torch.ones(()),
    "std": lambda x: x.std() if x.numel() > 1 else torch.ones(()),
    "norm keepdim": lambda x: x.norm(dim=-1, keepdim=True) if x.dim() else x.norm(),
    "sum 0": lambda x: x.sum(0) if x.dim() else x.sum(),
    "argmax": lambda x: x.argmax() if x.numel() else torch.ones(()),
    "equal": lambda x: torch.tensor(torch.equal(x, x)),
    "item": lambda x: torch.tensor(x.item()) if x.numel() == 1 else torch.ones(()),
}


@pytest.mark.dist
class TestOperations:
    @pytest.mark.parametrize("name", ELEMENTWISE)
    def test_elementwise_is_one_process(self, mesh, name):
        a, b = full_tensors(1), full_tensors(2)
        shards_a, flat = shard_all(a, mesh)
        shards_b, _ = shard_all(b, mesh)
        for x, y, shard_x, shard_y in zip(a, b, shards_a, shards_b, strict=True):
            expected = ELEMENTWISE[name](x, y)
            actual = ELEMENTWISE[name](shard_x, shard_y)
            assert type(actual) is ShardTensor and actual.shape == expected.shape
            assert actual.dtype == actual.to_local().dtype
            assert_bits(actual.full_tensor(), expected, f"{name} of {tuple(x.shape)}")
            assert_bits(shard_x.full_tensor(), x, f"operand of {name}, afterwards")
        if name.endswith(IN_PLACE):
            assert_bits(flat, torch.cat([s.to_local() for s in shards_a]), "the buffer")

    @pytest.mark.parametrize("name", READ_ONLY)
    def test_reductions_are_one_process(self, mesh, name):
        for tensor, shard in zip(full_tensors(), shard_all(full_tensors(), mesh)[0], strict=True):
            expected, actual = READ_ONLY[name](tensor), READ_ONLY[name](shard)
            assert type(actual) is torch.Tensor
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)

    def test_value_of_one_rank_is_seen_by_all(self, mesh, world, rank):
        (shard,), _ = shard_all([torch.ones(world)], mesh, [list(range(world + 1))])
        if rank == world - 1:
            shard.to_local().fill_(math.nan)
        assert shard.isnan().any() and not shard.isfinite().all() and shard.norm().isnan()

    @pytest.mark.real_device  # for whose tensors gloo has collectives
    def test_copy_takes_full_tensors_and_other_cuts(self, mesh, world):
        tensor = rank_data((7, 5), 0, 1)
        (shard,), _ = shard_all([rank_data((7, 5), 0)], mesh)
        assert_bits(shard.copy_(tensor).full_tensor(), tensor)
        assert_bits(shard.copy_(tensor[:1]).full_tensor(), tensor[:1].expand(7, 5))
        assert_bits(shard.copy_(tensor.t().contiguous().t()).full_tensor(), tensor)
        other, _ = shard_all([tensor], mesh, [[0] * world + [35]])
        assert_bits(shard.zero_().copy_(other[0]).full_tensor(), tensor)
        assert_bits(
            shard.zero_().copy_(distribute_tensor(tensor, mesh, [Shard(0)])).full_tensor(), tensor
        )
        assert_bits(torch.empty(7, 5).copy_(shard), tensor)
        with pytest.raises(RuntimeError, match=r"must match the (existing )?size"):
            shard.copy_(tensor[:3])

    def test_operands_that_do_not_fit_are_refused(self, mesh, world):
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        (other,), _ = shard_all([torch.ones(7, 5)], mesh, [[0] * world + [35]])
        (shorter,), _ = shard_all([torch.ones(35)], mesh)
        for operand in [torch.ones(7), torch.ones(2, 7, 5), torch.ones(6, 5), other, shorter]:
            if world == 1 and operand is other:
                continue
            with pytest.raises(RuntimeError, match=r"plain tensors that broadcast"):
                shard.add_(operand)
            with pytest.raises(RuntimeError, match=r"plain tensors that broadcast"):
                torch._foreach_add_([torch.ones(2), shard], [torch.ones(2), operand])
        assert_bits(shard.full_tensor(), torch.ones(7, 5))

    def test_writes_to_plain_tensors_are_refused(self, mesh):
        """They would go to a copy of this rank's elements."""
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        plain = torch.full((7, 5), 2.0)
        for write in (
            lambda: plain.add_(shard),
            lambda: torch.mul(shard, 2, out=plain),
            lambda: torch._foreach_mul_([plain], [shard]),
        ):
            with pytest.raises(RuntimeError, match=r"plain tensors that .* are only read"):
                write()
        assert_bits(plain, torch.full((7, 5), 2.0))

    @pytest.mark.parametrize("name", WITH_PLAIN_OPERANDS)
    def test_plain_operands_are_cut(self, mesh, name):
        """Statistics of rows and columns, masks, whole tensors, as in one process."""
        combine = WITH_PLAIN_OPERANDS[name]
        for tensor, shard in zip(full_tensors(), shard_all(full_tensors(), mesh)[0], strict=True):
            expected = combine(tensor)
            actual = combine(shard)
            assert type(actual) is ShardTensor
            torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(shard.full_tensor(), tensor, rtol=1e-6, atol=1e-6)

    def test_no_array_is_made_of_a_slice(self, mesh):
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        # Of a device's tensors torch's numpy() raises its own error.
        reads = [shard.numpy] if mesh.device_type == "cpu" else []
        for read in (*reads, lambda: shard.cpu().numpy(force=True), shard.tolist):
            with pytest.raises(RuntimeError, match=r"only a slice. Take that of shard.full_tensor"):
                read()
        assert shard.full_tensor().cpu().numpy().sum() == 35

    @pytest.mark.world(min=2)
    def test_all_reduce_says_that_gradients_are_averaged(self, mesh):
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        with pytest.raises(NotImplementedError, match="averaged over the ranks already"):
            dist.all_reduce(shard, group=mesh.get_group())

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("shape", [(), (7,)])
    def test_an_optimizer_of_torchs_is_refused(self, mesh, shape, foreach):
        """A parameter without dimensions is no scalar operand: it would be written to."""
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = shard_all([torch.ones(shape)], mesh)[0][0]
        optimizer = torch.optim.SGD([parameter], lr=0.5, foreach=foreach)
        with pytest.raises(RuntimeError, match=r"stepped by an optimizer of zero_ext\.optim"):
            optimizer.step()
        assert_bits(parameter.detach(), torch.ones(shape))

    @pytest.mark.parametrize(
        "operator", [isub, iadd, imul, itruediv, imod, ipow], ids=lambda each: each.__name__
    )
    def test_a_parameter_that_is_stepped_by_hand_is_refused(self, mesh, operator):
        """`p -= lr * p.grad`: torch's `-=` would become a `-` where it meets a TypeError."""
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        parameter = torch.ones(7, 5)
        with pytest.raises(RuntimeError, match=r"optimizer of zero_ext\.optim"):
            operator(parameter, 0.1 * shard)
        assert_bits(parameter, torch.ones(7, 5))

    @pytest.mark.parametrize(
        "refused",
        [
            lambda x: x.view(-1),
            lambda x: x.t(),
            lambda x: x[0],
            lambda x: x.normal_(),
            lambda x: torch.randn_like(x),
            lambda x: x.index_fill_(0, torch.tensor([0]), 1.0),
            lambda x: x.cumsum_(0),
        ],
    )
    def test_views_and_writes_that_would_be_lost_are_refused(self, mesh, refused):
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        with pytest.raises(NotImplementedError, match="full_tensor"):
            refused(shard)
        assert_bits(shard.full_tensor(), torch.ones(7, 5))

    @pytest.mark.parametrize("foreach", [True, False])
    def test_optimizer_zero_grad_keeps_and_zeroes_the_buffer(self, pair, foreach):
        _, sharded, flat = pair
        gradients = [p.grad for p in sharded]
        torch.optim.SGD(sharded, lr=1.0, foreach=foreach).zero_grad(set_to_none=False)
        assert not flat.any()
        assert all(p.grad is g for p, g in zip(sharded, gradients, strict=True))
        gradients[0].detach_()
        gradients[0].requires_grad_(False)

    def test_tensor_of_an_odd_cut_gathers(self, mesh, world):
        for bounds in ([0] * world + [35], [0] + [35] * world, [0, *range(1, world), 35]):
            tensor = rank_data((7, 5), 0)
            (shard,), _ = shard_all([tensor], mesh, [bounds])
            assert_bits(shard.full_tensor(), tensor)
            assert shard.stride() == tensor.stride() and shard.is_contiguous()


@pytest.mark.dist
class TestObject:
    def test_repr_needs_no_other_rank(self, pair, rank):
        if rank == 0:
            text = "".join(f"{p.grad!r} {p.grad} {p}" for p in pair[1])
            assert "shape=(7, 5), rank 0" in text

    def test_redistribute_gathers_or_is_refused(self, mesh):
        (shard,), _ = shard_all([torch.ones(7, 5)], mesh)
        replicated = shard.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor and replicated.to_local().shape == (7, 5)
        with pytest.raises(NotImplementedError, match="distribute_tensor"):
            shard.redistribute(placements=[Shard(1)])

    def test_pickling_is_refused_with_a_remedy(self, pair):
        for save in (pickle.dumps, lambda x: torch.save({"state": x}, io.BytesIO())):
            with pytest.raises(RuntimeError, match=r"save with zero_ext\.checkpoint\.save"):
                save(pair[1][0].grad)

    def test_tracing_is_refused(self, pair):
        shard = pair[1][0].grad
        names, context = shard.__tensor_flatten__()
        inner = {name: getattr(shard, name) for name in names}
        with pytest.raises(NotImplementedError, match=r"torch\.compile"):
            ShardTensor.__tensor_unflatten__(inner, context, shard.shape, shard.stride())

    def test_deepcopy_is_independent(self, mesh):
        tensors = full_tensors()
        shards, flat = shard_all(tensors, mesh)
        copies = copy.deepcopy({"a": shards, "b": shards[0]})
        assert copies["b"] is copies["a"][0]
        flat.zero_()
        for copied, tensor in zip(copies["a"], tensors, strict=True):
            assert type(copied) is ShardTensor
            assert_bits(copied.full_tensor(), tensor)

    def test_local_part_is_the_slice_of_the_buffer(self, mesh):
        shards, flat = shard_all(full_tensors(), mesh)
        offset = 0
        for shard in shards:
            local = shard.to_local()
            assert local.data_ptr() == flat[offset:].data_ptr() or not local.numel()
            offset += local.numel()
        flat.fill_(3)
        assert all((shard == 3).all() for shard in shards)

    def test_bad_bounds_are_named(self, mesh, world):
        with pytest.raises(ValueError, match="must rise from 0 to 6"):
            make(torch.zeros(6), (2, 3), [0] * world + [5], mesh)
        with pytest.raises(ValueError, match="must rise"):
            make(torch.zeros(6), (2, 3), [0, 6], mesh) if world != 1 else make(
                torch.zeros(6), (2, 3), [6], mesh
            )
        with pytest.raises(ValueError, match="contiguous elements"):
            make(torch.zeros(7), (2, 3), [0, *[6] * world], mesh)


class Momentum(torch.optim.Optimizer):
    """A minimum of what the library's optimizers do: state allocated at once and loaded without
    a cast.
    """

    def __init__(self, parameters, states):
        super().__init__(parameters, {"lr": 0.1})
        for parameter, state in zip(self.param_groups[0]["params"], states, strict=True):
            self.state[parameter]["exp_avg"] = state

    def load_state_dict(self, state_dict):
        names = state_dict["param_groups"][0]["params"]
        for name, parameter in zip(names, self.param_groups[0]["params"], strict=True):
            self.state[parameter]["exp_avg"].copy_(state_dict["state"][name]["exp_avg"])


@pytest.mark.dist
class TestCheckpoint:
    def saved(self, mesh, path):
        tensors = full_tensors(3)
        shards, _ = shard_all(tensors, mesh)
        dcp.save(
            {str(i): s for i, s in enumerate(shards)},
            checkpoint_id=path,
            process_group=mesh.get_group(),
        )
        return tensors

    def test_round_trip_is_exact_for_any_cut(self, mesh, world, shared_path):
        tensors = self.saved(mesh, shared_path)
        other_cut = [
            [0]
            + [math.prod(s) - math.prod(s) // (r + 2) for r in range(world - 1)]
            + [math.prod(s)]
            for s in SHAPES
        ]
        shards, flat = shard_all([torch.zeros(s) for s in SHAPES], mesh, other_cut)
        dcp.load(
            {str(i): s for i, s in enumerate(shards)},
            checkpoint_id=shared_path,
            process_group=mesh.get_group(),
        )
        for shard, tensor in zip(shards, tensors, strict=True):
            assert_bits(shard.full_tensor(), tensor)
        assert flat.any() or not flat.numel()

    @pytest.mark.real_device  # for whose tensors gloo has collectives
    def test_plain_tensors_and_dtensors_and_fewer_ranks_read_it(
        self, mesh, group, rank, shared_path
    ):
        tensors = self.saved(mesh, shared_path)
        sharded = [distribute_tensor(torch.zeros(s), mesh, [Shard(0)]) for s in SHAPES if len(s)]
        names = [str(i) for i, s in enumerate(SHAPES) if len(s)]
        dcp.load(
            dict(zip(names, sharded, strict=True)), checkpoint_id=shared_path, process_group=group
        )
        for name, dtensor in zip(names, sharded, strict=True):
            assert_bits(dtensor.full_tensor(), tensors[int(name)])
        if rank == 0:
            plain = {str(i): torch.zeros(s) for i, s in enumerate(SHAPES)}
            dcp.load(plain, checkpoint_id=shared_path, no_dist=True)
            for i, tensor in enumerate(tensors):
                assert_bits(plain[str(i)], tensor)

    def test_one_process_saves_and_ranks_load(self, mesh, group, rank, shared_path):
        tensors = full_tensors(4)
        if rank == 0:
            dcp.save(
                {str(i): t for i, t in enumerate(tensors)}, checkpoint_id=shared_path, no_dist=True
            )
        dist.barrier(group)
        shards, _ = shard_all([torch.zeros(s) for s in SHAPES], mesh)
        dcp.load(
            {str(i): s for i, s in enumerate(shards)},
            checkpoint_id=shared_path,
            process_group=group,
        )
        for shard, tensor in zip(shards, tensors, strict=True):
            assert_bits(shard.full_tensor(), tensor)

    def optimizer(self, mesh, tensors):
        model = nn.ParameterList(nn.Parameter(torch.zeros(s)) for s in SHAPES)
        shards, _ = shard_all(tensors, mesh)
        return model, Momentum(list(model), shards), shards

    @pytest.mark.real_device  # for whose tensors gloo has collectives
    def test_full_optimizer_state_dict_goes_out_and_in(self, mesh):
        tensors = full_tensors(5)
        model, optimizer, _ = self.optimizer(mesh, tensors)
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        for i, tensor in enumerate(tensors):
            assert_bits(state["state"][str(i)]["exp_avg"], tensor)

        model, optimizer, shards = self.optimizer(mesh, [torch.zeros(s) for s in SHAPES])
        set_optimizer_state_dict(model, optimizer, state, options=options)
        for shard, tensor in zip(shards, tensors, strict=True):
            assert_bits(shard.full_tensor(), tensor)

    def test_sharded_optimizer_state_dict_round_trip(self, mesh, group, shared_path):
        tensors = full_tensors(6)
        model, optimizer, _ = self.optimizer(mesh, tensors)
        dcp.save(
            get_optimizer_state_dict(model, optimizer),
            checkpoint_id=shared_path,
            process_group=group,
        )

        model, optimizer, shards = self.optimizer(mesh, [torch.zeros(s) for s in SHAPES])
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=shared_path, process_group=group)
        set_optimizer_state_dict(model, optimizer, state)
        for shard, tensor in zip(shards, tensors, strict=True):
            assert_bits(shard.full_tensor(), tensor)

    def test_loading_from_rank_0_alone_is_refused(self, mesh, rank):
        """torch copies rows into the flat slices: wrong values without an error where sizes
        happen to agree.
        """
        tensors = full_tensors(7)
        model, optimizer, _ = self.optimizer(mesh, tensors)
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with pytest.raises(NotImplementedError, match="broadcast_from_rank0=False"):
            set_optimizer_state_dict(model, optimizer, state if rank == 0 else {}, options=options)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_few_in_order_and_exactly_the_range(shape, data):
    numel = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    positions = torch.arange(numel).view(shape)
    parts = boxes(shape, start, stop)
    for offsets, sizes in parts:
        inside = positions
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            inside = inside.narrow(dim, offset, size)
        assert inside.flatten().tolist() == list(range(start, start + inside.numel()))
        start += inside.numel()
    assert start == stop
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def test_tensor_without_elements_is_one_empty_box():
    assert boxes((3, 0), 0, 0) == [((0, 0), (3, 0))]
    assert boxes((), 0, 1) == [((), ())]
    assert boxes((), 0, 0) == []


def test_cut_of_the_tests_straddles_and_leaves_ranks_empty():
    bounds = cut(SHAPES, 3)
    spans = [[b - a for a, b in pairwise(bound)] for bound in bounds]
    assert any(sum(size > 0 for size in span) > 1 for span in spans)
    assert any(0 in span for span in spans)


@pytest.mark.dist
def test_new_tensors_of_the_same_shape_are_cut_alike(mesh):
    """Without a message, so that one rank may ask alone."""
    tensors = [rank_data(shape, 0) for shape in SHAPES]
    for shard in shard_all(tensors, mesh)[0]:
        made = {
            0.0: shard.new_zeros(shard.shape),
            1.0: shard.new_ones(shard.shape, dtype=torch.float64),
            2.5: shard.new_full(shard.shape, 2.5),
            None: shard.new_empty(shard.shape),
            "strided": shard.new_empty_strided(shard.shape, shard.stride()),
        }
        for value, new in made.items():
            assert type(new) is ShardTensor and new.bounds == shard.bounds
            assert new.shape == shard.shape and new.to_local().shape == shard.to_local().shape
            if isinstance(value, float):
                assert (new.to_local() == value).all()
        assert made[1.0].dtype == torch.float64
        other = shard.new_zeros((2, 9), dtype=torch.int32)
        assert type(other) is torch.Tensor and other.shape == (2, 9)
        assert shard.data_ptr() == 0
