"""Bad input: what is refused, when, in which words, and what works afterwards."""

import contextlib
import copy
import inspect
import pickle
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import (
    MLP,
    Branching,
    assert_bits,
    gather_objects,
    mean_square,
    needs_waits_of_the_host,
    rank_data,
    step_and_wait,
)
from setups import (
    Way,
    assert_same_gradients,
    assert_same_values,
    backward,
    backward_of_all,
    both_ways,
    full_gradients,
    shard_and_optimizer,
    small_mlp,
    train_batch,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.utils import prune

import zero_ext
from zero_ext.engine.registry import find
from zero_ext.module import foreign_names

dist_test = pytest.mark.dist
at_least_two_ranks = pytest.mark.world(min=2)


# Arguments, in one process


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "2", True])
def test_stage_that_does_not_exist_is_refused(stage):
    error, message = ValueError, r"no stage .*Stage 1 shards the optimizer's state"
    if type(stage) is not int:
        error, message = TypeError, f"stage=3, not the {type(stage).__name__} {stage!r}"
    with pytest.raises(error, match=message):
        zero_ext.shard(MLP(), stage)
    with pytest.raises(error, match=message):
        zero_ext.optim.AdamW(MLP().parameters(), stage=stage)
    with pytest.raises(error, match=message):
        zero_ext.estimate_memory(MLP(), 2, stage)


def test_reduction_of_another_name_is_refused():
    with pytest.raises(ValueError, match="must be 'exchange' or 'collective', not 'ring'"):
        zero_ext.shard(MLP(), reduction="ring")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("bucket_mb", [0, -1.0, float("nan"), float("inf")])
def test_bucket_without_a_size_is_refused(stage, bucket_mb):
    with pytest.raises(ValueError, match="bucket_mb must be positive and finite"):
        zero_ext.shard(MLP(), stage, bucket_mb=bucket_mb)
    with pytest.raises(ValueError, match="bucket_mb must be positive and finite"):
        zero_ext.estimate_memory(MLP(), 2, stage, bucket_mb=bucket_mb)


@pytest.mark.parametrize("name", ["prefetch_mb", "retained_bytes"])
def test_amounts_of_memory_are_finite_numbers(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and finite"):
        zero_ext.shard(MLP(), 3, **{name: float("inf")})
    zero_ext.shard(MLP(), 3, **{name: 1e9})


class Counting(MLP):
    """Has two names of its own that a sharded module has, too."""

    def __init__(self):
        super().__init__()
        self.zeroed = 0

    def zero_grad(self, set_to_none=True):
        self.zeroed += 1
        super().zero_grad(set_to_none)


def test_names_that_a_sharded_module_needs_are_not_taken():
    for taken in (torch.zeros(1), nn.Linear(2, 2)):
        model = MLP()
        if isinstance(taken, nn.Module):
            model.stats = taken
        else:
            model.register_buffer("stats", taken)
        with pytest.raises(ValueError, match=r"the MLP has a 'stats' of its own.*Rename it"):
            zero_ext.shard(model)
        del model.stats
        zero_ext.shard(model)

    model = zero_ext.shard(Counting())
    model(rank_data((3, 5), 0)).sum().backward()
    model.zero_grad(set_to_none=False)
    model.zero_grad()
    assert model.zeroed == 2 and all(p.grad is None for p in model.parameters())
    zero_ext.shard(copy.deepcopy(model))


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_that_are_one_by_their_memory_alone_are_refused(trains):
    model = MLP(13)
    model.layers[1].weight.data = model.layers[0].weight.data.flatten()[:65].view(13, 5)
    model.layers[0].weight.requires_grad_(trains)
    with pytest.raises(ValueError, match=r"'layers.0.weight' and 'layers.1.weight' are different"):
        zero_ext.shard(model)
    with pytest.raises(ValueError, match="in the same memory"):
        zero_ext.optim.SGD(model.parameters())
    flat = torch.randn(30)
    model.layers[0].weight = nn.Parameter(flat[:15].view(3, 5))
    model.layers[1].weight = nn.Parameter(flat[15:].view(3, 5))
    zero_ext.shard(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lazy_module_is_refused_until_it_has_shapes(stage):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet. Run a forward"):
        zero_ext.shard(model, stage)
    model(torch.ones(2, 5))
    zero_ext.shard(model, stage)


@dist_test
@at_least_two_ranks
@pytest.mark.host
@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_that_are_not_broadcast_are_refused_before(mesh, rank, stage):
    def with_buffer(buffer):
        model = small_mlp()
        model.register_buffer("table", buffer)
        return model

    model = with_buffer(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"'table' is torch.sparse_coo.*sync_module_states=False"):
        zero_ext.shard(model, stage, mesh=mesh)
    model(rank_data((3, 5), rank))
    zero_ext.shard(model, stage, mesh=mesh, sync_module_states=False)

    with torch.inference_mode():
        made_there = torch.full((3,), float(rank))
    expanded = torch.full((1, 3), float(rank)).expand(4, 3)
    negative = torch.full((3,), complex(0, rank)).conj()
    for buffer, expected in ((made_there, 0.0), (expanded, 0.0), (negative, 0.0)):
        model = zero_ext.shard(with_buffer(buffer), stage, mesh=mesh)
        assert model.table is buffer and torch.all(buffer == expected)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, False])
def test_accumulation_steps_are_a_positive_number(steps):
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1"):
        zero_ext.shard(MLP(), accumulation_steps=steps)


def test_policy_with_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"torch\.float64 is not one of"):
        zero_ext.shard(MLP(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))


