"""``python -m zero_ext.plan MODEL``: what a model will hold and send, and which stage fits.

MODEL is ``package.module:function``, which makes the model, or a ``config.json`` of transformers.
It is made on the meta device, which holds no values.
"""

import argparse
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zero_ext.engine.checks import check_positive
from zero_ext.engine.memory import (
    PlannedUnit,
    estimate_memory,
    parts_of_other_hosts,
    planned_units,
)
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.plan import Plan, parameters_of, plan_module
from zero_ext.engine.units import Tree

_KINDS = ("full", "shard", "master", "grad", "optimizer_state", "gathered", "buckets")
_GIB = 2**30
_MOST_RANKS = 2**20  # that are tried
_HEADER_BYTES = 24  # of the flags that a rank sends with a unit's gradients; one byte per parameter
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Traffic(NamedTuple):
    """The traffic of one rank in a step of ``accumulation_steps`` backwards with
    ``reduction="exchange"``.

    ``reductions``, ``gathers``: how many, as ``stats`` counts them. ``messages``: to single ranks.
    ``gradient_bytes``, ``parameter_bytes``: in these messages.
    """

    reductions: int
    gathers: int
    messages: int
    gradient_bytes: int
    parameter_bytes: int


def traffic(plan: Plan, world_size: int, shards: int | None = None) -> Traffic:
    """See ``Traffic``. The module of ``plan`` may be on the meta device.

    ``shards``: ranks of a replica; default: all.
    """
    shards = world_size if shards is None else shards
    units = planned_units(plan, world_size, shards)
    trained = [unit for unit in units if unit.plan.trainable]
    stage, backwards = plan.options.stage, plan.options.accumulation_steps
    local = stage < 2 and backwards > 1  # their sum is sent, in fp32
    reductions = len(trained) * (1 if stage < 2 else backwards)
    if stage < 3:
        gathers = {id(unit): int(stage > 0) for unit in trained}
    else:
        of_one = _gathers_of_units(plan, units) if shards > 1 else {}
        gathers = {unit: count * backwards for unit, count in of_one.items()}
    others = world_size - 1
    itemsizes = [4 if local or unit.plan.gradient_is_fp32 else unit.itemsize for unit in trained]
    gradients = sum(u.range_numel * n for u, n in zip(trained, itemsizes, strict=True))
    flags = sum(_HEADER_BYTES + len(unit.plan.members) for unit in trained)
    parameters = sum(gathers.get(id(u), 0) * u.range_numel * u.itemsize for u in units)
    agreements = 2 if stage == 3 and shards > 1 else 1
    count = sum(gathers.values())
    return Traffic(
        reductions=reductions,
        gathers=count,
        messages=others * (2 * reductions + agreements) + (shards - 1) * count,
        gradient_bytes=others * (gradients + flags) * reductions // max(len(trained), 1),
        parameter_bytes=(shards - 1) * parameters,
    )


def between_hosts(
    sent: Traffic, stage: int, world_size: int, shards: int, hosts: int
) -> tuple[int, int]:
    """Bytes of ``sent`` that leave a host per step: gradients, parameters. The ranks of a host, and
    those of a replica, have consecutive numbers. Updated parameters go once to each other host,
    those that stage 3 gathers to each rank there."""
    here = world_size // hosts
    gradients = here * (world_size - here) * sent.gradient_bytes // max(world_size - 1, 1)
    elsewhere = max(shards - here, 0)  # ranks of the replica
    receivers = elsewhere if stage == 3 else parts_of_other_hosts(world_size, shards, hosts)
    parameters = here * receivers * sent.parameter_bytes // max(shards - 1, 1)
    return gradients, parameters


