"""zero_ext.integrations.lightning: Lightning's Trainer trains as it does with DDP."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
from harness import assert_bits
from setups import values_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_ext
from zero_ext.engine.registry import find

pl = pytest.importorskip("pytorch_lightning")
from pytorch_lightning.callbacks import (  # noqa: E402
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
)
from pytorch_lightning.plugins.io import AsyncCheckpointIO  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy  # noqa: E402

from zero_ext.integrations.lightning import ShardedStrategy  # noqa: E402
from zero_ext.optim.whole import Whole  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("process_as_it_was"),
    pytest.mark.host,  # Lightning chooses its own device
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Consider setting .persistent_workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]
STAGES = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
CHANCE = 1e-5  # DDP adds in another order, and ten steps amplify that little


class Classifier(pl.LightningModule):
    """Reads a parameter of its own and one of its child in its steps, beside its forward."""

    def __init__(self, width: int = 33):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(13, width), nn.Tanh(), nn.Linear(width, 7))
        self.temperature = nn.Parameter(torch.tensor([1.3]))
        self.register_buffer("steps_seen", torch.zeros(()))
        self.seen: list[tuple[float, float]] = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x) * self.temperature, y)

    def training_step(self, batch, number):
        self.steps_seen += 1
        loss = self.loss(batch)
        self.seen.append((loss.item(), self.trainer.optimizers[0].param_groups[0]["lr"]))
        return {"loss": loss, "mean": loss.detach()}

    def validation_step(self, batch, number):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, number):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, number):
        return self(batch[0]) * self.temperature

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.04, 0.02], total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(count: int = 26) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 13, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(count) % 7), batch_size=3)


def trainer(mesh, stage: int | None, epochs: int = 2, micros: int = 1, **kwargs) -> pl.Trainer:
    """Without a stage: with DDP."""
    sharding = {"mesh": mesh, "bucket_mb": 200 / 2**20}  # parameters straddle units and ranks
    if stage is None:
        strategy = DDPStrategy(find_unused_parameters=True)
    else:
        strategy = ShardedStrategy(stage, sharding=sharding)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    kwargs = {"enable_checkpointing": False, "gradient_clip_val": 0.7, **quiet, **kwargs}
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if mesh is None else mesh.size(),
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=micros,
        **kwargs,
    )


def fitted(mesh, stage, model=None, ckpt_path=None, **kwargs) -> Classifier:
    model = Classifier() if model is None else model
    trainer(mesh, stage, **kwargs).fit(model, data(), data(7), ckpt_path=ckpt_path)
    return model


def assert_like(model: Classifier, other: Classifier) -> None:
    assert len(model.seen) == len(other.seen) > 3
    for one, two in zip(model.seen, other.seen, strict=True):
        assert two == pytest.approx(one, abs=CHANCE, rel=CHANCE)
    expected = values_of(other)
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], atol=CHANCE, rtol=CHANCE, msg=name)


@STAGES
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
def test_a_module_is_trained_as_with_ddp(anywhere, stage, micros):
    plain, model = (fitted(anywhere, kind, micros=micros) for kind in (None, stage))
    assert find(model.net[0].weight) is not None and type(model) is Classifier
    assert type(model.trainer.optimizers[0]) is zero_ext.optim.AdamW
    assert_like(model, plain)
    for metrics in ("callback_metrics", "logged_metrics"):
        ours, theirs = (getattr(each.trainer, metrics) for each in (model, plain))
        assert ours.keys() == theirs.keys() == {"val_loss"}
        torch.testing.assert_close(ours["val_loss"], theirs["val_loss"])


class WithAdafactor(Classifier):
    def configure_optimizers(self):
        self.made = torch.optim.Adafactor(self.parameters(), lr=0.02, foreach=False)
        return [self.made], [torch.optim.lr_scheduler.StepLR(self.made, 1, gamma=0.5)]


def test_an_optimizer_that_needs_whole_parameters_is_taken_over(anywhere):
    plain, model = (fitted(anywhere, stage, WithAdafactor(), epochs=1) for stage in (None, 3))
    assert model.trainer.optimizers[0] is model.made
    assert isinstance(model.made.zero_core.states, Whole)
    assert_like(model, plain)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precision_is_lightnings(anywhere, precision):
    model = fitted(anywhere, 3, precision=precision)
    plain = fitted(anywhere, None)
    kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {value.dtype for value in model.parameters()} == {kind}
    for one, two in zip(plain.seen, model.seen, strict=True):
        assert two == pytest.approx(one, rel=0.03)


@pytest.mark.parametrize("before, after", [(None, 3), (2, 2), (3, 1), (1, None)])
def test_a_fit_goes_on_with_any_stage(anywhere, path, before, after):
    saving = ModelCheckpoint(path, monitor="val_loss", save_top_k=1, save_last=True)
    model = fitted(anywhere, before, callbacks=[saving], enable_checkpointing=True)
    assert (path / "last.ckpt").is_dir() == (before is not None)
    whole = fitted(anywhere, after, epochs=4)
    if after is None:
        for folder in (path / "last.ckpt", str(path / "last.ckpt")):
            with pytest.raises(ValueError, match=r"ckpt_path= to a Trainer.*ShardedStrategy"):
                fitted(anywhere, after, epochs=4, ckpt_path=folder)
            with pytest.raises(ValueError, match=r"checkpoint.read_whole\(path\)"):
                Classifier.load_from_checkpoint(folder)
        return
    resumed = Classifier()
    resumed.seen = model.seen
    fitted(anywhere, after, resumed, ckpt_path=path / "last.ckpt", epochs=4)
    assert resumed.trainer.current_epoch == 4
    if before == after:
        assert resumed.seen == whole.seen
        for name, value in values_of(resumed).items():
            assert_bits(value, values_of(whole)[name], name)
    assert_like(resumed, whole)


@pytest.mark.parametrize("before, after", [(1, 1), (3, 3)])
def test_a_fit_in_half_precision_goes_on_with_its_masters(anywhere, path, before, after):
    first = fitted(anywhere, before, precision="bf16-true")
    first.trainer.save_checkpoint(path / "all.ckpt")
    resumed = Classifier()
    resumed.seen = first.seen
    fitted(anywhere, after, resumed, path / "all.ckpt", epochs=4, precision="bf16-true")
    whole = fitted(anywhere, after, epochs=4, precision="bf16-true")
    assert resumed.seen == whole.seen
    for name, value in values_of(resumed).items():
        assert_bits(value, values_of(whole)[name], name)


def test_checkpoints_that_are_not_among_the_best_go_away(anywhere, rank, path):
    saving = ModelCheckpoint(path, monitor="val_loss", save_top_k=1, filename="{epoch}")
    fitted(anywhere, 2, callbacks=[saving], enable_checkpointing=True, epochs=3)
    if rank == 0:  # who removes them
        assert os.listdir(path) == [os.path.basename(saving.best_model_path)]


class Trimmed(Classifier):
    """Keeps a part of itself out of its checkpoints, and something else in them."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if k != "temperature"}
        checkpoint["note"] = "kept"

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["note"] == "kept" and "net.0.weight" in checkpoint["state_dict"]


