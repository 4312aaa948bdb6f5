"""One optimizer over a sharded module and over parameters outside of it: a loss's, a head's.

Expected: the same parameters in one sharded module, to the bit, and plain PyTorch on all batches.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from harness import MLP, assert_bits, gather_objects, rank_batches, rank_data
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
from zero_ext.engine.registry import find

STEPS = 3
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Proxies(nn.Module):
    """A loss with parameters, as of metric learning: one vector per class, and a scale."""

    def __init__(self, features: int = 5, classes: int = 13):
        super().__init__()
        torch.manual_seed(1)
        self.proxies = nn.Parameter(torch.randn(classes, features))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        scores = self.scale * x.to(self.proxies.dtype) @ self.proxies.T
        return scores.float().square().mean()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3))

    def forward(self, x):
        return self.layers(x).square().mean()


def rows(params, lr=0.05, **kwargs):
    """Not elementwise: each row is divided by its norm."""
    return zero_ext.optim.wrap(RowNormalised, params, lr=lr, **kwargs)


class RowNormalised(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad.reshape(len(p) if p.ndim else 1, -1)
                    g = g / (1 + g.norm(dim=1, keepdim=True))
                    p.sub_(g.reshape(p.shape), alpha=group["lr"])


def adopted(params, **kwargs):
    return zero_ext.optim.adopt(torch.optim.RMSprop(params, lr=0.01, **kwargs))


OPTIMIZERS = {
    "AdamW": functools.partial(zero_ext.optim.AdamW, lr=0.05, max_grad_norm=0.1),
    "rows": rows,
    "adopted": adopted,
}


def train(step_of, optimizer, steps=range(STEPS)) -> None:
    for step in steps:
        step_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.dist
@STAGES
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make_loss", [Proxies, Head])
def test_the_bits_of_one_sharded_module(make_loss, kind, stage, mesh, rank, world):
    model, loss = MLP(), make_loss()
    together = nn.ModuleList([MLP(), make_loss()])
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=1e-4)
    zero_ext.shard(together, stage, mesh=mesh, bucket_mb=1e-4)
    one = OPTIMIZERS[kind]([*model.parameters(), *loss.parameters()])
    other = OPTIMIZERS[kind](together.parameters())
    train(lambda step: loss(model(rank_data((4, 5), rank, step))), one)
    train(lambda step: together[1](together[0](rank_data((4, 5), rank, step))), other)
    for ours, theirs in (
        (model, together[0]),
        (loss, together[1]),
    ):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q), name)
    whole = {name: p.detach().cpu().clone() for name, p in loss.named_parameters()}
    for others in gather_objects(whole):  # without a gather by the user
        for name, value in others.items():
            assert_bits(value, whole[name], name)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_plain_pytorch_on_all_batches(stage, mesh, rank, world):
    model, loss = MLP(), Proxies()
    plain, plain_loss = copy.deepcopy(model).double(), copy.deepcopy(loss).double()
    zero_ext.shard(model, stage, mesh=mesh)
    ours = zero_ext.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5, momentum=0.9)
    theirs = torch.optim.SGD([*plain.parameters(), *plain_loss.parameters()], 0.5, 0.9)
    train(lambda step: loss(model(rank_data((4, 5), rank, step))), ours)

    def of_all_ranks(step):
        [batches] = rank_batches((4, 5), world, step)
        outputs = [plain(batch.double()) for batch in batches]
        scores = [plain_loss.scale * out @ plain_loss.proxies.T for out in outputs]
        return sum(score.square().mean() for score in scores) / world

    train(of_all_ranks, theirs)
    for p, q in zip(loss.parameters(), plain_loss.parameters(), strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [2, 3])
def test_they_keep_their_dtype_and_may_be_left_out_by_ranks(stage, mesh, rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model, loss = MLP(), Proxies()
    zero_ext.shard(model, stage, mesh=mesh, mp_policy=policy)
    optimizer = zero_ext.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.05)
    assert {p.dtype for p in loss.parameters()} == {torch.float32}
    before = loss.proxies.detach().clone()
    for step in range(STEPS):
        output = model(rank_data((4, 5), rank, step))
        (loss(output) if rank == step % world else output.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(loss.proxies, before)
    values = gather_objects(loss.proxies.detach().cpu())
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_a_group_added_later_and_a_parameter_unfrozen_later(stage, mesh, rank, world):
    """As if both had been there, but for the steps before."""
    results = []
    for late in (True, False):
        model, loss = MLP(), Proxies()
        loss.scale.requires_grad_(not late)
        zero_ext.shard(model, stage, mesh=mesh)
        first, rest = [*model.parameters()], [*loss.parameters()]
        optimizer = zero_ext.optim.SGD(first if late else [*first, *rest], lr=0.5)
        if late:
            optimizer.add_param_group({"params": rest})
            loss.scale.requires_grad_(True)
        train(lambda step, m=model, f=loss: f(m(rank_data((4, 5), rank, step))), optimizer)
        results.append([*map(zero_ext.full_tensor, [*first, *rest])])
    for one, other in zip(*results, strict=True):
        assert_bits(one, other)


@pytest.mark.dist
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_has_their_values_and_states(stage, halves, mesh, rank, world, shared_path):
    dtype = torch.bfloat16 if halves else torch.float32

    def begin():
        model, loss = MLP(dtype=dtype), Proxies().to(dtype)
        zero_ext.shard(model, stage, mesh=mesh)
        named = [*model.named_parameters(), *loss.named_parameters(prefix="loss")]
        return model, loss, zero_ext.optim.AdamW(named, lr=0.05)

    def step_of(model, loss):
        return lambda step: loss(model(rank_data((4, 5), rank, step).to(dtype)))

    model, loss, optimizer = begin()
    train(step_of(model, loss), optimizer)
    zero_ext.checkpoint.save(shared_path / "c", model, optimizer)
    train(step_of(model, loss), optimizer, range(STEPS, 2 * STEPS))
    later, later_loss, later_optimizer = begin()
    with pytest.raises(ValueError, match=r"has, but the model lacks, 'loss\.proxies'"):
        zero_ext.checkpoint.load(shared_path / "c", later)
    zero_ext.checkpoint.load(shared_path / "c", later, later_optimizer)
    train(step_of(later, later_loss), later_optimizer, range(STEPS, 2 * STEPS))
    for one, other in ((model, later), (loss, later_loss)):
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert_bits(zero_ext.full_tensor(p), zero_ext.full_tensor(q), name)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_add_different_ones_raise(stage, mesh, rank, world):
    model, loss = MLP(), Proxies()
    zero_ext.shard(model, stage, mesh=mesh)
    params = [*model.parameters(), *([] if rank == 0 else loss.parameters())]
    with pytest.raises(ValueError, match="differ between ranks"):
        zero_ext.optim.SGD(params, lr=0.1)
    dist.barrier()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_cannot_be_stepped_is_named(stage, team):
    model, ignored = MLP(), nn.Parameter(torch.ones(2))
    model.other = ignored
    zero_ext.shard(model, stage, ignored_params=[ignored])
    with pytest.raises(ValueError, match="one of ignored_params"):
        zero_ext.optim.SGD(model.parameters(), lr=0.1)
    del model.other
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="float64"):
        zero_ext.optim.SGD([*[p for p in model.parameters() if p is not ignored], wide], lr=0.1)
    head = Head()
    optimizer = zero_ext.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"An optimizer of zero_ext\.optim has done it"):
        zero_ext.shard(head, stage)
    with pytest.raises(ValueError, match=r"stepped by another optimizer \(SGD\)"):
        zero_ext.optim.AdamW(head.parameters())
    optimizer.retire()
    zero_ext.optim.AdamW([*head.parameters(), *model.parameters()])


def test_unwrapped_with_the_module(team):
    model, loss = MLP(), Proxies()
    zero_ext.shard(model, 3)
    optimizer = zero_ext.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5)
    train(lambda step: loss(model(rank_data((4, 5), 0, step))), optimizer)
    before = loss.proxies.detach().clone()
    zero_ext.unwrap(model)
    assert_bits(loss.proxies, before)
    plain = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5)
    train(lambda step: loss(model(rank_data((4, 5), 0, step))), plain)
    assert not torch.equal(loss.proxies, before)


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a module"])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adafactor])
def test_an_order_that_differs_between_ranks_is_rejected(mesh, rank, kind, beside):
    torch.manual_seed(0)
    model = zero_ext.shard(nn.Linear(7, 7), 2, mesh=mesh)
    plain = [nn.Parameter(torch.randn(7, 7)) for _ in range(5)]
    first = [*model.parameters()] if beside else []
    group = {} if beside else {"process_group": mesh.get_group()}
    mixed = [*first, *plain[:1], *(plain[:0:-1] if rank == 1 else plain[1:])]
    with pytest.raises(ValueError, match="list the same parameters in different orders"):
        zero_ext.optim.wrap(kind, mixed, lr=0.1, **group)
    assert all(find(p) is None for p in plain)
    optimizer = zero_ext.optim.wrap(kind, [*first, *plain], lr=0.1, **group)
    before = [p.detach().clone() for p in plain]
    sum(((p * (1 + rank)).square().sum() for p in plain), model(torch.ones(7)).sum()).backward()
    optimizer.step()
    assert not any(map(torch.equal, plain, before))
