"""What wrapping makes for each parameter: no view, and nothing that parameters of a shape share."""

import copy
import io
from collections import defaultdict

import pytest
import torch
from harness import assert_bits, mean_square, rank_batches
from reference import fma_gradients, gradients_of
from torch import nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdRef

import zero_ext
from zero_ext.engine.carried import CarriedMethod
from zero_ext.tensor.shard_tensor import ShardTensor


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Linear(7, 7) for _ in range(count)]
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.LayerNorm(7), nn.Linear(7, 13))


@pytest.fixture
def made(monkeypatch) -> dict[str, int]:
    """How many objects of each class have been made since; the dictionary counts on."""
    classes = (DTensorSpec, ShardTensor, WeakIdRef, CarriedMethod)
    counts = dict.fromkeys((c.__name__ for c in classes), 0)

    def count(made_class: type) -> None:
        before = made_class.__init__

        def init(self, *args, **kwargs):
            counts[made_class.__name__] += 1
            before(self, *args, **kwargs)

        monkeypatch.setattr(made_class, "__init__", init)

    for each in classes:
        count(each)
    return counts


@pytest.mark.dist
@pytest.mark.world(min=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_of_one_shape_share_what_they_can(stage, made, mesh, rank, world):
    """A spec for each shape, which is most of the time of a view; no look-up through torch's weak
    dictionaries; one set of hooks for all modules. The first forward makes the views of gradients.
    Those of states are made when they are read."""
    found = []
    for count in (2, 9):
        before = dict(made)
        model = zero_ext.shard(layers(count), stage, mesh=mesh, reduction="exchange")
        optimizer = zero_ext.optim.AdamW(model.parameters())
        found.append({name: made[name] - before[name] for name in made})
        batches = rank_batches((4, 5), world)
        loss = mean_square(model, batches[0][rank])
        parameters = [*model.parameters()]
        assert made["ShardTensor"] - before["ShardTensor"] == len(parameters)
        shapes = {p.shape for p in parameters}
        assert made["DTensorSpec"] - before["DTensorSpec"] == len(shapes)
        loss.backward()
        expected = fma_gradients(layers(count), batches, world)
        for name, gradient in gradients_of(model).items():
            assert_bits(gradient, expected[name], name)
        optimizer.step()
        views = made["ShardTensor"]
        state = optimizer.state[model[0].weight]
        assert made["ShardTensor"] == views + 2
        assert optimizer.state[model[0].weight] is state
        for parameter in parameters:
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        assert made["ShardTensor"] == views + 2 * len(parameters)
    few, many = found
    assert few == many
    assert few["DTensorSpec"] == few["ShardTensor"] == 0


def stepped(**kwargs) -> tuple[nn.Module, zero_ext.optim.AdamW]:
    model = zero_ext.shard(layers(1), 1)
    optimizer = zero_ext.optim.AdamW(model.parameters(), **kwargs)
    mean_square(model, torch.ones(4, 5)).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "read",
    [
        lambda state: dict(state),
        lambda state: {**state},
        lambda state: {key: state[key] for key in state},
        lambda state: dict(zip(state.keys(), state.values(), strict=True)),
        lambda state: {key: state.get(key) for key, _ in state.items()},
        lambda state: {key: state.setdefault(key, None) for key in [*state]},
        lambda state: {key: state.pop(key) for key in [*state]},
        lambda state: dict(state.popitem() for _ in range(len(state))),
        lambda state: state.copy(),
        lambda state: copy.copy(state),
        lambda state: state | {},
        lambda state: {} | state,
        lambda state: defaultdict(dict, state),
    ],
)
def test_whoever_reads_states_gets_their_values(read):
    model, optimizer = stepped()
    found = read(optimizer.state)
    assert len(found) == 8
    for parameter in model.parameters():
        assert [*found[parameter]] == ["step", "exp_avg", "exp_avg_sq"]
        assert found[parameter]["exp_avg"].shape == parameter.shape
        assert found[parameter]["exp_avg"].any()


def test_states_can_be_compared_copied_and_saved_before_they_are_read():
    _, optimizer = stepped(amsgrad=True)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    model, other = stepped(amsgrad=True)
    other.load_state_dict(loaded)
    _, third = stepped(amsgrad=True)
    assert "exp_avg" in repr(third.state)
    assert third.state != {}
    assert third.state == third.state
    copied = copy.deepcopy(stepped()[1].state)
    assert type(copied) is defaultdict
    assert all([*state] == ["step", "exp_avg", "exp_avg_sq"] for state in copied.values())
    for parameter, saved_state in zip(model.parameters(), loaded["state"].values(), strict=True):
        for name, value in saved_state.items():
            assert_bits(other.state[parameter][name], value, name)
    assert third.state.get(None) is None
    with pytest.raises(KeyError):
        third.state.pop("a name")
    assert third.state.pop("a name", 7) == 7


def test_states_that_are_read_inside_inference_mode_can_be_written_outside():
    model, optimizer = stepped()
    with torch.inference_mode():
        state = optimizer.state[model[0].weight]
    state["exp_avg"].zero_()
    assert not optimizer.state[model[0].weight]["exp_avg"].any()
