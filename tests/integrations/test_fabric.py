"""zero_ext.integrations.fabric: loops of Lightning's Fabric train as they do with DDP."""

import warnings

import pytest
import torch
from setups import values_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_ext
from zero_ext.engine.registry import find

lightning = pytest.importorskip("lightning_fabric")
from lightning_fabric.strategies import DDPStrategy  # noqa: E402

from zero_ext.integrations.fabric import ShardedStrategy  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("process_as_it_was"),
    pytest.mark.host,  # Fabric chooses its own device
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
STAGES = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
CHANCE = 1e-5  # DDP adds in another order, and the steps amplify that little
VOCABULARY, WIDTH = 61, 13


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 29)
        self.outer = nn.Linear(29, WIDTH)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x.cumsum(1)))))


class Language(nn.Module):
    """A language model that reads a parameter of its own, in its forward and in another method."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.tensor([1.3]))

    def reset_parameters(self):
        self.temperature.data.fill_(1.3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature

    def next_token(self, tokens):
        return (self(tokens)[:, -1] * self.temperature).argmax(-1)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (24, 8), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=3)


class Training:
    """A pretraining script: warm-up, accumulation, clipping, checkpoints."""

    def __init__(self, mesh, stage: int | str | None, **arguments):
        """Without a stage: with DDP."""
        sharding = {"mesh": mesh, "bucket_mb": 2000 / 2**20}  # parameters straddle units and ranks
        if isinstance(stage, int):
            stage = ShardedStrategy(stage, sharding=sharding)
        self.fabric = lightning.Fabric(
            accelerator="cpu",
            devices=1 if mesh is None else mesh.size(),
            strategy=DDPStrategy() if stage is None else stage,
            **arguments,
        )
        self.fabric.launch()
        torch.manual_seed(4)
        with self.fabric.init_module():
            model = Language()
        self.model = self.fabric.setup(model)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.loader = self.fabric.setup_dataloaders(data())
        self.losses: list[float] = []
        self.steps = 0

    def loss(self, tokens):
        scores = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def run(self, epochs: int = 1, micros: int = 2, **clip) -> "Training":
        norms = []
        for _ in range(epochs):
            for number, (tokens,) in enumerate(self.loader, 1):
                adds_up = number % micros != 0
                with self.fabric.no_backward_sync(self.model, enabled=adds_up):
                    loss = self.loss(tokens)
                    self.fabric.backward(loss / micros)
                self.losses.append(loss.item())
                if adds_up:
                    continue
                norms.append(self.fabric.clip_gradients(self.model, self.optimizer, **clip))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.steps += 1
        self.norms = norms
        return self

    def state(self) -> dict:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "steps": self.steps,
        }


def assert_like(training: Training, other: Training) -> None:
    assert training.losses == pytest.approx(other.losses, abs=CHANCE, rel=CHANCE)
    assert len(training.losses) > 1
    expected = values_of(other.model.module)
    for name, value in values_of(training.model.module).items():
        torch.testing.assert_close(value, expected[name], atol=CHANCE, rtol=CHANCE, msg=name)


@STAGES
@pytest.mark.parametrize("clip", [{"max_norm": 0.3}, {"clip_val": 0.01}], ids=str)
def test_a_loop_trains_as_with_ddp(anywhere, stage, clip):
    plain, ours = (Training(anywhere, kind).run(2, **clip) for kind in (None, stage))
    assert find(ours.model.module.head.weight)[0].options.stage == stage
    assert type(ours.optimizer.optimizer) is zero_ext.optim.AdamW
    assert_like(ours, plain)
    if "max_norm" in clip:
        torch.testing.assert_close(ours.norms, plain.norms, atol=CHANCE, rtol=CHANCE)
    assert zero_ext.metrics(ours.model.module, ours.optimizer)["skipped_steps"] == 0


@pytest.mark.parametrize(
    "before, after", [pytest.param(None, 3, marks=pytest.mark.slow), (3, 1), (1, None)]
)
def test_a_training_goes_on_with_any_stage(anywhere, path, before, after):
    clip = {"max_norm": 0.3}
    whole = Training(anywhere, None).run(2, **clip)
    first = Training(anywhere, before).run(1, **clip)
    first.fabric.save(path / "all", first.state())
    second = Training(anywhere, after)
    if after is None:  # DDP reads files
        assert (path / "all").is_dir()
        first.fabric.save(path / "weights", {"model": first.model})
        with pytest.raises(ValueError, match="is a folder of zero_ext"):
            second.fabric.load(path / "all", second.state())
        assert second.fabric.load(path / "weights", {"model": second.model}) == {}
        expected = values_of(first.model.module)
        for name, value in values_of(second.model.module).items():
            torch.testing.assert_close(value, expected[name], atol=0, rtol=0, msg=name)
        return
    state = second.state() | {"steps": 0}
    assert second.fabric.load(path / "all", state) == {}
    assert state["steps"] == first.steps
    second.run(1, **clip)
    second.losses = [*first.losses, *second.losses]
    assert_like(second, whole)


@STAGES
def test_a_marked_method_is_a_forward(anywhere, stage):
    plain, ours = (Training(anywhere, kind) for kind in (None, stage))
    tokens = next(iter(ours.loader))[0]
    for each in (plain, ours):
        each.model.mark_forward_method("next_token")
        each.next = each.model.next_token(tokens)
    torch.testing.assert_close(ours.next, plain.next)
    assert ours.model(tokens).shape == (*tokens.shape, VOCABULARY)


def test_names_precisions_and_the_meta_device(anywhere, path):
    ours = Training(anywhere, "zero_ext_stage_3", precision="bf16-true").run(max_norm=0.3)
    engine = find(ours.model.module.head.weight)[0]
    assert (engine.options.stage, ours.model.module.head.weight.dtype) == (3, torch.bfloat16)
    if anywhere is None:
        assert sum(ours.losses[-2:]) < sum(ours.losses[:2])
    with ours.fabric.init_module(empty_init=True):
        model = Language()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model = ours.fabric.setup(model)
    assert zero_ext.full_tensor(model.module.temperature).item() == pytest.approx(1.3, rel=1e-2)
    assert zero_ext.full_tensor(model.module.head.weight).abs().max() < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShardedStrategy(2, find_unused_parameters=True, static_graph=True)


def test_an_empty_model_is_filled_by_the_script_below_stage_3(anywhere):
    """As litgpt does: only stage 3 can give values to a model on the meta device."""
    ours = Training(anywhere, 2)
    with ours.fabric.init_module(empty_init=True):
        model = Language()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    model = ours.fabric.setup(model)
    assert zero_ext.full_tensor(model.module.head.weight).eq(0.25).all()


def test_what_cannot_be_is_named(anywhere, path):
    with pytest.raises(TypeError, match="no argument 'ddp_comm_hook'"):
        ShardedStrategy(2, ddp_comm_hook=print)
    with pytest.raises(ValueError, match="start_method='spawn' the module's weights are pickled"):
        ShardedStrategy(3, start_method="spawn")
    ours, other = (Training(anywhere, 2) for _ in range(2))
    save = ours.fabric.save
    with pytest.raises(ValueError, match=r"one sharded module, and got \['model', 'other'\]"):
        save(path / "two", ours.state() | {"other": other.model})
    with pytest.raises(ValueError, match="one sharded module, and got none"):
        save(path / "alone", {"optimizer": ours.optimizer})
    with pytest.raises(ValueError, match="a filter for 'model', whose values all ranks write"):
        save(path / "some", ours.state(), filter={"model": lambda name, value: True})
    with pytest.raises(ValueError, match="Leave storage_options and protocols out"):
        save("memory://all", ours.state())
    save(path / "all", ours.state())
    with pytest.raises(KeyError, match="has no 'epoch', but"):
        ours.fabric.load(path / "all", ours.state() | {"epoch": 1})
    left = ours.fabric.load(path / "all", {"model": ours.model, "epoch": 1}, strict=False)
    assert left.keys() == {"schedule", "steps"}
    with pytest.raises(ValueError, match=r"load\(\) of the folder .* and got none"):
        ours.fabric.load(path / "all")


def test_several_modules_are_saved_in_one_order(anywhere, path):
    """Each is gathered by all ranks, whose sets of names have orders of their own."""
    fabric = Training(anywhere, 3).fabric
    values = {name: float(k) for k, name in enumerate(["student", "teacher", "a", "b", "c"])}
    modules = {name: nn.Linear(7, 13) for name in values}
    for name, module in modules.items():
        nn.init.constant_(module.weight, values[name])
    sharded = {name: fabric.setup(module) for name, module in modules.items()}
    fabric.save(path / "all", sharded)
    fabric.barrier()
    for name, state in torch.load(path / "all").items():
        assert state["weight"].unique().tolist() == [values[name]], name


def test_a_filter_chooses_what_a_file_has(anywhere, rank, path):
    ours = Training(anywhere, 3)
    chosen = {"model": lambda name, value: name.startswith("head")}
    ours.fabric.save(path / "head", {"model": ours.model, "steps": 3}, filter=chosen)
    saved = torch.load(path / "head")
    assert saved["model"].keys() == {"head.weight"} and saved["steps"] == 3
    expected = zero_ext.full_tensor(ours.model.module.head.weight)
    torch.testing.assert_close(saved["model"]["head.weight"], expected, atol=0, rtol=0)