@STAGES
def test_weights_alone_are_lightnings_file(anywhere, rank, path, stage):
    model = fitted(anywhere, stage, Trimmed())
    model.trainer.save_checkpoint(path / "weights.ckpt", weights_only=True)
    model.trainer.save_checkpoint(path / "all.ckpt")
    expected = values_of(model) | {"temperature": torch.tensor([1.3])}
    expected["steps_seen"] = model.steps_seen
    if rank == 0:
        loaded = Trimmed.load_from_checkpoint(path / "weights.ckpt", weights_only=False)
        assert loaded.hparams.width == 33
        for name, value in loaded.state_dict().items():
            assert_bits(value, expected[name], name)

    def tested(kind, name):
        return trainer(anywhere, kind).test(Trimmed(), data(7), ckpt_path=path / name)[0]

    for name in ("weights.ckpt", "all.ckpt"):
        assert tested(stage, name) == pytest.approx(tested(None, "weights.ckpt"))


@STAGES
def test_every_loop_runs_before_and_after_a_fit(anywhere, stage):
    plain, ours = trainer(anywhere, None), trainer(anywhere, stage)
    models = Classifier(), Classifier()
    results = []
    for each, model in zip((plain, ours), models, strict=True):
        seen = [each.validate(model, data(7)), each.test(model, data(7))]
        seen.append(torch.cat(each.predict(model, data(8))))
        each.fit(model, data(), data(7))
        seen += [each.validate(model, data(7)), each.test(model, data(7))]
        seen.append(torch.cat(each.predict(model, data(8))))
        each.fit_loop.max_epochs = 3
        each.fit(model, data(), data(7))
        results.append(seen)
    assert_like(models[1], models[0])
    for theirs, mine in zip(*results, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, atol=CHANCE, rtol=CHANCE)
        else:
            assert mine[0] == pytest.approx(theirs[0], abs=CHANCE, rel=CHANCE)


