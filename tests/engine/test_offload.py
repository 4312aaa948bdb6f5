"""The rules of offload. On the CPU all states are in host memory already, so nothing moves."""

import contextlib

import pytest
import torch
from harness import assert_bits, gather_objects, mean_square
from reference import OneProcess, fma_gradients
from setups import SMALL_BUCKET_MB, everything, full, small_mlp, train_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import zero_ext

LR = 0.05
POLICIES = [CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
REDUCE_ALWAYS = pytest.mark.parametrize("stage", [2, 3])


def make(team, stage, policy, dtype=torch.bfloat16, alone=False):
    """A model and an optimizer, sharded by ``shard`` or by the optimizer ``alone``."""
    model = small_mlp(dtype)
    if alone:
        return model, zero_ext.optim.AdamW(
            model.parameters(), lr=LR, stage=stage, process_group=team.group, offload_policy=policy
        )
    mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=SMALL_BUCKET_MB, offload_policy=policy)
    return model, zero_ext.optim.AdamW(model.parameters(), lr=LR)


def step_once(model, optimizer, team, step=0, micros=2) -> None:
    for micro in range(micros):
        sharded = model if hasattr(model, "no_sync") else optimizer
        with sharded.no_sync() if micro < micros - 1 else contextlib.nullcontext():
            batch = train_batch(team.rank, step, micro, next(model.parameters()).dtype)
            mean_square(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("alone", [False, True], ids=["shard", "optimizer"])
@pytest.mark.parametrize("policy", POLICIES, ids=["pinned", "pageable"])
@STAGES
def test_offload_equals_no_offload(team, stage, policy, alone):
    if alone and stage == 3:
        pytest.skip("stage 3 needs the module")
    results = []
    for chosen in (policy, None):
        model, optimizer = make(team, stage, chosen, alone=alone)
        for step in range(3):
            step_once(model, optimizer, team, step)
        results.append(everything(model, optimizer))
    for offloaded, expected in zip(*results, strict=True):
        assert_bits(offloaded, expected)


@REDUCE_ALWAYS
def test_the_accumulator_is_the_references_after_each_of_4_micro_batches(team, stage):
    """These stages reduce every micro-batch; bf16 gradients, summed in fp32."""
    model, optimizer = make(team, stage, POLICIES[0])
    reference = OneProcess(small_mlp(torch.bfloat16), lambda p: torch.optim.AdamW(p, lr=LR))
    batches = []
    for micro in range(4):
        batches.append([train_batch(r, 0, micro, torch.bfloat16) for r in range(team.world)])
        with model.no_sync() if micro < 3 else contextlib.nullcontext():
            mean_square(model, batches[-1][team.rank]).backward()
        expected = fma_gradients(reference.model, batches, team.world)
        for name, parameter in model.named_parameters():
            assert_bits(full(parameter.grad), expected[name], name)
            assert parameter.grad.device.type == "cpu"
    optimizer.step()


@STAGES
def test_states_go_and_come_back_between_phases(team, stage):
    model, optimizer = make(team, stage, None)
    untouched, reference = make(team, stage, None)
    for step in range(3):
        for m, o in ((model, optimizer), (untouched, reference)):
            step_once(m, o, team, step)
        held = zero_ext.stats(model)["bytes_held"]
        zero_ext.offload_states((model, optimizer)[step % 2])
        zero_ext.reload_states((optimizer, model)[step % 2])
        assert zero_ext.stats(model)["bytes_held"] == held
    for mine, theirs in zip(
        everything(model, optimizer), everything(untouched, reference), strict=True
    ):
        assert_bits(mine, theirs)


@REDUCE_ALWAYS
@pytest.mark.parametrize("include", [None, ["optimizer_state"], ["master", "grad"]])
def test_backward_and_step_refuse_while_states_are_offloaded(team, stage, include):
    model, optimizer = make(team, stage, None)
    loss = mean_square(model, train_batch(team.rank, 0, 0, torch.bfloat16))
    before = everything(model, optimizer)
    zero_ext.offload_states(model, include=include)
    named = ", ".join(sorted(include or ["full", "grad", "master", "optimizer_state"]))
    with pytest.raises(RuntimeError, match=f"step\\(\\): {named} of this model are offloaded"):
        optimizer.step()
    # Where the weights themselves are away, autograd's first read of one says so.
    refused = r"(backward: |is offloaded).*Call zero_ext\.reload_states\(\) first"
    with pytest.raises(RuntimeError, match=refused):
        loss.backward()
    zero_ext.reload_states(model)
    for old, new in zip(before, everything(model, optimizer), strict=True):
        assert_bits(new, old)
    optimizer.zero_grad()
    step_once(model, optimizer, team)
    if team.group is not None:
        steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
        assert gather_objects(steps, team.group) == [[1] * 6] * team.world


@pytest.mark.parametrize("stage", [1, 2])
def test_reads_of_offloaded_and_of_released_parameters_are_told_apart(team, device, stage):
    released, _ = make(team, 3, None)
    model, _optimizer = make(team, stage, None)
    loss = mean_square(model, train_batch(team.rank, 0, 0, torch.bfloat16))
    reads = [(loss.backward, r"offloaded\. Call zero_ext\.reload_states")]
    if device.type != "cpu":  # those in host memory stay there
        weight = model.layers[0].weight
        reads += [(lambda: weight.clone(), "offloaded"), (lambda: weight * 2, "offloaded")]
    if device.type != "cpu" or team.world > 1:  # else nothing needs a gather
        reads += [(lambda: released.layers[0].weight * 2, "released")]
    zero_ext.offload_states(model, include=["full"])
    for read, text in reads:
        with pytest.raises(RuntimeError, match=text):
            read()


@REDUCE_ALWAYS
def test_forward_refuses_only_while_the_parameters_are_offloaded(team, stage):
    model, _optimizer = make(team, stage, None)
    x = train_batch(team.rank, 0, 0, torch.bfloat16)
    expected = model(x)
    zero_ext.offload_states(model, include=["master", "optimizer_state", "grad"])
    with torch.no_grad():
        assert_bits(model(x), expected)
    zero_ext.offload_states(model, include=["full"])
    with pytest.raises(RuntimeError, match="forward: the parameters of this model are offloaded"):
        model(x)
    zero_ext.reload_states(model)
    zero_ext.reload_states(model)
    assert_bits(model(x), expected)


@STAGES
@pytest.mark.parametrize("include", ["full", "master"])
def test_parameters_are_neither_read_nor_set_while_they_are_offloaded(team, stage, include):
    model, optimizer = make(team, stage, None)
    before = everything(model, optimizer)
    zero_ext.offload_states(model, include=[include])
    refused = rf"{include} of this model are offloaded\. Call zero_ext\.reload_states\(\) first"
    weight = model.layers[0].weight
    with pytest.raises(RuntimeError, match=f"a parameter was read: {refused}"):
        zero_ext.full_tensor(weight)
    with pytest.raises(RuntimeError, match=f"a parameter was set: {refused}"):
        zero_ext.set_full_param(weight, torch.ones(weight.shape))
    zero_ext.reload_states(model)
    for old, new in zip(before, everything(model, optimizer), strict=True):
        assert_bits(new, old)


class TestRefusals:
    def test_states_that_do_not_exist(self, team):
        model, optimizer = make(team, 2, None)
        with pytest.raises(ValueError, match="no state 'moments'; there are 'full', 'master'"):
            zero_ext.offload_states(model, include=["master", "moments"])
        step_once(model, optimizer, team)

    def test_what_is_not_sharded(self):
        with pytest.raises(ValueError, match="this Linear is not sharded"):
            zero_ext.offload_states(nn.Linear(2, 2))
        with pytest.raises(TypeError, match=r"an optimizer of zero_ext\.optim, not list"):
            zero_ext.reload_states([])

    def test_inside_a_backward(self, team):
        model, _optimizer = make(team, 2, None)
        seen = []

        def offload(gradient):
            with pytest.raises(RuntimeError, match="inside a backward"):
                zero_ext.offload_states(model)
            seen.append(zero_ext.stats(model)["backwards"])

        # The first layer's gradient comes last: the backward has reached the others.
        model.layers[0].weight.register_hook(offload)
        mean_square(model, train_batch(team.rank, 0, 0, torch.bfloat16)).backward()
        assert seen == [1]

    @pytest.mark.parametrize("policy", [True, "cpu", CPUOffloadPolicy])
    def test_policies_of_another_kind(self, team, policy):
        with pytest.raises(TypeError, match="offload_policy must be torch"):
            zero_ext.shard(small_mlp(), offload_policy=policy)
        with pytest.raises(TypeError, match="offload_policy must be torch"):
            zero_ext.optim.SGD(small_mlp().parameters(), offload_policy=policy)

    def test_an_optimizer_cannot_change_the_modules_policy(self, team):
        mesh = None if team.group is None else DeviceMesh.from_group(team.group, "cpu")
        model = zero_ext.shard(small_mlp(), mesh=mesh, offload_policy=OffloadPolicy())
        with pytest.raises(ValueError, match="but the module was sharded with"):
            zero_ext.optim.SGD(model.parameters(), offload_policy=POLICIES[0])