WRONG_KINDS = {
    "mesh must be a DeviceMesh, not a list. Make one": lambda m: zero_ext.shard(m, mesh=[0]),
    "mesh must be a DeviceMesh, not a device": lambda m: zero_ext.shard(
        m, mesh=torch.device("cpu")
    ),
    r"mp_policy must be .*param_dtype=torch.float16\)": lambda m: zero_ext.shard(
        m, mp_policy=torch.float16
    ),
    "mp_policy must be .*not 'bf16'": lambda m: zero_ext.shard(m, mp_policy="bf16"),
    "bucket_mb must be a number, not '25'": lambda m: zero_ext.shard(m, bucket_mb="25"),
    "prefetch_mb must be a number, not 'all'": lambda m: zero_ext.shard(m, 3, prefetch_mb="all"),
    "host_copies must be True or False, not 2": lambda m: zero_ext.shard(m, 3, host_copies=2),
    "sync_module_states must be True or False": lambda m: zero_ext.shard(m, sync_module_states=3),
    "ignored_params must hold Parameters, not a str": lambda m: zero_ext.shard(
        m, ignored_params=["layers.0.weight"]
    ),
    "ignored_params must hold Parameters, not a Linear": lambda m: zero_ext.shard(
        m, ignored_params=m.layers[0]
    ),
    "param_init_fn must be a function": lambda m: zero_ext.shard(m, 3, param_init_fn="zeros"),
    "is on the meta device.*stage 3": lambda m: zero_ext.shard(m.to("meta"), 1),
    "'parameter 0 of group 0' is on the meta device": lambda m: zero_ext.optim.AdamW(
        m.to("meta").parameters()
    ),
    "process_group must be a process group": lambda m: zero_ext.optim.SGD(
        m.parameters(), 0.1, process_group="gloo"
    ),
    "max_grad_norm must be a number": lambda m: zero_ext.optim.AdamW(
        m.parameters(), max_grad_norm=[1.0]
    ),
    "LossScaler: init_scale must be a number": lambda m: zero_ext.LossScaler(init_scale="2"),
    "LossScaler: min_scale must be a number": lambda m: zero_ext.LossScaler(min_scale=None),
    "takes an optimizer's class": lambda m: zero_ext.optim.wrap(
        torch.optim.RMSprop(m.parameters()), m.parameters()
    ),
    "the divide factor must be a number": lambda m: zero_ext.shard(m).set_gradient_divide_factor(
        "mean"
    ),
    "bucket_mb must be a number, not True": lambda m: zero_ext.shard(m, bucket_mb=True),
    r"max_grad_norm must be a number, not tensor\(\[1": lambda m: zero_ext.optim.AdamW(
        m.parameters(), max_grad_norm=torch.ones(2)
    ),
    "writeback must be True or False, not 'x'": lambda m: (
        zero_ext.shard(m, 3).summon_full_params(writeback="x").__enter__()
    ),
    "include must hold names, as .* not 'grad'": lambda m: zero_ext.offload_states(
        zero_ext.shard(m), "grad"
    ),
    "include must hold names, as .* not 3": lambda m: zero_ext.offload_states(zero_ext.shard(m), 3),
    "local_accumulation must be True or False": lambda m: zero_ext.estimate_memory(
        m, 2, 1, local_accumulation="no"
    ),
    "units is 'Linear'. Pass module classes, such as": lambda m: zero_ext.estimate_memory(
        m, 2, 1, units="Linear"
    ),
    "units holds a int. Pass module classes, such as": lambda m: zero_ext.shard(m, 1, units=[3]),
    "units holds 'Linear'. Pass module classes": lambda m: zero_ext.shard(m, 3, units=["Linear"]),
    "units holds a Linear, not its class. Pass": lambda m: zero_ext.shard(
        m, 3, units=list(m.layers)
    ),
    "units is a MLP, not its class. Pass module classes": lambda m: zero_ext.shard(m, 3, units=m),
    "units holds <class 'int'>. Pass module": lambda m: zero_ext.shard(m, 3, units=(MLP, int)),
    "max_norm must be a number, not None": lambda m: zero_ext.optim.AdamW(
        m.parameters()
    ).clip_grad_norm_(None),
    "an optimizer takes parameters, not a MLP. Pass its parameters": lambda m: zero_ext.optim.AdamW(
        m
    ),
    "an optimizer takes an iterable of parameters, not 3": lambda m: zero_ext.optim.wrap(
        torch.optim.RMSprop, 3
    ),
    "its parameters under 'params', .* this one None": lambda m: zero_ext.optim.AdamW([{}]),
    "its parameters under 'params', .* this one 3": lambda m: zero_ext.optim.SGD(
        m.parameters(), 0.1
    ).add_param_group({"params": 3}),
    r"step\(\) takes a function that returns the loss, or nothing": lambda m: zero_ext.optim.AdamW(
        m.parameters()
    ).step(3),
    r"load_state_dict\(\) takes .* not a NoneType": lambda m: zero_ext.optim.AdamW(
        m.parameters()
    ).load_state_dict(None),
    r"load_state_dict\(\) takes .* not a dict without 'state'": lambda m: zero_ext.optim.AdamW(
        m.parameters()
    ).load_state_dict({"param_groups": []}),
    "a LossScaler loads .* not a list": lambda m: zero_ext.LossScaler().load_state_dict([3]),
    r"register_forward_method\(\) takes the name of a method, not 3": lambda m: (
        zero_ext.register_forward_method(zero_ext.shard(m), 3)
    ),
    r"register_forward_method\(\) takes a module, not a str": lambda m: (
        zero_ext.register_forward_method("forward", m)
    ),
    "output_dtype must be a torch.dtype or None, not 'bf16'": lambda m: zero_ext.shard(
        m, mp_policy=MixedPrecisionPolicy(output_dtype="bf16")
    ),
    "config must be a dict or the path of a JSON file, not a list": lambda m: zero_ext.initialize(
        model=m, config=[3]
    ),
    "training_data must be a dataset with a length, not a int": lambda m: zero_ext.initialize(
        model=m, config={"train_micro_batch_size_per_gpu": 1}, training_data=3
    ),
    "an optimizer takes an iterable of parameters, not 0.5": lambda m: zero_ext.initialize(
        model=m, config={"train_micro_batch_size_per_gpu": 1}, model_parameters=0.5
    ),
    r"estimate_memory\(\) takes a module": lambda m: zero_ext.estimate_memory(7e9, 8, 2),
    "a checkpoint takes a module, not a OrderedDict": lambda m: zero_ext.checkpoint.save(
        "unused", m.state_dict()
    ),
    "a checkpoint takes an optimizer or several, not a Parameter": lambda m: (
        zero_ext.checkpoint.save("unused", m, m.parameters())
    ),
}


@pytest.mark.parametrize("message", WRONG_KINDS)
def test_arguments_of_another_kind_are_refused_by_name(message):
    with pytest.raises(TypeError, match=rf"zero_ext.*{message}"):
        WRONG_KINDS[message](MLP())


FOREIGN_ARGUMENTS = {
    "sharding_strategy": "Pass stage=3 for FULL_SHARD",
    "device_mesh": "Pass mesh=",
    "find_unused_parameters": "Leave it out: unused parameters are",
    "auto_wrap_policy": "Pass units=Block",
    "bucket_size": r"See help\(zero_ext.shard\)",
}


@pytest.mark.parametrize("name", FOREIGN_ARGUMENTS)
def test_arguments_of_other_libraries_name_those_of_shard(name):
    model = MLP()
    message = rf"shard\(\) has no argument '{name}'. {FOREIGN_ARGUMENTS[name]}"
    with pytest.raises(TypeError, match=message):
        zero_ext.shard(model, **{name: None})
    zero_ext.shard(model)


def test_the_arguments_named_for_those_of_other_libraries_exist():
    own = set(inspect.signature(zero_ext.shard).parameters)
    assert not own & foreign_names._ARGUMENTS.keys()
    for foreign, remedy in (foreign_names._ARGUMENTS | foreign_names._ATTRIBUTES).items():
        assert set(re.findall(r"\b(\w+)=(?!=)", remedy)) <= own, foreign
    model = zero_ext.shard(MLP(), 3)
    for name, remedy in foreign_names._ATTRIBUTES.items():
        for call in re.findall(r"\bmodel\.(\w+)", remedy):
            assert hasattr(model, call), name


