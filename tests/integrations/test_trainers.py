"""Trainers of other packages train as they do with DDP: ``make test-packages``. Skipped where they
are not installed."""

import importlib

import pytest
import torch
import torch.distributed as dist
from harness import Random
from setups import fresh_accelerate, values_of
from torch import nn

import zero_ext
from zero_ext.engine.registry import find

transformers = pytest.importorskip("transformers")

from zero_ext.integrations.transformers import ShardedTrainerMixin  # noqa: E402

pytestmark = [pytest.mark.dist, pytest.mark.host, pytest.mark.world(min=2)]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
WORDS = [f"word{n}" for n in range(60)]
STEPS = 3


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    fresh_accelerate()


# sentence-transformers


@pytest.fixture
def sentence_transformers():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def bert(shared_path, rank):
    """The folder of a small BERT and its tokenizer."""
    folder = shared_path / "bert"
    if rank == 0:
        folder.mkdir()
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(WORDS) + 5,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=36,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        transformers.BertModel(config).save_pretrained(folder)
        transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder)
    dist.barrier()
    return folder


def sentences(seed: int) -> list[str]:
    picked = Random(seed).integers(0, len(WORDS), (36, 5)).tolist()
    return [" ".join(WORDS[n] for n in row) for row in picked]


def embedding_trainer(packages, bert, folder, loss: str, stage: int | None):
    """Without a stage: the package's own, which accelerate wraps in DDP."""
    datasets = pytest.importorskip("datasets")
    torch.manual_seed(1)
    model = packages.SentenceTransformer(str(bert), device="cpu")
    kinds = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    losses = {
        "plain": lambda: kinds.MultipleNegativesRankingLoss(model),
        "cached": lambda: kinds.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        "cached, symmetric": lambda: kinds.CachedMultipleNegativesRankingLoss(
            model, mini_batch_size=3, directions=("query_to_doc", "doc_to_query")
        ),
        "classifier": lambda: kinds.SoftmaxLoss(model, 24, num_labels=3),
    }
    columns = {"anchor": sentences(5), "positive": sentences(6)}
    if loss == "classifier":
        columns["label"] = Random(7).integers(0, 3, (36,)).tolist()
    arguments = packages.SentenceTransformerTrainingArguments(
        str(folder),
        per_device_train_batch_size=6,
        max_steps=STEPS,
        learning_rate=1e-2,
        optim="sgd",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=STEPS,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=3,
    )
    both = {
        "model": model,
        "args": arguments,
        "train_dataset": datasets.Dataset.from_dict(columns),
        "loss": losses[loss](),
    }
    if stage is None:
        return packages.SentenceTransformerTrainer(**both)

    class Sharded(ShardedTrainerMixin, packages.SentenceTransformerTrainer):
        pass

    return Sharded(**both, stage=stage, sharding={"bucket_mb": 5_000 / 2**20})


@STAGES
@pytest.mark.parametrize("loss", ["plain", "cached", "cached, symmetric"])
def test_sentence_transformers_train_as_with_ddp(
    sentence_transformers, bert, shared_path, rank, loss, stage
):
    plain = embedding_trainer(sentence_transformers, bert, shared_path / "plain", loss, None)
    plain.train()
    fresh_accelerate()
    ours = embedding_trainer(sentence_transformers, bert, shared_path / "ours", loss, stage)
    ours.train()
    assert find(next(ours.model.parameters())) is not None
    values = values_of(ours.model)
    for name, expected in plain.model.named_parameters():
        torch.testing.assert_close(values[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    changed = sentence_transformers.SentenceTransformer(str(bert), device="cpu")
    assert not torch.equal(next(changed.parameters()), next(plain.model.parameters()))
    # What the trainer has saved, and what a script saves by itself.
    ours.model.save_pretrained(str(shared_path / "saved"))
    dist.barrier()
    for folder in (shared_path / "ours" / f"checkpoint-{STEPS}", shared_path / "saved"):
        loaded = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        for name, value in loaded.named_parameters():
            torch.testing.assert_close(value, values[name], rtol=0, atol=0, msg=f"{folder} {name}")


@STAGES
def test_a_loss_with_parameters_is_trained(sentence_transformers, bert, shared_path, rank, stage):
    """With DDP each rank's classifier goes its own way: the package does not wrap the loss."""
    ours = embedding_trainer(sentence_transformers, bert, shared_path, "classifier", stage)
    classifier = ours.loss.classifier
    before = classifier.weight.detach().clone()
    ours.train()
    assert find(classifier.weight) is not None and not torch.equal(classifier.weight, before)
    values = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(values, classifier.weight.detach())
    assert all(torch.equal(value, values[0]) for value in values)
    losses = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and losses[-1] < losses[0]


# diffusers


def unet(diffusers) -> nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def noise_loss(diffusers, model, scheduler, rank: int, step: int) -> torch.Tensor:
    draw = Random(100 * step + rank)
    images, noise = draw.normal((2, 3, 8, 8)), draw.normal((2, 3, 8, 8))
    times = draw.integers(0, scheduler.config.num_train_timesteps, (2,))
    predicted = model(scheduler.add_noise(images, noise, times), times).sample
    return nn.functional.mse_loss(predicted, noise)


@STAGES
def test_a_diffusion_loop_trains_as_with_ddp(shared_path, rank, stage):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    plain = unet(diffusers)
    wrapped = nn.parallel.DistributedDataParallel(plain)
    ours = zero_ext.shard(unet(diffusers), stage, bucket_mb=20_000 / 2**20)
    optimizers = (
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        zero_ext.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
    )
    for step in range(STEPS):
        for model, optimizer in zip((wrapped, ours), optimizers, strict=True):
            noise_loss(diffusers, model, scheduler, rank, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    values = values_of(ours)
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(values[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    # On every rank; then on rank 0 alone, where all ranks share a host.
    ours.save_pretrained(str(shared_path / "every"))
    if rank == 0:
        ours.save_pretrained(str(shared_path / "alone"))
    dist.barrier()
    for folder in ("every", "alone"):
        loaded = diffusers.UNet2DModel.from_pretrained(str(shared_path / folder))
        for name, value in loaded.named_parameters():
            assert torch.equal(value, values[name]), f"{folder}: {name}"
