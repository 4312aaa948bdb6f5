"""What torch.profiler shows of zero_ext."""

from collections import Counter

import pytest
import torch
from harness import (
    MLP,
    ONE_UNIT_EACH,
    mean_square,
    needs_one_dimension,
    needs_one_host,
    rank_data,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero_ext
from zero_ext.engine.registry import find


def ranges_of(function) -> Counter:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    names = (event.name for event in profiler.events())
    return Counter(name for name in names if name.startswith("zero_ext::"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_verb_is_a_range_with_the_units_name(anywhere, rank, stage):
    needs_one_dimension()
    world = 1 if anywhere is None else anywhere.size()
    model = zero_ext.shard(MLP(13), stage, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.1)
    engine = find(next(model.parameters()))[0].engine
    parameters = list(enumerate(model.parameters()))
    units = {engine.unit_name_of(i).replace("…", "...") for i, _ in parameters}

    def step():
        mean_square(model, rank_data((4, 5), rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # which learns the order of reductions
    seen = ranges_of(step)
    by_unit = {
        verb: {unit for unit in units if seen[f"zero_ext::{verb} {unit}"]}
        for verb in ("accumulate", "reduce", "update", "gather", "release")
    }
    assert by_unit["accumulate"] == units
    assert by_unit["update"] == units
    assert sum(n for name, n in seen.items() if "accumulate" in name) == len(parameters)
    assert by_unit["reduce"] == (units if world > 1 else set())
    releases = units if stage == 3 and world > 1 else set()
    assert by_unit["release"] == releases
    assert by_unit["gather"] == (units if stage > 0 and world > 1 else by_unit["gather"])
    if stage in (1, 2) and world > 1:
        assert seen["zero_ext::gather updated parameters"] == 1
    waits = {name for name in seen if name.startswith("zero_ext::wait ")}
    others = {f"zero_ext::wait for rank {r}" for r in range(world) if r != rank}
    assert others <= waits if world > 1 else not waits
    if model.stats()["neighbors"] == world - 1 > 0:
        copies = {name for name in seen if name.startswith("zero_ext::copy ")}
        assert copies == {f"zero_ext::copy from peer {r}" for r in range(world) if r != rank}
        assert seen["zero_ext::agree in step()"] == 1


def test_units_of_several_parameters_are_in_the_trace_file(tmp_path):
    model = MLP(13)
    model.größe = nn.Linear(5, 5)
    zero_ext.shard(model, 2, bucket_mb=1.0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        (
            mean_square(model, torch.ones(4, 5)) + mean_square(model.größe, torch.ones(4, 5))
        ).backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"zero_ext::accumulate layers.0.weight ... gr??e.bias"') == 8


def test_ranges_end_where_an_error_ends_them(anywhere, rank):
    """And the next step is shown as before."""
    needs_one_host("a receive of gloo that outlives a profile breaks the process")
    model = zero_ext.shard(MLP(13), 2, mesh=anywhere, bucket_mb=ONE_UNIT_EACH)

    def fail():
        raise KeyError

    def step(last=None):
        loss = mean_square(model, rank_data((4, 5), rank))
        if last is not None:
            handle = model.layers[0].weight.register_hook(lambda _: last())
            with pytest.raises(KeyError):
                loss.backward()
            handle.remove()
        else:
            loss.backward()
        model.zero_grad()

    step()
    expected = ranges_of(step)
    ranges_of(lambda: step(fail))
    again = ranges_of(step)
    for verb in ("accumulate", "reduce"):
        of_verb = [{k: n for k, n in seen.items() if verb in k} for seen in (expected, again)]
        assert of_verb[0] == of_verb[1]