class Shimmed(MLP):
    """Has some of these names itself: in its class, in an instance, as a child, as a buffer."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(5, 5)
        self.require_backward_grad_sync = True
        self.register_buffer("join", torch.ones(3))

    def set_is_last_backward(self, last):
        return last


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_methods_of_other_libraries_name_those_of_a_sharded_module(stage):
    model = zero_ext.shard(MLP(), stage)
    layer = model.layers[1]
    for each, name, remedy in (
        (model, "set_requires_gradient_sync", "'with model.no_sync"),
        (model, "set_modules_to_forward_prefetch", "Leave it out"),
        (model, "module", "returns the module itself"),
        (layer, "set_reshard_after_backward", r"model.unshard\(\)"),
        (layer, "unshard", r"Call it on the module that was given to shard\(\)"),
        (model.layers, "no_sync", "Call it on the module"),
    ):
        kind = type(each).__name__
        with pytest.raises(AttributeError, match=rf"sharded {kind} has no '{name}'. .*{remedy}"):
            getattr(each, name)
        assert not hasattr(each, name) and getattr(each, name, 7) == 7
    with pytest.raises(AttributeError, match=r"'with model\.no_sync"):
        model.require_backward_grad_sync = False  # DDP reads it in each backward
    with pytest.raises(AttributeError, match="'MLP' object has no attribute 'modules_'"):
        _ = model.modules_
    model.another, layer.another, model.more = 1, nn.Linear(2, 2), nn.Buffer(torch.ones(2))
    assert [n for n, _ in model.named_buffers()] == ["more"] and layer.another in layer.children()


@pytest.mark.parametrize("stage", [1, 3])
def test_names_of_a_users_module_stay_the_users(stage):
    model = zero_ext.shard(Shimmed(), stage)
    assert model.set_is_last_backward(7) == 7 and model.join.shape == (3,)
    assert model.module(torch.ones(2, 5)).shape == (2, 5)
    model.require_backward_grad_sync = False
    assert model.require_backward_grad_sync is False
    model.join = torch.zeros(3)
    with pytest.raises(AttributeError, match="has no 'set_requires_gradient_sync'"):
        model.set_requires_gradient_sync(False)


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_know_no_names_of_other_libraries(stage):
    model = zero_ext.shard(MLP(), stage)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert copy.deepcopy(model._buffers) == {} and type(copy.deepcopy(model._buffers)) is dict
    for plain in [*copies, zero_ext.unwrap(model)]:
        for each in plain.modules():
            tables = (each._parameters, each._buffers, each._modules)
            assert all(type(table) is dict for table in tables)
        with pytest.raises(AttributeError, match="'MLP' object has no attribute 'module'"):
            _ = plain.module
    zero_ext.shard(zero_ext.shard(model, stage) and zero_ext.unwrap(model), stage)


def test_optimizers_of_torch_name_wrap():
    for name in ("Adagrad", "RMSprop"):
        with pytest.raises(AttributeError, match=rf"optim\.wrap\(torch\.optim\.{name}, parameters"):
            getattr(zero_ext.optim, name)
    with pytest.raises(AttributeError, match=r"no attribute 'Adagard'\.$"):
        _ = zero_ext.optim.Adagard


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["replaced", "added"])
def test_a_module_that_was_changed_is_trained_by_an_optimizer_made_afterwards(how, stage):
    model, plain = MLP(7, 5, 3), MLP(7, 5, 3)
    zero_ext.shard(model, stage)
    for each in (model, plain):
        torch.manual_seed(1)
        if how == "replaced":
            each.layers[1] = nn.Linear(7, 7)
        else:
            each.layers.append(nn.Linear(5, 5))
    make = {model: zero_ext.optim.SGD, plain: torch.optim.SGD}
    for each, kind in make.items():
        optimizer = kind(each.parameters(), lr=0.1)
        for step in range(3):
            each(rank_data((4, 5), 0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_tensor(p), q.detach(), msg=name)


def test_wrong_values_are_refused_with_what_there_is():
    model = MLP()
    with pytest.raises(TypeError, match=r"stage must be an int, .* not the Tensor"):
        zero_ext.shard(model, torch.ones(2))
    for wrong in ({"world_size": True}, {"shards": False}, {"world_size": "2"}, {"shards": 1.0}):
        with pytest.raises(ValueError, match=f"{min(wrong)} must be at least 1, not"):
            zero_ext.estimate_memory(model, **{"world_size": 2, "stage": 1, **wrong})
    for device in ("gpu", [0], torch.ones(2)):
        with pytest.raises(ValueError, match=r"device must be a torch\.device or the name"):
            zero_ext.estimate_memory(model, 2, 1, device=device)
    for copies in (-1, 3, None):
        with pytest.raises(ValueError, match="copies must be 0, 1 or 2"):
            zero_ext.estimate_memory(model, 2, 1, copies=copies)
    for stage in (1, 3):
        with pytest.raises(ValueError, match=r"units=.*Conv2d.* chooses no module of MLP"):
            zero_ext.estimate_memory(model, 2, stage, units=nn.Conv2d)
    zero_ext.shard(model)
    for names in (["moments", "grad"], {"full": 1, 3: 2}, [["grad"]]):
        with pytest.raises(ValueError, match=r"there is no state .*; there are 'full', 'master'"):
            zero_ext.offload_states(model, names)


def test_an_optimizer_names_parameters_as_their_module_does():
    model, saved = zero_ext.shard(MLP()), torch.optim.Adam(MLP().parameters())
    first = zero_ext.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"'layers.0.weight' is stepped by another .*AdamW"):
        zero_ext.optim.SGD(model.parameters(), 0.1)
    state = saved.state_dict()
    state["state"] = {2: {"step": 1.0, "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"state 'exp_avg' of 'layers\.1\.weight' has shape"):
        first.load_state_dict(state)
    with pytest.raises(ValueError, match=r"the parameter has no state '\[3\]'; it has 'step'"):
        zero_ext.full_state(first, model.layers[0].weight, [3])
    with pytest.raises(ValueError, match=r"'layers.0.weight' of the optimizer's group 0, of shape"):
        zero_ext.checkpoint.save("unused", MLP(), first)


@dist_test
@at_least_two_ranks
def test_a_process_group_is_no_mesh_and_a_mesh_holds_this_rank(group, rank):
    with pytest.raises(TypeError, match=r"not a ProcessGroup. Call DeviceMesh.from_group"):
        zero_ext.shard(MLP(), mesh=group)
    alone = DeviceMesh("cpu", [0])
    if rank > 0:
        with pytest.raises(ValueError, match=rf"rank {rank}.*mesh \[0\] is without this rank"):
            zero_ext.shard(MLP(), mesh=alone)


@pytest.mark.parametrize("factor", [0, -2.0, float("nan")])
def test_divide_factor_must_be_positive(factor):
    model = zero_ext.shard(MLP())
    with pytest.raises(ValueError, match="must be positive"):
        model.set_gradient_divide_factor(factor)


def test_treatment_of_nan_has_three_names():
    with pytest.raises(ValueError, match="nonfinite must be 'skip', 'raise' or 'step'"):
        zero_ext.optim.AdamW(MLP().parameters(), nonfinite="ignore")


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (1.5, 0.9)}, {"eps": -1}])
def test_hyperparameters_are_refused_in_torchs_words(settings):
    with pytest.raises(ValueError, match="Invalid") as ours:
        zero_ext.optim.AdamW(MLP().parameters(), **settings)
    with pytest.raises(ValueError) as torchs:
        torch.optim.AdamW(MLP().parameters(), **settings)
    assert str(ours.value) == str(torchs.value)


def test_differentiable_step_is_refused():
    with pytest.raises(NotImplementedError, match="differentiable=True"):
        zero_ext.optim.AdamW(MLP().parameters(), differentiable=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameter_of_another_dtype_is_refused_by_name(dtype):
    model = MLP()
    model.extra = nn.Parameter(torch.zeros(3, dtype=dtype))
    problem = rf"parameter 'extra' is {dtype} on {model.extra.device}"
    with pytest.raises(TypeError, match=problem):
        zero_ext.shard(model)
    with pytest.raises(TypeError, match=problem):
        zero_ext.optim.AdamW(model.named_parameters())


def test_parameter_on_another_device_is_refused_by_name():
    model = MLP()
    model.layers[1].to("meta")
    with pytest.raises(TypeError, match=r"'layers\.1\.weight' is on the meta device"):
        zero_ext.shard(model)


def test_refused_parameter_may_be_ignored():
    model = MLP()
    model.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    zero_ext.shard(model, ignored_params=[model.extra])
    mean_square(model, torch.ones(1, 5)).backward()


def test_model_that_is_sharded_already_is_refused():
    model = zero_ext.shard(MLP())
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is sharded already"):
        zero_ext.shard(model)


def test_layers_that_are_sharded_before_their_model_are_refused():
    model = MLP()
    zero_ext.shard(model.layers[1])
    with pytest.raises(ValueError, match=r"sharded already.*not its layers one by one \(units="):
        zero_ext.shard(model)


def test_models_that_share_a_layer_are_refused_one_by_one():
    shared = nn.Linear(7, 13)
    one = zero_ext.shard(nn.Sequential(shared, nn.Linear(13, 3)))
    with pytest.raises(ValueError, match=r"share parameters as one: nn\.ModuleList"):
        zero_ext.shard(nn.Sequential(shared, nn.Linear(13, 5)))
    del one


def test_an_ignored_parameter_has_no_place_in_an_optimizer_of_the_module():
    model = MLP()
    ignored = model.layers[1].weight
    zero_ext.shard(model, ignored_params=[ignored])
    shape = rf"{ignored.shape[0]}, {ignored.shape[1]}"
    with pytest.raises(ValueError, match=rf"of shape \({shape}\) is one of ignored_params"):
        zero_ext.optim.SGD(model.parameters())
    alone = zero_ext.optim.SGD([ignored])  # which shards it as a plain parameter
    assert find(ignored) is not None
    del alone


def test_an_optimizer_before_the_model_is_refused():
    model = MLP()
    optimizer = zero_ext.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"sharded already.*make it after shard\(\)"):
        zero_ext.shard(model)
    del optimizer


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="takes a module, not a generator"):
        zero_ext.shard(MLP().parameters())


def test_what_is_not_sharded_has_no_stats():
    with pytest.raises(ValueError, match="this MLP is not sharded"):
        zero_ext.stats(MLP())
    with pytest.raises(TypeError, match="expected a sharded module or an optimizer of zero_ext"):
        zero_ext.stats(torch.optim.SGD(MLP().parameters()))


@pytest.fixture
def without_a_group(monkeypatch):
    """One of two processes that a launcher has started."""
    if dist.is_initialized():
        pytest.skip("there is a group")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    "make",
    [
        lambda model, alone: zero_ext.shard(model, mesh=alone),
        lambda model, alone: zero_ext.shard(model, 3, mesh=alone),
        lambda model, alone: zero_ext.optim.AdamW(model.parameters(), process_group=alone),
        lambda model, alone: zero_ext.optim.wrap(
            torch.optim.NAdam, model.parameters(), process_group=alone
        ),
    ],
)
def test_processes_of_a_launcher_without_a_group(without_a_group, tmp_path, make):
    """An error, unless the call says that each is to train by itself."""
    model = MLP()
    text = r"\[rank 1\]: this is one of 2 processes.*Call torch.distributed.init_process_group\(\)"
    with pytest.raises(RuntimeError, match=text):
        make(model, None)
    assert all(find(p) is None for p in model.parameters())
    make(model, "alone")
    mean_square(model, train_batch(0)).backward()
    zero_ext.checkpoint.save(tmp_path / "saved", model)


@pytest.mark.dist
def test_a_rank_of_several_trains_alone(mesh, rank, world):
    """What it learns is its own."""
    model = zero_ext.shard(MLP(), 2, mesh="alone")
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    plain = MLP()
    for each in (model, plain):
        mean_square(each, train_batch(rank)).backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bits(mine, theirs)


@pytest.mark.parametrize("mesh", ["all", "cuda", 2])
def test_other_texts_are_no_mesh(mesh):
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, not a"):
        zero_ext.shard(MLP(), mesh=mesh)


def test_same_parameter_in_two_optimizers_is_refused():
    model = MLP()
    first = zero_ext.optim.AdamW(model.named_parameters())
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is stepped by another .*\(AdamW\)"):
        zero_ext.optim.SGD(model.named_parameters(), lr=1.0)
    sharded = zero_ext.shard(MLP())
    second = zero_ext.optim.SGD(sharded.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"'layers.0.weight' is stepped by another .*SGD"):
        zero_ext.optim.AdamW(list(sharded.parameters())[:1])
    del first, second
    zero_ext.optim.SGD(model.named_parameters(), lr=1.0)  # the first is gone


def test_same_parameter_twice_in_one_optimizer_is_refused():
    """By torch's own check."""
    model = MLP()
    optimizer = zero_ext.optim.AdamW(model.layers[0].parameters())
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": list(model.layers[0].parameters())})


