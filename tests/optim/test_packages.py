"""Published optimizers, wrapped: ``make test-packages``. Skipped where they are not installed.

Expected is what the package's own class makes of averaged gradients in one process.
"""

import functools

import pytest
import torch
from matrices import Matrices, OneProcess, assert_same_parameters, straddling, train

import zero_ext
from zero_ext.optim.whole import Whole

SMALL_BLOCKS = {"lr": 0.01, "min_8bit_size": 64}
# Package, class, arguments, and whether owners update whole parameters.
KINDS = [
    ("schedulefree", "AdamWScheduleFree", {"lr": 0.01, "foreach": False}, False),
    ("schedulefree", "SGDScheduleFree", {"lr": 0.1, "foreach": False}, False),
    ("schedulefree", "RAdamScheduleFree", {"lr": 0.01, "foreach": False}, False),
    ("lion_pytorch", "Lion", {"lr": 0.01}, False),
    ("madgrad", "MADGRAD", {"lr": 0.01}, False),
    ("madgrad", "MirrorMADGRAD", {"lr": 0.01}, False),
    ("pytorch_optimizer", "SOAP", {"lr": 0.01, "precondition_frequency": 2}, True),
    ("pytorch_optimizer", "Shampoo", {"lr": 0.01}, True),
    ("pytorch_optimizer", "ScalableShampoo", {"lr": 0.01, "start_preconditioning_step": 3}, True),
    ("pytorch_optimizer", "Lamb", {"lr": 0.01}, True),
    ("pytorch_optimizer", "LARS", {"lr": 0.01}, True),
    ("pytorch_optimizer", "CAME", {"lr": 0.01}, True),
    ("bitsandbytes.optim", "AdamW8bit", SMALL_BLOCKS, True),
    ("bitsandbytes.optim", "Lion8bit", SMALL_BLOCKS, True),
    ("torchao.optim", "AdamW8bit", {"lr": 0.01, "block_size": 128}, True),
    ("torchao.optim", "AdamW4bit", {"lr": 0.01}, True),
]


@pytest.fixture
def without_compiler():
    """torchao compiles its step for each shape, which takes minutes. Both sides run it eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("package", "name", "settings", "whole"), KINDS)
def test_they_have_the_bits_of_one_process(
    anywhere, rank, world, path, package, name, settings, whole
):
    made = functools.partial(_class_of(package, name), **settings)
    for stage in (1, 3):
        plain = OneProcess(1 if anywhere is None else world, made)
        model = straddling(Matrices(), stage, anywhere)
        optimizer = zero_ext.optim.wrap(made.func, model.parameters(), **settings)
        assert isinstance(optimizer.zero_core.states, Whole) == whole
        for each in (optimizer, plain.optimizer):
            if hasattr(each, "train"):
                each.train()
        train(model, optimizer, rank, range(3))
        zero_ext.checkpoint.save(path.with_name(f"stage{stage}"), model, optimizer)
        plain.train(range(6))
        train(model, optimizer, rank, range(3, 6))
        assert_same_parameters(model, plain.model)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
            plain.optimizer.eval()
            assert_same_parameters(model, plain.model)


def test_what_depends_on_all_parameters_is_rejected_by_name():
    prodigy = _class_of("pytorch_optimizer", "Prodigy")
    with pytest.raises(TypeError, match=r"Prodigy cannot be sharded.*depends on other parameters"):
        zero_ext.optim.wrap(prodigy, Matrices().parameters(), lr=1.0)


def _class_of(package: str, name: str) -> type:
    return getattr(pytest.importorskip(package, exc_type=ImportError), name)
