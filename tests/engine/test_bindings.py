"""Wrong arguments of the engine's bindings raise. They came from Python, and ended the process."""

import pytest
import torch
from harness import MLP
from torch import nn

import zero_ext
from zero_ext import _C
from zero_ext.engine.registry import find


@pytest.fixture
def engine():
    model = MLP(13)
    model.layers[0].bias.requires_grad_(False)
    model.optimizer = zero_ext.optim.AdamW(zero_ext.shard(model, 2).parameters())
    yield find(model.layers[0].weight)[0].engine
    del model


FROZEN = 1  # the parameter of MLP that the fixture freezes
ONE = torch.zeros(1)


def of_parameters(engine):
    yield from (
        (name, getattr(engine, name))
        for name in ("unit_of", "frozen_unit_of", "unit_name_of", "parameter_name", "bounds")
    )
    yield from ((n, getattr(engine, n)) for n in ("strides", "comes_and_goes", "grad_slice"))
    yield from ((n, getattr(engine, n)) for n in ("master_slice", "current_master"))
    yield "parameter_slice", engine.parameter_slice
    yield "write_parameter", lambda i: engine.write_parameter(i, ONE)
    yield "write_gradient", lambda i: engine.write_gradient(i, ONE)
    yield "replace_parameter", lambda i: engine.replace_parameter(i, ONE)
    yield "zero_grad", lambda i: engine.zero_grad([i], _C.ZeroGrad.to_none)
    yield "assign", lambda i: _C.OptimizerState(engine, 2).assign([i], [0])
    yield "facts", lambda i: _C.facts(engine, [i])
    yield "slice", lambda i: _C.OptimizerState(engine, 2).slice(0, i)
    yield "step", lambda i: _C.OptimizerState(engine, 2).step(i)


def test_an_index_that_is_out_of_range(engine):
    for name, call in of_parameters(engine):
        for i in (-1, 1083, 2**40):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                call(i)
                pytest.fail(f"{name}({i})")


def test_a_frozen_parameter_in_no_unit(engine):
    name = engine.parameter_name(FROZEN)
    assert (engine.unit_of(FROZEN), engine.frozen_unit_of(FROZEN)) == (-1, -1)
    for call in (engine.master_slice, engine.bounds, engine.strides, engine.current_master):
        with pytest.raises(ValueError, match=rf"'{name}' is frozen and in no unit"):
            call(FROZEN)
    for call in (engine.grad_slice, lambda i: engine.write_gradient(i, ONE)):
        with pytest.raises(ValueError, match=rf"'{name}' is frozen: it has no gradient"):
            call(FROZEN)


def test_units_and_sites_that_do_not_exist(engine):
    for call in (
        lambda n: engine.padded_numel(n),
        lambda n: engine.set_gradient_dtype(n, torch.float32),
        lambda n: engine.add_hook_site([n], root=False, first=True, last=True),
        lambda n: engine.add_inner_site([n]),
        lambda n: engine.is_recomputed(n),
        lambda n: engine.enter_forward(n, None),
        lambda n: engine.leave_forward(n, None, [], False),
        lambda n: engine.add_unit([n], torch.float32, _C.UnitKind.trainable),
    ):
        for n in (-1, 1083):
            with pytest.raises((IndexError, RuntimeError)):
                call(n)
    with pytest.raises(ValueError, match="1 parameters have 0 names"):
        engine.add_parameters([nn.Parameter(ONE)], [])


def test_what_is_no_object_of_ours():
    with pytest.raises(TypeError):
        _C.OptimizerState(None, 2)
    with pytest.raises(ValueError, match="not contiguous"):
        _C.digest(memoryview(bytes(16))[::2])