def test_optimizer_over_two_sharded_models_is_refused():
    first, second = zero_ext.shard(MLP()), zero_ext.shard(MLP())
    with pytest.raises(ValueError, match="Give each sharded module its own optimizer"):
        zero_ext.optim.AdamW([*first.parameters(), *second.parameters()])


def test_stage_that_contradicts_the_modules_is_refused():
    model = zero_ext.shard(MLP(), stage=2)
    with pytest.raises(ValueError, match="stage=1, but the module was sharded with stage 2"):
        zero_ext.optim.AdamW(model.parameters(), stage=1)


def test_a_copy_that_a_class_makes_by_itself_says_that_it_is_plain():
    """Other copies lack the methods of a sharded module."""

    class CopiesItself(MLP):
        def __deepcopy__(self, memo):
            twin = type(self)()
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return twin

    assert not hasattr(copy.deepcopy(zero_ext.shard(MLP())), "stats")
    model = copy.deepcopy(zero_ext.shard(CopiesItself()))
    with pytest.raises(RuntimeError, match="copy of a sharded one, and a plain module itself"):
        model.stats()


# Models that are in other hands


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_forward_that_writes_to_its_weight_is_refused_by_stage_3(kind, mesh):
    model = nn.Sequential(kind(10, 6, max_norm=1.0), nn.Linear(6, 6))
    with pytest.raises(ValueError, match=r"'0' is a Embedding.*max_norm=1\.0.*ignored_params"):
        zero_ext.shard(model, 3, mesh=mesh)
    zero_ext.shard(model, 3, mesh=mesh, ignored_params=[model[0].weight])
    zero_ext.shard(nn.Sequential(kind(10, 6, max_norm=1.0)), 2, mesh=mesh)


@both_ways
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_optimizers_are_not_copied(way, how):
    """A copy would have the groups and no engine."""
    optimizer = way.optimizer(small_mlp(), None)
    with pytest.raises(RuntimeError, match=r"can be neither copied nor pickled.*state_dict"):
        how(optimizer)


