"""A call that one rank makes alone: the error names it, the others' call, and the remedy."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import MLP, gather_objects
from setups import SMALL_BUCKET_MB, backward
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext

pytestmark = [pytest.mark.dist, pytest.mark.world(min=2), pytest.mark.host]


def trained(stage: int, rank: int, timeout_s: float = 1.5):
    """A model with gradients, over a group of its own: an error of gloo ends the group."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = zero_ext.shard(MLP(13), stage, mesh=mesh, bucket_mb=SMALL_BUCKET_MB)
    optimizer = zero_ext.optim.AdamW(model.parameters())
    for step in range(2):
        if step:
            optimizer.step()
        backward(model, rank, step)
    return model, optimizer


def first(model) -> nn.Parameter:
    return model.layers[0].weight


def summon(model, optimizer):
    with model.summon_full_params():
        pass


ALONE = {
    "step()": (2, lambda m, o: o.step()),
    "summon_full_params()": (3, summon),
    "reshard()": (3, lambda m, o: m.reshard()),
    "load_state_dict()": (3, lambda m, o: m.load_state_dict(m.state_dict())),
    "set_full_param()": (2, lambda m, o: zero_ext.set_full_param(first(m), first(m).detach())),
    "full_tensor()": (1, lambda m, o: zero_ext.full_tensor(first(m))),
    "norm()": (2, lambda m, o: first(m).grad.norm()),
    "save() of checkpoint": (2, None),
    "clip_grad_norm_()": (1, lambda m, o: o.clip_grad_norm_(1.0)),
}


# Each waits for a timeout; the others differ from these in their name alone.
QUICK = ("step()", "summon_full_params()", "load_state_dict()", "norm()", "save() of checkpoint")


@pytest.mark.parametrize(
    "call",
    [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in ALONE],
    ids=lambda call: call.split("(")[0],
)
def test_the_error_names_the_call_and_what_the_others_do(call, rank, tmp_path):
    stage, run = ALONE[call]
    model, optimizer = trained(stage, rank)
    told = None
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            if run is None:
                zero_ext.checkpoint.save(tmp_path / "step-1", model, optimizer)
            else:
                run(model, optimizer)
        told = str(error.value)
    told = gather_objects(told)[0]
    assert told.startswith("zero_ext [rank 0]: " + call), told
    assert "no call of zero_ext" in told, told
    assert "on every rank" in told or f"Every rank must call {call}" in told, told
    assert call == "clip_grad_norm_()" or "clip_grad_norm_" not in told, told


def test_ranks_in_different_calls_name_both(rank):
    model, optimizer = trained(3, rank, timeout_s=4)  # longer than a busy machine delays a rank
    state = model.state_dict()
    gather_objects(None)  # neither gives up before the other one has come
    with pytest.raises(RuntimeError) as error:
        if rank == 0:
            model.load_state_dict(state)
        else:
            optimizer.step()
    told = gather_objects(str(error.value))
    assert "load_state_dict() waited" in told[0], told[0]
    # The rank that gives up first sees the other one's call.
    assert "is in step()" in told[0] or "is in load_state_dict()" in told[1], told