def of_host_copies(plan: Plan, world_size: int, shards: int, hosts: int) -> tuple[int, int]:
    """With ``host_copies``: bytes of updated parameters that leave a host per step, at most, and
    bytes that each rank keeps for its host."""
    units = [u for u in planned_units(plan, world_size, shards) if u.home == "shard"]
    kept = parts_of_other_hosts(world_size, shards, hosts)
    parts = [(u.range_numel * u.itemsize, u.plan.trainable) for u in units]
    trained = sum(size for size, trainable in parts if trainable)
    return world_size // hosts * kept * trained, kept * sum(size for size, _ in parts)


def _gathers_of_units(plan: Plan, units: Sequence[PlannedUnit]) -> dict[int, int]:
    """How often a forward and a backward of stage 3 gather each unit, by its id."""
    trained = [i for unit in units if unit.plan.trainable for i in unit.plan.members]
    first_trained = min(trained, default=-1)
    reached = {unit.plan.block for unit in units if max(unit.plan.members) >= first_trained}
    # The last units of the forward are kept for the backward. It ends before frozen units.
    kept = {k for k, block in enumerate(plan.blocks) if k == 0 or block.root}
    return {id(unit): 2 if unit.plan.block in reached - kept else 1 for unit in units}


def largest_unit(plan: Plan, world_size: int, shards: int) -> tuple[str, int]:
    """Its first and its last parameter, and its bytes."""
    units = planned_units(plan, world_size, shards)
    unit = max(units, key=lambda unit: unit.full_bytes)
    ends = [plan.parameters[unit.plan.members[k]][0] for k in (0, -1)]
    return " … ".join(dict.fromkeys(ends)), unit.full_bytes


def build(model: str) -> nn.Module:
    """Make the model on the meta device.

    Args:
        model: ``package.module:function``, or the path of a ``config.json`` of transformers.
    Raises:
        ValueError: there is no such function, or it makes no module; or transformers is not
            installed, or has no such model.
    """
    if Path(model).suffix == ".json":
        return _of_configuration(model)
    place, _, name = model.partition(":")
    function = getattr(importlib.import_module(place), name, None) if name else None
    if not callable(function):
        raise ValueError(
            f"zero_ext: '{model}' names no function. Pass package.module:function, a function "
            "without arguments that returns the model, or a config.json of transformers."
        )
    with torch.device("meta"):
        module = function()
    if not isinstance(module, nn.Module) or not [*module.parameters()]:
        kind = type(module).__name__
        raise ValueError(f"zero_ext: '{model}' made a {kind}, not a module with parameters.")
    return module