@dist_test
@at_least_two_ranks
@pytest.mark.host
def test_a_parameter_that_one_rank_alone_thaws_is_told(mesh, rank):
    model = small_mlp()
    model.layers[0].requires_grad_(False)
    plain = dist.new_group(timeout=timedelta(seconds=1))
    zero_ext.shard(model, 1, mesh=DeviceMesh.from_group(plain, "cpu"))
    if rank == 0:
        model.layers[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'layers\.0\.weight' was frozen.*same places"):
            model(rank_data((3, 5), rank))
    gather_objects(rank)


@dist_test
@shard_and_optimizer
@at_least_two_ranks
@pytest.mark.parametrize("how", ["shape", "dtype", "frozen", "fewer", "order"])
def test_models_that_differ_are_refused_on_every_rank(way, how, group, rank):
    model = small_mlp()
    if rank == 1 and how == "shape":
        model.layers[1] = nn.Linear(7, 6)
    if rank == 1 and how == "dtype":
        model.layers[1].to(torch.bfloat16)
    if rank == 1 and how == "frozen":
        model.layers[1].weight.requires_grad_(False)
    if rank == 1 and how == "fewer":
        del model.layers[2]
    if rank == 1 and how == "order":
        model.layers = nn.ModuleList(list(model.layers)[::-1])
    params = list(model.named_parameters())
    with pytest.raises(ValueError) as error:
        way.optimizer(model, group, params=params)
    message = str(error.value)
    assert message.startswith(f"zero_ext [rank {rank}]: the models (or the arguments) differ")
    assert "on rank 0" in message and "on rank 1" in message
    first = {
        "shape": ("layers.1.weight (7, 7)", "layers.1.weight (6, 7)"),
        "dtype": ("'layers.1.weight (7, 7) torch.float32", "torch.bfloat16"),
        "frozen": ("layers.1.weight", "trainable", "frozen"),
        "fewer": ("layers.2.weight", "nothing"),
        "order": ("layers.0.weight (7, 5)", "(5, 7)"),
    }[how]
    for part in first:
        assert part in message
    # Checked before anything was changed: the same model, built alike, is accepted.
    same = small_mlp()
    optimizer = way.optimizer(same, group)
    backward(same, rank)
    optimizer.step()


@dist_test
@shard_and_optimizer
@at_least_two_ranks
def test_arguments_that_differ_are_refused_on_every_rank(way, group, rank):
    with pytest.raises(ValueError, match=f"stage={1 if rank else 2}|stage=2.*on rank 0"):
        Way(way.name, 1 if rank else 2).optimizer(small_mlp(), group)


POLICIES = {
    "param_dtype=torch.float16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    "reduce_dtype=torch.bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "offload=True": {"offload_policy": CPUOffloadPolicy()},
    "accumulation_steps=2": {"accumulation_steps": 2},
    "sync_module_states=False": {"sync_module_states": False},
    "bucket_mb=3.0": {"bucket_mb": 3.0},
}


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize("setting", POLICIES)
def test_settings_that_differ_are_refused_on_every_rank(setting, mesh, rank):
    """The message has this setting alone, with both values."""
    model = small_mlp()
    name = setting.partition("=")[0]
    where = rf"arguments\) differ between ranks: '{name}=[\w.]+' on rank 0, '{setting}' on rank 1"
    with pytest.raises(ValueError, match=where):
        zero_ext.shard(model, 1, mesh=mesh, **(POLICIES[setting] if rank == 1 else {}))
    zero_ext.shard(model, 1, mesh=mesh)


@dist_test
@at_least_two_ranks
def test_units_that_differ_are_refused_on_every_rank(mesh, rank):
    units = nn.ModuleList if rank == 1 else nn.Linear
    whose = r"'unit of parameters \[.*\]' on rank 0, 'unit of parameters \[.*\]' on rank 1"
    with pytest.raises(ValueError, match=whose):
        zero_ext.shard(small_mlp(), 3, mesh=mesh, units=units, bucket_mb=1e-6)


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["order", "dtype", "size", "fewer"])
def test_buffers_that_differ_are_refused_on_every_rank(stage, how, mesh, rank):
    buffers = {"mean": torch.zeros(3), "std": torch.full((3,), rank + 1.0)}
    other = {
        "order": dict(reversed(buffers.items())),
        "dtype": {**buffers, "std": torch.ones(3, dtype=torch.int32)},
        "size": {**buffers, "std": torch.ones(4)},
        "fewer": {"mean": buffers["mean"]},
    }
    model = small_mlp()
    for name, buffer in (other[how] if rank == 1 else buffers).items():
        model.register_buffer(name, buffer)
    with pytest.raises(ValueError, match=r"differ between ranks: .*buffer (mean|std)"):
        zero_ext.shard(model, stage, mesh=mesh)
    zero_ext.shard(model, stage, mesh=mesh, sync_module_states=False)
    assert how == "fewer" or rank != 0 or torch.all(model.std == 1)


def one_group(optimizer_class, **arguments):
    return lambda model, **kwargs: optimizer_class(model.parameters(), **kwargs, **arguments)


def two_groups(model, **kwargs):
    halves = [{"params": list(layer.parameters())} for layer in model.layers]
    return zero_ext.optim.SGD(halves, **kwargs)


def without_a_layer(model, **kwargs):
    return zero_ext.optim.SGD(model.layers[1:].parameters(), **kwargs)


def wrapped(model, **kwargs):
    return zero_ext.optim.wrap(torch.optim.RMSprop, model.parameters(), **kwargs)


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("other", "first"),
    [
        (one_group(zero_ext.optim.AdamW), "AdamW"),
        (wrapped, "RMSprop"),
        (one_group(zero_ext.optim.SGD, nonfinite="step"), "nonfinite='step'"),
        (one_group(zero_ext.optim.SGD, max_grad_norm=1.0), "clips=True"),
        (one_group(zero_ext.optim.SGD, loss_scaler=zero_ext.LossScaler()), "scales=True"),
        (two_groups, r"group 1: layers\.1\.weight"),
        (without_a_layer, r"group 0: layers\.1\.weight"),
    ],
    ids=["class", "wrapped", "nonfinite", "clips", "scales", "groups", "subset"],
)
def test_optimizers_that_differ_are_refused_on_every_rank(stage, other, first, mesh, rank):
    model = zero_ext.shard(small_mlp(), stage, mesh=mesh)
    make = other if rank == 1 else one_group(zero_ext.optim.SGD)
    message = rf"\[rank {rank}\]: the optimizers differ .*{first}.* on rank 1"
    with pytest.raises(ValueError, match=message):
        make(model)
    order = list(model.parameters())[:: -1 if rank == 1 else 1]
    optimizer = zero_ext.optim.SGD(order, lr=0.1)
    backward(model, rank)
    optimizer.step()


@dist_test
@at_least_two_ranks
def test_drop_in_optimizers_that_differ_leave_plain_parameters(group, rank):
    model = small_mlp()
    make = one_group(zero_ext.optim.AdamW if rank == 1 else zero_ext.optim.SGD)
    with pytest.raises(ValueError, match="the optimizers differ"):
        make(model, process_group=group)
    assert find(next(model.parameters())) is None
    one_group(zero_ext.optim.SGD)(model, process_group=group)


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ZERO_EXT_TIMEOUT_S", value) for value in ("inf", "nan", "1e300", "0.0001")),
        ("ZERO_EXT_CROSS_MEMORY", "yes"),
    ],
)
def test_variables_that_are_wrong_on_one_rank_are_told_to_all(name, value, mesh, rank, monkeypatch):
    model = small_mlp()
    if rank == 1:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=f"{name}='{value}'"):
        zero_ext.shard(model, mesh=mesh)
    monkeypatch.delenv(name, raising=False)
    zero_ext.shard(model, mesh=mesh)


# Steps at the wrong time


@dist_test
@both_ways
@pytest.mark.parametrize("where", ["parameter", "after the parameter", "activation", "loss"])
def test_step_inside_a_backward_is_refused(way, where, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=0.05)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    active = [True]

    def step(_):
        if active[0]:
            optimizer.step()

    def loss(m, batch):
        hidden = m.layers[0](batch)
        if where == "activation" and m is model:
            hidden.register_hook(step)
        result = m.layers[2](torch.tanh(m.layers[1](hidden))).square().mean()
        if where == "loss" and m is model:
            result.register_hook(step)
        return result

    if where == "parameter":
        model.layers[1].weight.register_hook(step)
    if where == "after the parameter":
        model.layers[1].weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match=r"step\(\) inside a backward"):
        backward(model, rank, loss_fn=loss)
    active[0] = False
    for number in range(2):
        backward(model, rank, number, loss_fn=loss)
        backward_of_all(expected, world, number, loss_fn=loss)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_values(model, expected)


