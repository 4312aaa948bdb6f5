"""zero_ext.schedules: the rates that DeepSpeed's schedules of the same names set."""

import inspect

import pytest
import torch
from harness import MLP, mean_square
from setups import train_batch
from torch.optim.lr_scheduler import LRScheduler

import zero_ext.deepspeed as deepspeed
from zero_ext.deepspeed.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zero_ext.integrations.deepspeed_file import from_hf

# What DeepSpeed 0.19.8 sets for two groups with rates 0.5 and 0.25: of the first group when the
# schedule is made and after each step, and of the second one at the end.
CASES = [
    (WarmupLR, {"warmup_num_steps": 4}, [0, 0, 0.25, 0.3962406, 0.5, 0.5], 0.25),
    (
        WarmupLR,
        {
            "warmup_min_lr": 0.1,
            "warmup_max_lr": [1.0, 0.3],
            "warmup_num_steps": 3,
            "warmup_type": "linear",
        },
        [0.1, 0.1, 0.4, 0.7],
        0.2333333,
    ),
    (
        WarmupDecayLR,
        {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 0.2},
        [0, 0, 0.126186, 0.2, 0.2, 0.1333333, 0.06666667, 0, 0],
        0,
    ),
    (
        WarmupCosineLR,
        {
            "total_num_steps": 6,
            "warmup_num_steps": 2,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.01,
            "warmup_type": "linear",
        },
        [0, 0.05, 0.275, 0.4275089, 0.2525, 0.07749107, 0.005, 0.005],
        0.0025,
    ),
    (
        WarmupCosineLR,
        {"total_num_steps": 5, "warmup_num_steps": 1},
        [0, 0, 0.5, 0.3750125, 0.1250375, 5e-05, 5e-05],
        2.5e-05,
    ),
    (
        LRRangeTest,
        {
            "lr_range_test_min_lr": [0.1, 0.02],
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 3.0,
        },
        [0.1, 0.25, 0.4, 0.55, 0.7, 0.85],
        0.17,
    ),
    (
        LRRangeTest,
        {
            "lr_range_test_min_lr": 0.1,
            "lr_range_test_step_size": 3,
            "lr_range_test_staircase": True,
        },
        [0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.3, 0.3],
        0.3,
    ),
    (
        OneCycle,
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": [0.5, 0.3],
            "cycle_first_step_size": 2,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
        [0.1, 0.3, 0.5, 0.3, 0.1, 0.08, 0.06666667, 0.05714286, 0.05],
        0.05,
    ),
    (
        OneCycle,
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.4,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 5,
            "cycle_first_stair_count": 2,
            "cycle_momentum": False,
        },
        [0.1, 0.1, 0.25, 0.4, 0.25, 0.25, 0.1, 0.1, 0.1, 0.1, 0.1],
        0.1,
    ),
    (
        OneCycle,
        {
            "cycle_min_lr": 0.0,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 2,
            "cycle_second_stair_count": 1,
        },
        [0, 0.25, 0.5, 0.75, 1, 0, 0, 0, 0],
        0,
    ),
]


def an_optimizer(tensor_rates=False) -> torch.optim.Optimizer:
    rates = [torch.tensor(0.5), torch.tensor(0.25)] if tensor_rates else [0.5, 0.25]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, capturable=tensor_rates)


