"""``python -m zero_ext.plan package.module:function``: what a model will hold and send.

The function makes the model; it is called on the meta device, which holds no values.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.engine.memory import PlannedUnit, estimate_memory, planned_units
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.plan import Plan, parameters_of, plan_module
from zero_ext.engine.units import Tree

_KINDS = ("full", "shard", "master", "grad", "optimizer_state", "gathered", "buckets")
_HEADER_BYTES = 24  # of the flags that a rank sends with a unit's gradients; one byte per parameter
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Traffic(NamedTuple):
    """What one rank sends in a step of one backward with ``reduction="exchange"``.

    ``reductions``, ``gathers``: how many, as ``stats`` counts them. ``messages``: to single ranks.
    ``gradient_bytes``, ``parameter_bytes``: in these messages.
    """

    reductions: int
    gathers: int
    messages: int
    gradient_bytes: int
    parameter_bytes: int


def traffic(plan: Plan, world_size: int) -> Traffic:
    """See ``Traffic``. The module of ``plan`` may be on the meta device."""
    units = planned_units(plan, world_size, world_size)
    trained = [unit for unit in units if unit.plan.trainable]
    stage = plan.options.stage
    if stage < 3:
        gathers = {id(unit): int(stage > 0) for unit in trained}
    else:
        gathers = _gathers_of_units(plan, units) if world_size > 1 else {}
    others = world_size - 1
    itemsizes = [4 if unit.plan.gradient_is_fp32 else unit.itemsize for unit in trained]
    gradients = sum(u.range_numel * n for u, n in zip(trained, itemsizes, strict=True))
    flags = sum(_HEADER_BYTES + len(unit.plan.members) for unit in trained)
    parameters = sum(gathers.get(id(u), 0) * u.range_numel * u.itemsize for u in units)
    agreements = 2 if stage == 3 else 1
    count = sum(gathers.values())
    return Traffic(
        reductions=len(trained),
        gathers=count,
        messages=others * (2 * len(trained) + count + agreements),
        gradient_bytes=others * (gradients + flags),
        parameter_bytes=others * parameters,
    )


def _gathers_of_units(plan: Plan, units: Sequence[PlannedUnit]) -> dict[int, int]:
    """How often a forward and a backward of stage 3 gather each unit, by its id."""
    trained = [i for unit in units if unit.plan.trainable for i in unit.plan.members]
    first_trained = min(trained, default=-1)
    reached = {unit.block for unit in units if max(unit.plan.members) >= first_trained}
    # What the forward ends with is kept for the backward, which ends before what is frozen.
    kept = {k for k, block in enumerate(plan.blocks) if k == 0 or block.root}
    return {id(unit): 2 if unit.block in reached - kept else 1 for unit in units}


def largest_unit(plan: Plan, world_size: int) -> tuple[str, int]:
    """Its first and its last parameter, and its bytes."""
    units = planned_units(plan, world_size, world_size)
    unit = max(units, key=lambda unit: unit.full_bytes)
    ends = [plan.parameters[unit.plan.members[k]][0] for k in (0, -1)]
    return " … ".join(dict.fromkeys(ends)), unit.full_bytes


def build(factory: str) -> nn.Module:
    """Call ``package.module:function`` on the meta device.

    Raises:
        ValueError: there is no such function, or it makes no module.
    """
    place, _, name = factory.partition(":")
    function = getattr(importlib.import_module(place), name, None) if name else None
    if not callable(function):
        raise ValueError(
            f"zero_ext: '{factory}' names no function. Pass package.module:function, a function "
            "without arguments that returns the model."
        )
    with torch.device("meta"):
        module = function()
    if not isinstance(module, nn.Module):
        raise ValueError(f"zero_ext: '{factory}' made a {type(module).__name__}, not a module.")
    return module


def _unit_of(largest: float) -> tuple[str, int]:
    """The unit in which to print sizes of up to ``largest`` bytes, and its bytes."""
    return ("GiB", 2**30) if largest >= 10 * 2**30 else ("MiB", 2**20)


def _with_unit(size: float) -> str:
    name, unit = _unit_of(size)
    return f"{size / unit:,.1f} {name}"


def report(
    module: nn.Module, world_size: int, options: ShardingOptions, estimates: Sequence[dict]
) -> str:
    """``estimates``: by stage."""
    parameters = list(module.parameters())
    sizes = [[estimate[kind] for kind in _KINDS] for estimate in estimates]
    name, unit = _unit_of(max(map(sum, sizes)))
    rows = [[f"{name} per rank", *_KINDS, "total"]]
    for stage, of_kinds in enumerate(sizes):
        numbers = [*of_kinds, sum(of_kinds)]
        rows.append([f"stage {stage}", *(f"{n / unit:,.1f}" if n else "-" for n in numbers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    plan = plan_module(parameters_of(Tree(module)), options)
    name, size = largest_unit(plan, world_size)
    sent = traffic(plan, world_size)
    return "\n".join(
        [
            f"{type(module).__name__}: {sum(p.numel() for p in parameters):,} elements in "
            f"{len(parameters):,} parameters, on {world_size:,} ranks with AdamW",
            "",
            *table,
            "",
            f"Stage {options.stage}: {sent.reductions:,} units with gradients; the largest is "
            f"'{name}', {_with_unit(size)}.",
            f"A step of one backward with reduction='exchange', per rank: {sent.messages:,} "
            f"messages; sent are {_with_unit(sent.gradient_bytes)} of gradients and "
            f"{_with_unit(sent.parameter_bytes)} of parameters ({sent.gathers:,} gathers).",
        ]
    )


def plot(estimates: Sequence[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw(axes, estimates)
    axes.set(title=title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(axes: Any, estimates: Sequence[dict], unit: str = "MiB", unit_bytes: int = 2**20) -> None:
    """Stacked bars of the bytes per rank, one for each stage. What buckets add may be cut off: in
    stage 0 they grow with the number of ranks."""
    totals = [sum(estimate[kind] for kind in _KINDS) / unit_bytes for estimate in estimates]
    bottoms = [0.0] * len(estimates)
    stages = [f"stage {stage}" for stage in range(len(estimates))]
    for kind in _KINDS:
        sizes = [estimate[kind] / unit_bytes for estimate in estimates]
        axes.bar(stages, sizes, bottom=bottoms, label=kind.replace("_", " "), width=0.6)
        bottoms = [b + s for b, s in zip(bottoms, sizes, strict=True)]
    top = max(*totals[1:], *(estimate["persistent"] / unit_bytes for estimate in estimates))
    for stage, total in zip(stages, totals, strict=True):
        text = f"{total:,.0f}" if total <= top else f"↑ {total:,.0f}"
        axes.text(stage, min(total, 1.06 * top), text, ha="center", va="bottom")
    axes.set(ylabel=f"{unit} per rank", ylim=(0, 1.15 * top))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.plan", description="What a model will hold and send."
    )
    parser.add_argument("model", help="package.module:function, which makes the model")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--param-dtype", choices=_DTYPES, help="of mp_policy")
    parser.add_argument("--device", default="cpu", help="cuda: what a device holds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the bytes; a PNG")
    args = parser.parse_args(arguments)
    dtype = _DTYPES.get(args.param_dtype)
    options = ShardingOptions(stage=args.stage, bucket_mb=args.bucket_mb, param_dtype=dtype)
    try:
        module = build(args.model)
        estimates = [
            estimate_memory(
                module,
                args.world_size,
                stage,
                bucket_mb=args.bucket_mb,
                param_dtype=dtype,
                device=args.device,
            )
            for stage in range(4)
        ]
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    print(report(module, args.world_size, options, estimates))
    if args.plot is not None:
        plot(estimates, f"{type(module).__name__} on {args.world_size:,} ranks, AdamW", args.plot)


if __name__ == "__main__":
    main()