@dist_test
@shard_and_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_inside_a_backward_is_refused(way, set_to_none, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group)

    def zero(_):
        optimizer.zero_grad(set_to_none=set_to_none)

    model.layers[1].weight.register_hook(zero)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) inside a backward"):
        backward(model, rank)


def no_sync(way: Way, model, optimizer):
    return model.no_sync() if way.name == "shard" else optimizer.no_sync()


@dist_test
@pytest.mark.parametrize("way", [Way("shard", 1), Way("optimizer", 1)], ids=str)
@at_least_two_ranks
def test_forgotten_boundary_is_refused_and_can_be_made_up_for(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=0.05)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    with no_sync(way, model, optimizer):
        for micro in range(2):
            backward(model, rank, micro=micro)
    with pytest.raises(RuntimeError, match=r"2 backward\(s\) inside no_sync\(\).* never reduced"):
        optimizer.step()
    message = r"clip_grad_norm_\(\): 2 backward\(s\) inside no_sync\(\) were never reduced"
    with pytest.raises(RuntimeError, match=message):
        optimizer.clip_grad_norm_(1.0)
    backward(model, rank, micro=2)
    for micro in range(3):
        backward_of_all(expected, world, micro=micro)
    optimizer.step()
    reference.step()
    assert_same_values(model, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_before_the_boundary_is_refused_and_the_sum_goes_on(anywhere, rank, world, stage):
    """The boundary's gradient is the sum of three micro-batches, whatever was tried before it."""
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere, accumulation_steps=3)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05)
    expected = small_mlp()
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for step in range(2):
        for micro in range(3):
            backward(model, rank, step, micro)
            backward_of_all(expected, world, step, micro)
            if micro == 2:
                continue
            message = rf"after {micro + 1} of 3 backwards .* Run {2 - micro} more first"
            with pytest.raises(RuntimeError, match=r"step\(\) " + message):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) " + message):
                optimizer.clip_grad_norm_(1.0)
        assert_same_gradients(model, expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert_same_values(model, expected)
    assert model.stats()["steps"] == 2


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_grad_gives_up_what_ran_before_the_boundary(anywhere, rank, world, stage):
    model = zero_ext.shard(small_mlp(), stage, mesh=anywhere, accumulation_steps=2)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.step()  # without a backward it does nothing
    backward(model, rank, micro=7)
    with pytest.raises(RuntimeError, match=r"after 1 of 2 backwards"):
        optimizer.step()
    optimizer.zero_grad()
    expected = small_mlp()
    for micro in range(2):
        backward(model, rank, micro=micro)
        backward_of_all(expected, world, micro=micro)
    assert_same_gradients(model, expected)
    optimizer.step()


@dist_test
@pytest.mark.parametrize("way", [Way("shard", 2), Way("optimizer", 2)], ids=str)
def test_stage_2_needs_no_boundary(way, group, rank, world):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group)
    with no_sync(way, model, optimizer):
        backward(model, rank)
    backward_of_all(expected, world)
    assert_same_gradients(model, expected)
    optimizer.step()


# Modules that are replaced


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_submodule_replaced_after_sharding_is_refused_by_name(anywhere, stage):
    model = nn.Sequential(nn.Embedding(7, 5), nn.Sequential(nn.Linear(5, 13), nn.Linear(13, 3)))
    zero_ext.shard(model, stage, mesh=anywhere)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.05)
    tokens = torch.tensor([1, 6])

    def refused(name: str) -> None:
        with pytest.raises(RuntimeError, match=rf"submodule '{name}' was replaced .*'.*weight'"):
            model(tokens)
        with torch.no_grad():
            model(tokens)  # trains nothing

    head, embedding, block = model[1][1], model[0], model[1]
    model[1][1] = nn.Linear(13, 11)
    refused("1.1")
    model[1][1] = head
    model[0] = nn.Embedding(9, 5)
    refused("0")
    model[0] = embedding
    model[1] = nn.Sequential(block[0], nn.Linear(13, 4))
    refused("1")
    # What has no parameter of its own to train is welcome.
    model[1] = nn.Sequential(block, nn.Linear(3, 3).requires_grad_(False))
    model(tokens).sum().backward()
    optimizer.step()
    assert model.stats()["steps"] == 1


class Adapted(nn.Module):
    """As LoRA has it, around a sharded layer."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.down(x)


def add_parameter(model):
    model[1].scale = nn.Parameter(torch.ones(1))


def normalise_weight(model):
    with model.summon_full_params():
        nn.utils.parametrizations.weight_norm(model[1])


def adapt(model):
    model[1] = Adapted(model[1])


ADDED = {
    r"submodule '4' was added .*: '4\.weight'": lambda m: m.append(nn.Linear(5, 5)),
    r"submodule '2' was replaced by another Linear .*: '2\.weight'": (
        lambda m: m.__setitem__(2, nn.Linear(5, 5))  # where an Identity was
    ),
    r"submodule '1' was replaced by another Adapted .*: '1\.down\.weight'": adapt,
    r"a parameter was added or parametrized .*: '1\.scale'": add_parameter,
    r"added or parametrized .*: '1\.parametrizations\.weight\.original0'": normalise_weight,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_added_after_sharding_is_refused_by_name(anywhere, stage):
    def sharded():
        model = nn.Sequential(
            nn.Embedding(7, 5), nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 5, bias=False)
        )
        return zero_ext.shard(
            model, stage, mesh=anywhere, units=units, ignored_params=[model[3].weight]
        )

    units = nn.Linear if stage == 3 else None
    tokens = torch.tensor([1, 6])
    for message, add in ADDED.items():
        model = sharded()
        add(model)
        with pytest.raises(RuntimeError, match=message):
            model(tokens)
        with torch.no_grad():
            model(tokens)  # trains nothing
    # These train nothing of their own, or what the caller trains.
    model = sharded()
    model.append(nn.Linear(5, 5).requires_grad_(False))
    model[3] = nn.Linear(5, 5, bias=False)  # where ignored parameters were
    with model.summon_full_params():
        prune.random_unstructured(model[1], "weight", 0.5)
    model(tokens).sum().backward()
    if stage < 3:
        optimizer = zero_ext.optim.SGD([p for p in model.parameters() if find(p) is not None], lr=1)
        model.append(nn.Linear(5, 5))
        optimizer.add_param_group({"params": model[5].parameters()})
        model(tokens).sum().backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_resized_after_sharding_gets_one_message(anywhere, stage):
    tokens = torch.tensor([1, 6])
    for name, optimizer_first in (("0", True), ("0", False), ("1", True)):
        model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 13))
        zero_ext.shard(model, stage, mesh=anywhere)
        optimizer = zero_ext.optim.AdamW(model.parameters()) if optimizer_first else None
        with model.summon_full_params():
            weight = model.get_parameter(f"{name}.weight")
            weight.data = torch.cat([weight.data, torch.zeros(2, 5)])
        message = rf"'{name}.weight' was resized to \[.*when it was sharded. Resize it before"
        with pytest.raises(RuntimeError, match=message):
            model(tokens)
        with pytest.raises(RuntimeError, match=message):
            if optimizer:
                optimizer.step()
            else:
                zero_ext.optim.AdamW(model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_of_another_dtype_is_refused_by_the_forward(anywhere, stage):
    """Before a layer sees it, whose own message names no parameter."""
    for dtype, other, name in (
        (torch.bfloat16, torch.float32, "1.weight"),
        (torch.float32, torch.bfloat16, "0.weight"),
        (torch.float16, torch.float64, "1.bias"),
    ):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 13)).to(dtype)
        zero_ext.shard(model, stage, mesh=anywhere)
        parameter = model.get_parameter(name)
        parameter.data = torch.zeros(parameter.shape, dtype=other)
        kinds = {torch.float32: "Float", torch.float16: "Half", torch.float64: "Double"}
        found = kinds.get(other, "BFloat16")
        with pytest.raises(RuntimeError, match=rf"forward: parameter '{name}' is {found} .*cast"):
            model(torch.ones(2, 7, dtype=dtype))


# Gradients and parameters of another kind


class Lookup(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 5, sparse=sparse)
        self.linear = nn.Linear(5, 5)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens))


@pytest.mark.real_device
@dist_test
@both_ways
def test_sparse_gradient_is_refused_by_name(way, group, rank):
    model = Lookup(sparse=True)
    optimizer = way.optimizer(model, group, params=list(model.named_parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    tokens = torch.tensor([0, 3, rank % 6])
    with pytest.raises(RuntimeError, match=r"gradient of 'embedding\.weight' is Sparse.*dense"):
        mean_square(model, tokens).backward()
    assert all(p.grad is None for p in model.parameters())
    model.embedding.sparse = False
    mean_square(model, tokens).backward()
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@dist_test
@both_ways
@pytest.mark.parametrize("some", [False, True])
def test_parameter_that_was_cast_is_refused_by_name(way, some, group, rank, world):
    """Whether the others' hooks still report the backward, or none does and step() finds it."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, params=list(model.named_parameters()), lr=0.05)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    (model.layers[1] if some else model).to(torch.bfloat16)
    batch = train_batch(rank).to(model.layers[0].weight.dtype)

    def train():
        hidden = torch.tanh(model.layers[0](batch))
        hidden = torch.tanh(model.layers[1](hidden.to(model.layers[1].weight.dtype)))
        model.layers[2](hidden.to(model.layers[2].weight.dtype)).float().square().mean().backward()
        optimizer.step()

    name = r"layers\.1\.weight" if some else r"layers\.0\.weight"
    with pytest.raises(RuntimeError, match=rf"'{name}' is BFloat16 .*it was Float") as error:
        train()
    assert f"[rank {rank}" in str(error.value)

    # Cast back, the run goes on after one repetition.
    model.to(torch.float32)
    batch = batch.float()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            mine.copy_(theirs)
    with contextlib.suppress(RuntimeError):
        train()
    optimizer.zero_grad()
    backward(model, rank, 1)
    optimizer.step()
    backward_of_all(expected, world, 1)
    reference.step()
    assert_same_values(model, expected)


