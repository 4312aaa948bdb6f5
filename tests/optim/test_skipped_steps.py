"""Steps that are skipped for NaN or Inf: what is said, how often, and where it ends."""

import warnings

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext.optim import verdicts


def _skip(module, optimizer, factor: float) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (module(torch.ones(2, 83, dtype=module.weight.dtype)).sum() * factor).backward()
        optimizer.step()
        _ = optimizer.skipped_steps  # a device tells it late
        optimizer.zero_grad()
    return [str(each.message) for each in caught if "skipped" in str(each.message)]


def test_warnings_get_rare_and_begin_anew_after_a_step(team):
    module = nn.Linear(83, 13)  # each rank has a part of the weight
    optimizer = zero_ext.optim.AdamW(module.named_parameters(), process_group=team.group)
    for _ in range(2):
        told = [_skip(module, optimizer, float("nan")) for _ in range(9)]
        often = (1, 2, 4, 8) if team.rank == 0 else (1,)
        assert [i for i, texts in enumerate(told, 1) if texts] == list(often)
        diverged = [i for i, texts in enumerate(told, 1) if "the run has diverged" in str(texts)]
        assert diverged == [i for i in often if i >= 4]
        assert _skip(module, optimizer, 1.0) == []
    assert optimizer.skipped_steps == 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_named_and_ends_at_a_limit(team, bad, dtype, monkeypatch):
    """In half precision it is found beside its finite master."""
    monkeypatch.setattr(verdicts, "MAX_SKIPPED_IN_A_ROW", 3)
    module = nn.Linear(83, 13, dtype=dtype)
    optimizer = zero_ext.optim.AdamW(module.named_parameters(), process_group=team.group)
    with torch.no_grad():
        module.weight.fill_(bad)
    factor = float("nan")
    mended = "the parameter 'weight' itself holds NaN or Inf, and skipping steps cannot mend it"
    assert mended in _skip(module, optimizer, factor)[0]
    _skip(module, optimizer, factor)
    with pytest.raises(RuntimeError, match=r"3 in a row\. The training does nothing any more"):
        _skip(module, optimizer, factor)
    with torch.no_grad():
        module.weight.fill_(0.5)
    optimizer.zero_grad()
    assert _skip(module, optimizer, 1.0) == []