@STAGES
def test_a_module_is_fitted_by_one_trainer_after_another(anywhere, path, stage):
    models = []
    for kind in (None, stage):
        model = Classifier()
        first, second = trainer(anywhere, kind), trainer(anywhere, kind)
        first.fit(model, data())
        optimizer = first.optimizers[0]
        second.fit(model, data())
        first.save_checkpoint(path / f"{kind}.ckpt")  # of the model, and of no optimizer of its own
        if kind is not None:
            assert type(optimizer) is torch.optim.AdamW and not optimizer.param_groups
        models.append(model)
    assert_like(models[1], models[0])


class Renamed(Classifier):
    """Was saved with another name, and lacked a layer."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.body = self.net
        del self.net
        self.extra = nn.Linear(7, 7)

    def forward(self, x):
        return self.body(x)

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k.replace("net.", "body."): v for k, v in state.items()}


@STAGES
def test_hooks_change_what_is_loaded(anywhere, path, stage):
    model = fitted(anywhere, stage)
    model.trainer.save_checkpoint(path / "all.ckpt")
    expected = values_of(model)
    again = Renamed()
    trainer(anywhere, stage).test(again, data(7), ckpt_path=path / "all.ckpt")
    found = values_of(again)
    for name, value in expected.items():
        assert_bits(found[name.replace("net.", "body.")], value, name)


@STAGES
@pytest.mark.parametrize("name", ["averaging", "unfreezing"])
def test_callbacks_with_states_of_their_own_are_resumed(anywhere, path, stage, name):
    if name == "averaging" and stage == 3:
        pytest.skip("it reads the parameters between steps, which are released there")

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)

    class Plain(Classifier):
        def configure_optimizers(self):
            trained = filter(lambda p: p.requires_grad, self.parameters())
            return torch.optim.AdamW(trained, lr=0.02)

    def run(kind, epochs, ckpt_path=None):
        callback = EMAWeightAveraging(decay=0.9) if name == "averaging" else Unfreezing()
        callbacks = [callback, ModelCheckpoint(path / str(kind), save_last=True)]
        saving = {"callbacks": callbacks, "enable_checkpointing": True}
        return fitted(anywhere, kind, Plain(), ckpt_path, epochs=epochs, **saving)

    models = []
    for kind in (None, stage):
        first = run(kind, 2)
        resumed = run(kind, 4, first.trainer.checkpoint_callback.last_model_path)
        resumed.seen += first.seen
        models.append(resumed)
        groups = resumed.trainer.optimizers[0].param_groups
        assert len(groups) == (1 if name == "averaging" else 2)
    if name == "averaging" or anywhere is None:  # DDP does not reduce what is unfrozen later
        assert_like(*models)


def test_an_evaluation_leaves_the_optimizer_alone(anywhere, path):
    model = fitted(anywhere, 2)
    made, optimizer = model.trainer, model.trainer.optimizers[0]
    made.save_checkpoint(path / "early.ckpt")
    made.fit_loop.max_epochs = 3
    made.fit(model, data())
    optimizer = made.optimizers[0]
    before = float(optimizer.state[model.temperature]["step"])
    made.validate(model, data(7), ckpt_path=path / "early.ckpt")
    assert float(optimizer.state[model.temperature]["step"]) == before > 0


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 13))
        self.judge = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 1))
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch, number):
        x, _ = batch
        of_maker, of_judge = self.optimizers()
        self.toggle_optimizer(of_maker)
        made = self.maker(x[:, :5])
        loss = nn.functional.softplus(-self.judge(made)).mean()
        of_maker.zero_grad()
        self.manual_backward(loss)
        of_maker.step()
        self.untoggle_optimizer(of_maker)

        self.toggle_optimizer(of_judge)
        real, false = self.judge(x), self.judge(made.detach())
        second = nn.functional.softplus(torch.cat([-real, false])).mean()
        of_judge.zero_grad()
        self.manual_backward(second)
        self.clip_gradients(of_judge, 0.1, "norm")
        of_judge.step()
        self.untoggle_optimizer(of_judge)
        self.seen.append((loss.item(), second.item()))

    def configure_optimizers(self):
        first = torch.optim.Adam(self.maker.parameters(), 0.02)
        return first, torch.optim.RMSprop(self.judge.parameters(), 0.01)


@STAGES
def test_two_optimizers_that_are_stepped_by_hand(anywhere, path, stage):
    def run(kind, model=None, epochs=2, ckpt_path=None):
        model = Adversaries() if model is None else model
        made = trainer(anywhere, kind, epochs, gradient_clip_val=None)
        made.fit(model, data(), ckpt_path=ckpt_path)
        return model

    plain, model = run(None), run(stage)
    assert_like(model, plain)
    model.trainer.save_checkpoint(path / "adversaries.ckpt")
    resumed = Adversaries()
    resumed.seen = list(model.seen)
    run(stage, resumed, 4, path / "adversaries.ckpt")
    whole = run(stage, epochs=4)
    assert resumed.seen == whole.seen
    assert_like(resumed, whole)


class ByHand(Classifier):
    """Steps inside ``training_step``, which reads a parameter of its own."""

    def __init__(self, closures: bool):
        super().__init__()
        self.automatic_optimization = False
        self.closures = closures

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        for _ in range(2):

            def closure():
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.seen.append((loss.item(), 0.0))
                return loss

            if self.closures:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return self.loss(batch)


@STAGES
@pytest.mark.parametrize("closures", [False, True])
def test_a_step_inside_a_training_step(anywhere, stage, closures):
    models = [ByHand(closures), ByHand(closures)]
    for model, kind in zip(models, (None, stage), strict=True):
        made = trainer(anywhere, kind, gradient_clip_val=None)
        if kind is not None:
            del made.strategy._sharding["bucket_mb"]  # one unit, of the module's own parameter, too
        made.fit(model, data())
    assert_like(*models)


def test_a_module_on_the_meta_device_is_made_sharded(anywhere, path):
    first = fitted(anywhere, 3)
    first.trainer.save_checkpoint(path / "all.ckpt")
    again = trainer(anywhere, 3, epochs=4)
    with again.init_module(empty_init=True):
        model = Classifier()
    assert model.net[0].weight.is_meta
    with trainer(anywhere, 2).init_module(empty_init=True):
        assert not Classifier().net[0].weight.is_meta  # the script fills it, as with DDP
    model.temperature = nn.Parameter(torch.zeros(1))
    model.steps_seen = torch.zeros(())
    again.fit(model, data(), data(7), ckpt_path=path / "all.ckpt")
    whole = fitted(anywhere, 3, epochs=4)
    expected = values_of(whole)
    for name, value in values_of(model).items():
        assert_bits(value, expected[name], name)
    again.test(model, data(7), ckpt_path=path / "all.ckpt")  # restored, not on meta any more
    for name, value in values_of(first).items():
        assert_bits(values_of(model)[name], value, name)


def test_rates_are_monitored_once(anywhere, path):
    monitor = LearningRateMonitor()
    logger = pl.loggers.CSVLogger(path)
    model = Classifier()
    made = trainer(anywhere, 2, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    made.fit(model, data())
    assert sorted(monitor.lrs) == ["lr-AdamW/pg1", "lr-AdamW/pg2"]
    assert len(set(monitor.lrs["lr-AdamW/pg1"])) > 3


class Refused(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.net.parameters())


def test_what_cannot_be_is_refused_by_name(anywhere, path):
    for arguments in (
        {"ddp_comm_hook": print},
        {"model_averaging_period": 3, "static_graph": True},
    ):
        with pytest.raises(TypeError, match=f"no argument '{next(iter(arguments))}'"):
            ShardedStrategy(2, **arguments)
    ShardedStrategy(2, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=3)
    with pytest.raises(ValueError, match="start_method='spawn' the module's weights are pickled"):
        ShardedStrategy(3, start_method="spawn")
    with pytest.raises(ValueError, match="a AsyncCheckpointIO would not see"):
        fitted(anywhere, 2, plugins=[AsyncCheckpointIO()])
    with pytest.raises(TypeError, match="LBFGS"):
        fitted(anywhere, 2, Refused())
    model = fitted(anywhere, 2)
    with pytest.raises(ValueError, match="Classifier is sharded with stage 2 already"):
        fitted(anywhere, 3, model)
    fitted(anywhere, 2, model)
    for arguments in ({"filepath": "memory://all.ckpt"}, {"storage_options": {}}):
        with pytest.raises(ValueError, match="Leave storage_options and protocols out"):
            model.trainer.save_checkpoint(**{"filepath": path / "all.ckpt", **arguments})
    model.trainer.save_checkpoint(path / "all.ckpt")
    trainer(anywhere, 2).test(Classifier(), data(7), ckpt_path=path / "all.ckpt", weights_only=True)


def test_a_file_in_the_place_of_a_checkpoint_is_replaced(anywhere, rank, path):
    model = fitted(anywhere, 2)
    model.trainer.save_checkpoint(path / "last.ckpt", weights_only=True)
    model.trainer.save_checkpoint(path / "last.ckpt")
    assert (path / "last.ckpt").is_dir()
    if anywhere is not None:
        dist.barrier()
    if rank == 0:
        shutil.rmtree(path / "last.ckpt")


class WithoutSomeBatches(Classifier):
    """Ranks but the first have no data for the last batch of a step, or for a whole step."""

    def training_step(self, batch, number):
        world = self.trainer.world_size
        kept = {0: range(6), 1: (0, 4)}[min(self.trainer.global_rank, 1)]
        loss = self.loss(batch)
        return loss * world if number in kept else torch.zeros((), requires_grad=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@STAGES
def test_a_rank_without_data_for_a_step(anywhere, stage):
    """Lightning wants a loss of it. This one reaches no parameter, so no backward begins. Ranks
    wait for each other before every batch, so only stage 1 may lack one before the last of a step.
    """
    model, batches, micros = WithoutSomeBatches(), list(data(6 * 3)), 2 if stage == 1 else 1
    made = trainer(anywhere, stage, epochs=1, micros=micros, use_distributed_sampler=False)
    made.fit(model, data(6 * 3))
    world = made.world_size

    expected = Classifier()
    reference = torch.optim.SGD(expected.parameters(), lr=0.5)
    for number, batch in enumerate(batches):
        ranks = world if number in (0, 4) else 1
        (expected.loss(batch) * ranks / micros).backward()
        if (number + 1) % micros == 0:
            nn.utils.clip_grad_norm_(expected.parameters(), 0.7)
            reference.step()
            reference.zero_grad()
    wanted = dict(expected.named_parameters())
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, wanted[name], atol=CHANCE, rtol=CHANCE, msg=name)