@dist_test
@both_ways
def test_model_cast_and_cast_back_says_what_to_do_once(way, group, rank, world):
    """For instance to save it in another dtype. autograd's nodes are new ones afterwards."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=0.05)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    model.to(torch.bfloat16).to(torch.float32)
    expected.to(torch.bfloat16).to(torch.float32)
    try:
        backward(model, rank)
        optimizer.step()
    except RuntimeError as error:
        assert "call zero_grad() and repeat" in str(error)
        optimizer.zero_grad()
        backward(model, rank)
        optimizer.step()
    backward_of_all(expected, world)
    reference.step()
    assert_same_values(model, expected)


@dist_test
@pytest.mark.parametrize("stage", [1, 2])
def test_model_that_was_moved_is_refused_by_name(stage, mesh, rank):
    model = zero_ext.shard(small_mlp(), stage, mesh=mesh)
    model.layers[1].to("meta")
    with pytest.raises(RuntimeError, match=r"'layers\.1\.weight' .*meta"):
        backward(model, rank)


@dist_test
@both_ways
def test_gradient_of_another_shape_is_refused_by_name(way, group, rank):
    model = small_mlp()
    optimizer = way.optimizer(model, group, params=list(model.named_parameters()))
    backward(model, rank)
    with torch.no_grad():
        model.layers[0].weight.data = torch.zeros(2, 2)
        resized = r"'layers\.0\.weight' was resized to \[2, 2\], it was \[7, 5\]"
        with pytest.raises(RuntimeError, match=resized):
            optimizer.step()


# Exceptions inside a backward


class HookError(Exception):
    pass


class FailOnce:
    """A tensor hook that raises when it is armed."""

    def __init__(self):
        self.armed = False

    def __call__(self, grad):
        if self.armed:
            self.armed = False
            raise HookError("in a hook")


def failing_backward(model, rank, fail: FailOnce, where: str, step: int, way=None, optimizer=None):
    """A backward that raises on every rank at the same place."""
    fail.armed = True

    def loss(m, batch):
        hidden = m.layers[0](batch)
        if where == "activation":
            hidden.register_hook(fail)
        return m.layers[2](torch.tanh(m.layers[1](hidden))).square().mean()

    with pytest.raises(HookError):
        backward(model, rank, step, loss_fn=loss)
    assert not fail.armed
    wait_for_undo(model)


def wait_for_undo(model) -> None:
    """A device's thread undoes the backward shortly after the caller has got the exception: every
    call of the engine waits for that."""
    entry = find(next(model.parameters()))
    if entry is not None:
        entry[0].engine.stats()


def hook_places(model, fail: FailOnce, where: str) -> None:
    if where == "first parameter":  # the first to arrive
        model.layers[2].weight.register_hook(fail)
    if where == "middle parameter":
        model.layers[1].weight.register_hook(fail)
    if where == "last parameter":
        model.layers[0].weight.register_hook(fail)
    if where == "after a parameter":
        model.layers[0].weight.register_post_accumulate_grad_hook(fail)


TWO_UNITS_MB = 500 / 2**20

PLACES = [
    "first parameter",
    "middle parameter",
    "last parameter",
    "after a parameter",
    "activation",
]


@dist_test
@both_ways
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("before", ["fresh", "after a backward"])
def test_exception_leaves_the_gradients_bitwise_as_they_were(
    way, where, before, group, rank, world
):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, lr=0.05)
    reference = torch.optim.AdamW(expected.parameters(), lr=0.05)
    fail = FailOnce()
    hook_places(model, fail, where)
    for step in range(2):
        if before != "fresh":
            backward(model, rank, step, micro=0)
            backward_of_all(expected, world, step, micro=0)
        gradients = full_gradients(model)
        failing_backward(model, rank, fail, where, step=50 + step)
        for name, gradient in full_gradients(model).items():
            assert (gradient is None) == (gradients[name] is None), name
            if gradient is not None:
                assert_bits(gradient, gradients[name], name)
        backward(model, rank, step, micro=1)
        backward_of_all(expected, world, step, micro=1)
        assert_same_gradients(model, expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_values(model, expected)


@dist_test
@both_ways
@pytest.mark.parametrize(
    "places",
    [
        ["first parameter", "first parameter"],
        ["last parameter", "last parameter"],
        ["first parameter", "last parameter"],
    ],
    ids=["at the beginning", "at the end", "in different places"],
)
def test_backwards_that_throw_keep_no_buckets(way, places, group, rank, world):
    """Some have begun a reduction that nobody finishes, or that one rank alone has begun."""
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group, bucket_mb=TWO_UNITS_MB)
    fail = FailOnce()
    where = places[rank % 2]
    hook_places(model, fail, where)
    held = []
    for step in range(5):
        if step > 0:
            failing_backward(model, rank, fail, where, step=50 + step)
        optimizer.zero_grad()
        expected.zero_grad()
        backward(model, rank, step)
        backward_of_all(expected, world, step)
        assert_same_gradients(model, expected)
        held.append(optimizer.stats()["bytes_bucket"])
    assert optimizer.stats()["units"] == 2
    assert held[1:] == held[1:2] * 4  # a bucket may serve the larger unit from now on


@dist_test
@pytest.mark.parametrize("way", [Way("shard", 1), Way("optimizer", 1)], ids=str)
@pytest.mark.parametrize("where", ["first parameter", "last parameter"])
@pytest.mark.parametrize("reduced_before", [False, True])
def test_exception_in_the_first_backward_of_no_sync_leaves_the_gradients(
    way, where, reduced_before, group, rank, world
):
    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group)
    fail = FailOnce()
    hook_places(model, fail, where)
    if reduced_before:
        backward(model, rank, micro=0)
        backward_of_all(expected, world, micro=0)
    gradients = full_gradients(model)
    with no_sync(way, model, optimizer):
        failing_backward(model, rank, fail, where, step=50)
    for name, gradient in full_gradients(model).items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            assert_bits(gradient, gradients[name], name)
    with no_sync(way, model, optimizer):
        backward(model, rank, micro=1)
    backward(model, rank, micro=2)
    for micro in (1, 2):
        backward_of_all(expected, world, micro=micro)
    assert_same_gradients(model, expected)


@dist_test
@pytest.mark.parametrize("way", [Way("shard", 1), Way("optimizer", 1), Way("shard", 0)], ids=str)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("inside", [True, False], ids=["in no_sync", "in the reducing backward"])
@pytest.mark.parametrize("reduced_before", [False, True])
def test_exception_after_local_sums_leaves_them_bitwise_as_they_were(
    way, where, inside, reduced_before, group, rank, world
):
    """Beside a model that no exception has met, and that need not run on to show a difference."""
    fail = FailOnce()
    models = small_mlp(), small_mlp()
    gradients = []
    for model, fails in zip(models, (True, False), strict=True):
        optimizer = way.optimizer(model, group)
        if fails:
            hook_places(model, fail, where)
        if reduced_before:
            backward(model, rank, micro=0)
        with no_sync(way, model, optimizer):
            backward(model, rank, micro=1)
            backward(model, rank, micro=2)
        if fails:
            with no_sync(way, model, optimizer) if inside else contextlib.nullcontext():
                failing_backward(model, rank, fail, where, step=50)
        backward(model, rank, micro=3)
        gradients.append(full_gradients(model))
        optimizer.step()
    for name, gradient in gradients[0].items():
        assert_bits(gradient, gradients[1][name], name)
    for (name, actual), expected in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert_bits(actual, expected, name)


@dist_test
@at_least_two_ranks
def test_an_overflow_in_a_gradient_that_is_held_is_named(group, rank, world):
    """Gradients are held where a local sum exists: the second micro-batch of no_sync."""
    way = Way("shard", 1)
    model = small_mlp()
    optimizer = way.optimizer(model, group)
    with no_sync(way, model, optimizer):
        backward(model, rank, micro=0)
        (model(train_batch(rank)).sum() * (torch.inf if rank == 1 else 1)).backward()
    backward(model, rank, micro=2)
    with pytest.warns(UserWarning, match="on rank 1, micro-batch 1; step skipped"):
        step_and_wait(optimizer)


def test_exception_after_a_nan_does_not_skip_the_next_step():
    model = Branching()
    optimizer = zero_ext.optim.AdamW(model.parameters())
    batch = rank_data((4, 6), 0)
    fail = FailOnce()
    model.trunk.weight.register_hook(fail)
    fail.armed = True
    with pytest.raises(HookError):
        (model(batch).sum() * float("nan")).backward()
    model(batch, ["left"]).sum().backward()  # does not reach the other branch, where a NaN was
    optimizer.step()
    assert optimizer.skipped_steps == 0


@dist_test
@shard_and_optimizer
def test_exception_in_the_users_function_is_undone(way, group, rank, world):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise HookError("in a function")

    def loss(model, batch):
        hidden = Fails.apply(model.layers[0](batch))
        return model.layers[2](torch.tanh(model.layers[1](hidden))).square().mean()

    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group)
    with pytest.raises(HookError):
        backward(model, rank, loss_fn=loss)
    assert all(p.grad is None for p in model.parameters())
    backward(model, rank)
    backward_of_all(expected, world)
    assert_same_gradients(model, expected)
    optimizer.step()


@dist_test
@shard_and_optimizer
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_exception_inside_a_checkpoint_is_undone(way, use_reentrant, group, rank, world):
    from torch.utils.checkpoint import checkpoint

    def loss(m, batch):
        return checkpoint(m, batch.requires_grad_(), use_reentrant=use_reentrant).square().mean()

    model, expected = small_mlp(), small_mlp()
    optimizer = way.optimizer(model, group)
    fail = FailOnce()
    hook_places(model, fail, "middle parameter")
    for step in range(2):
        fail.armed = True
        with pytest.raises(HookError):
            backward(model, rank, 50 + step, loss_fn=loss)
        backward(model, rank, step, loss_fn=loss)
        backward_of_all(expected, world, step)
    assert_same_gradients(model, expected)
    optimizer.step()


# Ranks that go separate ways


@dist_test
@at_least_two_ranks
@shard_and_optimizer
def test_backward_that_one_rank_runs_alone_times_out_with_a_message(way, rank):
    """The message says who waited for what; the timeout is the process group's own."""
    needs_waits_of_the_host()
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = small_mlp()
    optimizer = way.optimizer(model, group)
    backward(model, rank)
    if rank == 0:
        message = r"(?s)\[rank 0, unit '.*'\]: waited for its reduction in backward 2.*rank \d"
        with pytest.raises(RuntimeError, match=message) as error:
            backward(model, rank, 1)
        assert "same backwards and steps" in str(error.value)
    del optimizer
    gather_objects(rank)


