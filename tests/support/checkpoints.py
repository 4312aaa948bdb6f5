"""What is saved and loaded again in tests: a model with its optimizer, trained for some steps."""

import pickle

import torch
from harness import assert_bits, mean_square
from setups import everything, train_batch
from torch import nn

import zero_ext
from zero_ext.checkpoint import digests

ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def changed(model: nn.Module) -> nn.Module:
    """Other values than those that the class seeds."""
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.add_(1)
    return model


def made(mesh, stage, model, optimizer=zero_ext.optim.AdamW, arguments=ADAMW, **kwargs):
    """The model, sharded, and its optimizer."""
    zero_ext.shard(model, stage, mesh=mesh, **{"bucket_mb": 200 / 2**20, **kwargs})
    return model, optimizer(model.parameters(), **arguments)


def train(model, optimizer, rank, steps) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        mean_square(model, train_batch(rank, step, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(actual: tuple, expected: tuple) -> None:
    __tracebackhide__ = True
    for k, (a, e) in enumerate(zip(everything(*actual), everything(*expected), strict=True)):
        assert_bits(a, e, f"value {k}")


def remove_digests(path) -> None:
    """Make the checkpoint one of a version that wrote no digests."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.modules.clear()
    file.write_bytes(pickle.dumps(metadata))
    (path / digests.FILE).unlink()