@pytest.mark.parametrize("tensor_rates", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(("kind", "arguments", "first", "last_of_second"), CASES)
def test_rates(kind, arguments, first, last_of_second, tensor_rates):
    optimizer = an_optimizer(tensor_rates)
    schedule = kind(optimizer, **arguments)
    rates = [float(optimizer.param_groups[0]["lr"])]
    for _ in first[1:]:
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx(first, rel=1e-6)
    assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(last_of_second, rel=1e-6)
    assert schedule.get_last_lr()[0] == pytest.approx(first[-1], rel=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor_rates


@pytest.mark.parametrize(("kind", "arguments", "first", "last_of_second"), CASES)
def test_schedules_are_torchs(kind, arguments, first, last_of_second):
    assert isinstance(kind(an_optimizer(), **arguments), LRScheduler)


def test_the_momentum_of_one_cycle():
    """What DeepSpeed 0.19.8 sets."""
    optimizer = an_optimizer()
    schedule = OneCycle(
        optimizer,
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=2,
        decay_step_size=2,
        decay_mom_rate=0.1,
    )
    found = []
    for _ in range(7):
        found.append([group["betas"] for group in optimizer.param_groups])
        schedule.step()
    firsts = [0.8, 0.85, 0.8, 0.85, 0.9, 0.945, 0.99]
    for (one, other), first in zip(found, firsts, strict=True):
        assert one == other == (pytest.approx(first), 0.99)


@pytest.mark.parametrize(("kind", "arguments", "first", "last_of_second"), CASES)
def test_a_schedule_goes_on_from_its_state(kind, arguments, first, last_of_second):
    optimizer = an_optimizer()
    schedule = kind(optimizer, **arguments)
    for _ in range(2):
        schedule.step()
    later = an_optimizer()
    resumed = kind(later, **arguments)
    later.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == schedule.get_last_lr()
    schedule.step()
    resumed.step()
    assert [g["lr"] for g in later.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_trainers_default_of_no_warmup_is_taken(kind):
    """The same rates as with one step."""
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[])
    names = ["warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr"]
    names = [name for name in names if name in inspect.signature(kind).parameters]
    file = {
        "train_micro_batch_size_per_gpu": "auto",
        "scheduler": {"type": kind.__name__, "params": dict.fromkeys(names, "auto")},
    }
    chosen = from_hf(file, arguments, num_training_steps=5).scheduler
    assert chosen.arguments["warmup_num_steps"] == 0
    found = []
    for steps in (0, 1):
        optimizer = an_optimizer()
        schedule = kind(optimizer, **{**chosen.arguments, "warmup_num_steps": steps})
        found.append([])
        for _ in range(5):
            schedule.step()
            found[-1].append(schedule.get_last_lr()[0])
    assert found[0] == found[1] and max(found[0]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_num_steps": -1}, "warmup_num_steps is -1"),
        ({"last_batch_iteration": "1"}, "last_batch_iteration is '1', not a count"),
        ({"warmup_type": "cubic"}, "warmup_type is 'cubic'"),
        ({"warmup_max_lr": [0.1, 0.2, 0.3]}, "warmup_max_lr has 3 rates, the optimizer 2 groups"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupLR(an_optimizer(), **arguments)


GROUPS = [
    (
        {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
        [[0, 0], [0, 0], [0.25, 0.125], [0.5, 0.25], [0.5, 0.25]],  # each group's own rate
    ),
    (
        {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": [0.1, 0.2],
                "warmup_max_lr": [0.3, 0.8],
                "warmup_num_steps": 2,
                "warmup_type": "linear",
            },
        },
        [[0.1, 0.2], [0.1, 0.2], [0.2, 0.5], [0.3, 0.8], [0.3, 0.8]],
    ),
    (
        {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 4,
                "warmup_max_lr": [0.3, 0.8],
                "warmup_num_steps": 2,
                "warmup_type": "linear",
            },
        },
        [[0, 0], [0, 0], [0.15, 0.4], [0.3, 0.8], [0.15, 0.4]],
    ),
    (
        {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"},
        },
        [[0, 0], [0, 0], [0.25, 0.125], [0.250025, 0.1250125], [5e-05, 2.5e-05]],
    ),
    (
        {
            "type": "LRRangeTest",
            "params": {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 1},
        },
        [[0.1, 0.2], [0.2, 0.4], [0.3, 0.6], [0.4, 0.8], [0.5, 1.0]],
    ),
    (
        {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": [0.1, 0.2],
                "cycle_max_lr": [0.3, 0.8],
                "cycle_min_mom": [0.7, 0.5],
                "cycle_max_mom": [0.8, 0.9],
                "cycle_first_step_size": 2,
            },
        },
        [[0.1, 0.2], [0.2, 0.5], [0.3, 0.8], [0.2, 0.5], [0.1, 0.2]],
    ),
    (
        {"type": "ExponentialLR", "params": {"gamma": 0.5}},
        [[0.5, 0.25], [0.25, 0.125], [0.125, 0.0625], [0.0625, 0.03125], [0.03125, 0.015625]],
    ),
]


@pytest.mark.parametrize("made_by", ["file", "user"])
@pytest.mark.parametrize(("scheduler", "rates"), GROUPS, ids=lambda value: str(value)[:24])
def test_rates_of_several_groups(anywhere, rank, scheduler, rates, made_by):
    model = MLP(13)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "lr": 0.5},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.25},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 7.0}},
        "scheduler": scheduler,
        "zero_optimization": {"stage": 3},
    }
    optimizer = schedule = None
    if made_by == "user":
        del config["optimizer"], config["scheduler"]
        optimizer = torch.optim.AdamW(groups)
        kind = SCHEDULES.get(scheduler["type"]) or getattr(
            torch.optim.lr_scheduler, scheduler["type"]
        )

        def schedule(optimizer):
            return kind(optimizer, **scheduler["params"])

    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups,
        lr_scheduler=schedule,
        config=config,
        mesh=anywhere,
    )
    for step, expected in enumerate(rates):
        assert engine.get_lr() == pytest.approx(expected)
        assert schedule.get_last_lr() == pytest.approx(expected)
        if scheduler["type"] == "OneCycle":
            firsts = [[0.7, 0.5], [0.75, 0.7], [0.7, 0.5], [0.75, 0.7], [0.8, 0.9]][step]
            assert [betas[0] for betas in engine.get_mom()] == pytest.approx(firsts)
        engine.backward(mean_square(engine, train_batch(rank, step)))
        engine.step()


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [0.1]}}, "warmup_min_lr"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": [0.1]}},
            "warmup_max_lr",
        ),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [1]}}, "lr_range_test_min_lr"),
        *(
            ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, key: [1]}}, key)
            for key in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom")
        ),
    ],
    ids=str,
)
def test_lists_of_another_length(scheduler, name):
    model = MLP(13)
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "scheduler": scheduler}
    groups = [{"params": [p]} for p in list(model.parameters())[:2]]
    with pytest.raises(ValueError, match=f"{name} has 1 rates, the optimizer 2 groups"):
        deepspeed.initialize(model=model, model_parameters=groups, config=config)
    deepspeed.initialize(model=model, config={"train_batch_size": 4})  # nothing was changed
