"""save_pretrained() without state_dict=, as diffusers and pipelines call it."""

import inspect

import pytest
import torch
from harness import assert_bits, mean_square, needs_own_gathers, rank_data
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
from zero_ext.state.model_state import gather_state_dict

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Savable(nn.Module):
    def save_pretrained(self, folder, safe_serialization=True, state_dict=None):
        """Writes what state_dict() has."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.contiguous() for k, v in (state_dict or self.state_dict()).items()}
        save_file(tensors, folder / "model.safetensors")


class Net(Savable):
    def __init__(self, width=13):
        super().__init__()
        torch.manual_seed(width)
        self.layers = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width), nn.Linear(width, 7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


class Pipeline(nn.Module):
    """Saves its parts one by one, after a look at their signature."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Net(5), Net(1083)

    def forward(self, x):
        return self.second(self.first(x))

    def save_pretrained(self, folder):
        for name, part in self.named_children():
            assert "safe_serialization" in inspect.signature(part.save_pretrained).parameters
            part.save_pretrained(folder / name, safe_serialization=True)


def files(folder) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        prefix = "" if file.parent == folder else file.parent.name + "."
        found |= {prefix + name: value for name, value in load_file(file).items()}
    return found


def assert_saved(folder, model) -> None:
    """``model``: a plain one with the values that were saved."""
    expected, actual = model.state_dict(), files(folder)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_bits(actual[name], value.cpu(), name)


def trained(mesh, make, rank, **kwargs):
    """A sharded model after a step, and a plain one with the same values."""
    model = zero_ext.shard(make(), 3, mesh=mesh, bucket_mb=1e-4, **kwargs)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    mean_square(model, rank_data((4, 7), 0, dtype=dtype)).backward()  # the same on every rank
    optimizer.step()
    optimizer.zero_grad()
    plain = make().to(dtype)
    values = [zero_ext.full_tensor(p) for p in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), values, strict=True):
            parameter.copy_(value)
        for mine, theirs in zip(plain.buffers(), model.buffers(), strict=True):
            mine.data = theirs.clone()
    return model, plain


@pytest.mark.parametrize("make", [Net, Pipeline])
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_on_every_rank(anywhere, rank, tmp_path, make, policy):
    model, plain = trained(anywhere, make, rank, mp_policy=policy)
    model.save_pretrained(tmp_path / "saved")
    assert_saved(tmp_path / "saved", plain)
    assert model.stats()["bytes_full"] == 0 or anywhere is None


@pytest.mark.dist
@pytest.mark.parametrize("make", [Net, Pipeline])
def test_on_rank_0_alone(mesh, rank, world, tmp_path, make):
    """The others go on training: they serve rank 0 until it comes to the step."""
    needs_own_gathers(3)
    model, plain = trained(mesh, make, rank)
    if model.stats()["neighbors"] < world - 1:
        pytest.skip("ranks do not read each other's memory")
    if rank == 0:
        model.save_pretrained(tmp_path / "saved")
        assert_saved(tmp_path / "saved", plain)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model, rank_data((4, 7), rank)).backward()
    optimizer.step()


@pytest.mark.dist
def test_inside_summon_full_params_and_with_a_state_dict(mesh, rank, tmp_path):
    model, plain = trained(mesh, Net, rank)
    with model.summon_full_params():
        model.save_pretrained(tmp_path / "summoned")
        assert model.layers[0].weight.sum().isfinite()  # still whole
    state = gather_state_dict(model)
    if rank == 0:  # no parameter is gathered for it
        gathers = model.stats()["gathers"]
        model.save_pretrained(tmp_path / "given", state_dict=state)
        assert model.stats()["gathers"] == gathers
        assert_saved(tmp_path / "given", plain)
    assert_saved(tmp_path / "summoned", plain)


def test_a_part_of_a_model(anywhere, rank, tmp_path):
    model, plain = trained(anywhere, Pipeline, rank)
    model.second.save_pretrained(tmp_path)
    assert_saved(tmp_path, plain.second)


def test_unwrap_gives_the_method_back(anywhere):
    model = zero_ext.shard(Net(), 3, mesh=anywhere)
    zero_ext.unwrap(model)
    assert "save_pretrained" not in vars(model)
    assert model.save_pretrained.__func__ is Savable.save_pretrained


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_safetensors_of_a_state_dict_names_the_export(mesh, tmp_path):
    model = zero_ext.shard(Net(), 3, mesh=mesh)
    match = r"holds only a slice.*export_safetensors\(model, directory\), on every rank"
    with pytest.raises(RuntimeError, match=match):
        save_file(model.state_dict(), tmp_path / "file")
    assert not (tmp_path / "file").exists()