def _of_configuration(path: str) -> nn.Module:
    """The architecture that it names, in its dtype. No code of the folder runs."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"zero_ext: '{path}' is a configuration of transformers, which is not installed. "
            "Call pip install transformers."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"zero_ext: '{path}' cannot be read: {error}") from error
    (name, *_) = config.architectures or [""]
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type):
        raise ValueError(
            f"zero_ext: '{path}' has architectures={config.architectures!r}, and transformers "
            f"{transformers.__version__} has no such model. Pass package.module:function instead."
        )
    with torch.device("meta"):
        return kind(config).to(config.dtype or torch.float32)


def needed_bytes(estimate: dict[str, int]) -> int:
    """On a rank, beside the activations."""
    return sum(estimate[kind] for kind in _KINDS)


class Setting(NamedTuple):
    """The question about a model, beside its stage."""

    world_size: int
    shards: int
    bucket_mb: float
    param_dtype: torch.dtype | None
    accumulation_steps: int
    offload: bool
    device: str
    hosts: int = 1

    def estimate(self, module: nn.Module, stage: int) -> dict[str, int]:
        """See ``estimate_memory``. With several backwards, the copy that undoes one is counted."""
        several = self.accumulation_steps > 1
        of = functools.partial(
            estimate_memory,
            module,
            self.world_size,
            stage,
            shards=self.shards,
            bucket_mb=self.bucket_mb,
            param_dtype=self.param_dtype,
            device=self.device,
        )
        policy = CPUOffloadPolicy() if self.offload else None
        result = of(local_accumulation=several, offload_policy=policy)
        if several:
            where = ("offloaded",) if self.offload else ("grad", "persistent")
            copy = of()["grad"]
            result |= {kind: result[kind] + copy for kind in where}
        return result

    def options(self, stage: int) -> ShardingOptions:
        return ShardingOptions(
            stage=stage,
            bucket_mb=self.bucket_mb,
            param_dtype=self.param_dtype,
            accumulation_steps=self.accumulation_steps,
        )

    def check_hosts(self) -> None:
        here, rest = divmod(self.world_size, max(self.hosts, 1))
        if self.hosts < 1 or rest or max(here, self.shards) % min(here, self.shards):
            raise ValueError(
                f"zero_ext: {self.world_size} ranks in replicas of {self.shards} cannot be on "
                f"{self.hosts} hosts. Pass a --hosts that gives each host whole replicas, or each "
                "replica whole hosts."
            )

    def others(self) -> Iterator[tuple[str, "Setting"]]:
        """Settings that hold less, by their arguments: first those that need no other machine."""
        if not self.offload:
            yield "--offload", self._replace(offload=True)
        if self.shards < self.world_size:
            yield f"--shards {self.world_size}", self._replace(shards=self.world_size)
        size = 2 * self.world_size
        while size <= _MOST_RANKS:
            for offload in sorted({self.offload, True}):
                arguments = f"--world-size {size}" + " --offload" * (offload and not self.offload)
                yield arguments, self._replace(world_size=size, shards=size, offload=offload)
            size *= 2


def advice(module: nn.Module, setting: Setting, estimates: Sequence[dict], memory: float) -> str:
    """The smallest stage that fits into ``memory`` GiB; where none does, what would."""

    def said(size: int) -> str:
        return f"{size / _GIB:,.1f} GiB of {memory:g}"

    sizes = [needed_bytes(estimate) for estimate in estimates]
    for stage, size in enumerate(sizes):
        if size <= memory * _GIB:
            return (
                f"the smallest stage that fits: {stage}, {said(size)}; the rest is for activations"
            )
    least = min(range(4), key=sizes.__getitem__)
    text = f"no stage fits: stage {least} takes {said(sizes[least])}."
    for arguments, other in setting.others():
        if (size := needed_bytes(other.estimate(module, least))) <= memory * _GIB:
            return f"{text} With {arguments} it takes {said(size)}."
    return f"{text} More ranks do not help: cut the largest unit into several modules."


def _unit_of(largest: float) -> tuple[str, int]:
    """The unit in which to print sizes of up to ``largest`` bytes, and its bytes."""
    return ("GiB", _GIB) if largest >= 10 * _GIB else ("MiB", 2**20)


def _with_unit(size: float) -> str:
    name, unit = _unit_of(size)
    return f"{size / unit:,.1f} {name}"


def report(
    module: nn.Module, setting: Setting, stage: int, estimates: Sequence[dict], in_gib: bool
) -> str:
    """``estimates``: by stage. ``in_gib``: also where that is little."""
    parameters = list(module.parameters())
    totals = [needed_bytes(estimate) for estimate in estimates]
    on_host = [estimate["offloaded"] for estimate in estimates]
    name, unit = ("GiB", _GIB) if in_gib else _unit_of(max(totals))
    rows = [[f"{name} per rank", *_KINDS, "total", *["on the host"] * setting.offload]]
    for k, estimate in enumerate(estimates):
        numbers = [*(estimate[kind] for kind in _KINDS), totals[k], *on_host[k:][: setting.offload]]
        rows.append([f"stage {k}", *(f"{n / unit:,.1f}" if n else "-" for n in numbers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    plan = plan_module(parameters_of(Tree(module)), setting.options(stage))
    world, shards, steps = setting.world_size, setting.shards, setting.accumulation_steps
    name, size = largest_unit(plan, world, shards)
    sent = traffic(plan, world, shards)
    replicas = f" ({world // shards:,} replicas of {shards:,})" if shards < world else ""
    leaves = between_hosts(sent, stage, world, shards, setting.hosts)
    of_host = (
        f"{_with_unit(leaves[0])} of gradients and up to {_with_unit(leaves[1])} of parameters "
        f"leave each of the {setting.hosts:,} hosts."
    )
    sent_to_copies, kept = of_host_copies(plan, world, shards, setting.hosts)
    of_copies = (
        f"With host_copies=True up to {_with_unit(sent_to_copies)} of parameters do, and each rank"
        f" holds {_with_unit(kept)} more."
    )
    return "\n".join(
        [
            f"{type(module).__name__}: {sum(p.numel() for p in parameters):,} elements in "
            f"{len(parameters):,} parameters, on {world:,} ranks{replicas} with AdamW",
            "",
            *table,
            "",
            f"Stage {stage}: {sent.reductions // (1 if stage < 2 else steps):,} units with "
            f"gradients; the largest is '{name}', {_with_unit(size)}.",
            f"A step of {'one backward' if steps == 1 else f'{steps:,} backwards'} with "
            f"reduction='exchange', per rank: {sent.messages:,} messages; sent are "
            f"{_with_unit(sent.gradient_bytes)} of gradients and "
            f"{_with_unit(sent.parameter_bytes)} of parameters ({sent.gathers:,} gathers).",
            *[of_host] * (setting.hosts > 1),
            *[of_copies] * (kept > 0),
        ]
    )


def plot(estimates: Sequence[dict], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes, estimates)
    axes.set(title=title)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


def draw(axes: Any, estimates: Sequence[dict], unit: str = "MiB", unit_bytes: int = 2**20) -> None:
    """Stacked bars of the bytes per rank, one for each stage. What buckets add may be cut off: in
    stage 0 they grow with the number of ranks."""
    totals = [needed_bytes(estimate) / unit_bytes for estimate in estimates]
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero_ext.plan", description="What a model will hold and send."
    )
    parser.add_argument(
        "model", help="package.module:function, which makes the model, or a config.json"
    )
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--shards", type=int, help="ranks of a replica, for hybrid sharding")
    parser.add_argument("--hosts", type=int, default=1, help="with equally many ranks each")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--param-dtype", choices=_DTYPES, help="of mp_policy")
    parser.add_argument("--accumulation-steps", type=int, default=1, help="backwards of a step")
    parser.add_argument("--offload", action="store_true", help="with CPUOffloadPolicy, on a device")
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="say which stage fits into it"
    )
    parser.add_argument(
        "--device", help="cpu or cuda; default: cuda with --offload or --device-memory, else cpu"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the bytes; a PNG")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    on_device = args.offload or args.device_memory is not None
    setting = Setting(
        world_size=args.world_size,
        shards=args.world_size if args.shards is None else args.shards,
        bucket_mb=args.bucket_mb,
        param_dtype=_DTYPES.get(args.param_dtype),
        accumulation_steps=args.accumulation_steps,
        offload=args.offload,
        device=args.device or ("cuda" if on_device else "cpu"),
        hosts=args.hosts,
    )
    try:
        setting.options(args.stage)  # checks them
        if args.device_memory is not None:
            check_positive("--device-memory", args.device_memory, finite=True)
        if args.offload and setting.device == "cpu":
            raise ValueError("zero_ext: --offload changes nothing with --device cpu: leave it out.")
        module = build(args.model)
        estimates = [setting.estimate(module, stage) for stage in range(4)]
        setting.check_hosts()
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    print(report(module, setting, args.stage, estimates, args.device_memory is not None))
    if args.device_memory is not None:
        print(f"\n{advice(module, setting, estimates, args.device_memory)}")
    if args.plot is not None:
        plot(estimates, f"{type(module).__name__} on {args.world_size:,} ranks, AdamW", args.plot)


if __name__ == "__main__":
    main()