@dist_test
@at_least_two_ranks
def test_step_that_one_rank_makes_alone_times_out_with_a_message(rank):
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = small_mlp()
    optimizer = Way("shard", 1).optimizer(model, group)
    backward(model, rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"\[rank 0\]: step\(\) waited for"):
            optimizer.step()
    gather_objects(rank)


@dist_test
@at_least_two_ranks
@pytest.mark.parametrize("call", ["norm", "whole"])
def test_a_collective_of_torchs_that_one_rank_makes_alone_says_who_waited(call, rank):
    if call == "whole":
        needs_waits_of_the_host()
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = small_mlp()
    optimizer = Way("shard", 2).optimizer(model, group)
    backward(model, rank)
    message = (
        r"\[rank 0\]: .*(clip_grad_norm_|full_tensor).* waited for the other ranks.*[Ee]very rank"
    )
    if rank == 0:
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            if call == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                model.layers[0].weight.grad.full_tensor()
    gather_objects(rank)
    del optimizer


@dist_test
@at_least_two_ranks
@pytest.mark.host
def test_a_model_that_one_rank_shards_alone_times_out_with_a_message(rank):
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), "cpu")
    if rank == 0:
        message = r"\[rank 0\]: sharding waited for the other ranks.*every rank"
        with pytest.raises(RuntimeError, match=message):
            zero_ext.shard(small_mlp(), mesh=mesh)
    gather_objects(rank)
