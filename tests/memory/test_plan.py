"""``python -m zero_ext.plan``: what it says of a model, and what a real run of it does."""

from collections import Counter

import pytest
import torch
from harness import MLP, Blocks, Tied, mean_square, needs_one_dimension, rank_data
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

import zero_ext
from zero_ext import _C, plan
from zero_ext.engine.options import ShardingOptions
from zero_ext.engine.plan import parameters_of, plan_module
from zero_ext.engine.units import Tree

KINDS = ("full", "shard", "master", "grad", "optimizer_state")
SMALL_MB = 3000 / 2**20
SLOW = pytest.mark.slow


def frozen_first() -> nn.Module:
    model = Blocks(width=37)
    for parameter in model.blocks[:2].parameters():
        parameter.requires_grad_(False)
    return model


# Factory, dtype of mp_policy, shape of a rank's batch.
MODELS = {
    "fp32": (lambda: Blocks(width=37), None, (4, 37)),
    "bf16": (lambda: MLP(83, layers=5, dtype=torch.bfloat16), None, (4, 5)),
    "policy": (lambda: Blocks(width=29, blocks=5), torch.bfloat16, (4, 29)),
    "frozen": (frozen_first, None, (4, 37)),
    "tied": (lambda: Tied(83, 13), None, None),
}


def step(model, optimizer, shape, rank) -> None:
    if shape is None:
        batch = torch.arange(6).view(2, 3) + rank
    else:
        batch = rank_data(shape, rank, dtype=next(model.parameters()).dtype)
    mean_square(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_real_run_holds_and_sends_what_was_planned(anywhere, rank, stage):
    needs_one_dimension()
    world = 1 if anywhere is None else anywhere.size()
    for name, (make, dtype, shape) in MODELS.items():
        options = ShardingOptions(stage=stage, bucket_mb=SMALL_MB, param_dtype=dtype)
        with torch.device("meta"):
            meta = make()
        estimate = zero_ext.estimate_memory(
            meta, world, stage, bucket_mb=SMALL_MB, param_dtype=dtype, device=plan_device()
        )
        planned = plan.traffic(plan_module(parameters_of(Tree(meta)), options), world)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        model = zero_ext.shard(make(), stage, mesh=anywhere, bucket_mb=SMALL_MB, mp_policy=policy)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = zero_ext.optim.AdamW(trained, lr=0.01, nonfinite="raise")
        for _ in range(3):  # the first passes learn their order, the first step that of reductions
            step(model, optimizer, shape, rank)
            held = model.stats()
            optimizer.zero_grad()
        whole = sum(p.nbytes for p in model.parameters() if not p.requires_grad) if stage < 3 else 0
        for kind in KINDS:
            actual = held[f"bytes_{kind}"] + (whole if kind == "full" else 0)
            assert actual == pytest.approx(estimate[kind], rel=0.03), (name, kind)
        before = model.stats()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(model, optimizer, shape, rank)
        after = model.stats()
        for what in ("reductions", "gathers"):
            assert after[what] - before[what] == getattr(planned, what), (name, what)
        if world > 1 and after["neighbors"] == world - 1 and plan_device() == "cpu":
            names = Counter(e.name.split(" ")[0] for e in profiler.events())
            assert names["zero_ext::copy"] == pytest.approx(planned.messages, rel=0.03), name
        optimizer.zero_grad()


@pytest.mark.dist
@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_replicas_and_several_backwards_hold_and_send_what_was_planned(
    replicas_of, rank, world, stage
):
    needs_one_dimension()
    for shards in (n for n in range(1, world + 1) if world % n == 0):
        setting = plan.Setting(world, shards, SMALL_MB, torch.bfloat16, 2, False, plan_device())
        with torch.device("meta"):
            meta = Blocks(width=29, blocks=5)
        estimate = setting.estimate(meta, stage)
        tree = plan_module(parameters_of(Tree(meta)), setting.options(stage))
        planned = plan.traffic(tree, world, shards)
        model = zero_ext.shard(
            Blocks(width=29, blocks=5),
            stage,
            mesh=replicas_of(shards),
            bucket_mb=SMALL_MB,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            accumulation_steps=2,
        )
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.01, nonfinite="raise")
        for _ in range(3):
            before = model.stats()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                mean_square(model, rank_data((4, 29), rank)).backward()
                step(model, optimizer, (4, 29), rank)
            after = model.stats()
            optimizer.zero_grad()
        for kind in KINDS:
            held = after[f"bytes_{kind}"]
            assert held == pytest.approx(estimate[kind], rel=0.03), (shards, kind)
        for what in ("reductions", "gathers"):
            assert after[what] - before[what] == getattr(planned, what), (shards, what)
        if after["neighbors"] == world - 1 and plan_device() == "cpu":
            names = Counter(e.name.split(" ")[0] for e in profiler.events())
            assert names["zero_ext::copy"] == pytest.approx(planned.messages, rel=0.03), shards


def plan_device() -> str:
    return torch.get_default_device().type


def gpt() -> nn.Module:
    """A factory; 1.3 M elements with the embedding."""
    return nn.Sequential(nn.Embedding(1083, 128), *(nn.Linear(128, 128) for _ in range(70)))


def test_the_report_has_each_stage_and_the_traffic_of_one(tmp_path, capsys):
    place = f"{__name__}:gpt"
    picture = tmp_path / "plan.png"
    plan.main([place, "--world-size", "1024", "--stage", "2", "--plot", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert "Sequential: 1,294,464 elements in 141 parameters, on 1,024 ranks" in lines[0]
    rows = {line.split("  ")[0].strip(): line.split() for line in lines if "stage " in line}
    module = plan.build(place)
    assert all(p.is_meta for p in module.parameters())
    for stage in range(4):
        estimate = zero_ext.estimate_memory(module, 1024, stage, device="cpu")
        row = rows[f"stage {stage}"]
        total = estimate["persistent"] + estimate["gathered"] + estimate["buckets"]
        assert row[2] == f"{estimate['full'] / 2**20:,.1f}" or estimate["full"] == 0
        assert row[-1] == f"{total / 2**20:,.1f}"
    options = ShardingOptions(stage=2)
    sent = plan.traffic(plan_module(parameters_of(Tree(module)), options), 1024)
    units = sent.reductions
    assert sent.messages == 1023 * (3 * units + 1)
    text = "\n".join(lines)
    assert f"{sent.messages:,} messages" in text and f"{units:,} units with gradients" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bytes_sent_are_those_of_the_gradients_and_the_parameters():
    """By hand: of fp32 elements, padding aside, (N - 1)/N are sent."""
    numel = sum(p.numel() for p in gpt().parameters())
    for stage, gathers in ((0, 0), (1, 1), (2, 1), (3, 2)):
        for world in (2, 3, 8):
            options = ShardingOptions(stage=stage, bucket_mb=0.5)
            sent = plan.traffic(plan_module(parameters_of(Tree(gpt())), options), world)
            part = 4 * numel * (world - 1) / (world if stage else 1)
            assert sent.gradient_bytes == pytest.approx(part, rel=0.02)
            assert sent.parameter_bytes <= 1.02 * gathers * part
            assert sent.parameter_bytes >= (gathers - (stage == 3)) * part


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("world", "shards", "hosts"), [(8, 8, 2), (8, 4, 4), (12, 2, 3), (12, 12, 3), (6, 6, 1)]
)
def test_bytes_between_hosts_are_those_of_the_pairs_of_ranks(stage, world, shards, hosts, capsys):
    """Each rank sends equal parts to all others, and of parameters to those of its replica."""
    plan.main(
        [
            *(f"{__name__}:gpt", f"--world-size={world}", f"--shards={shards}"),
            *(f"--hosts={hosts}", f"--stage={stage}"),
        ]
    )
    printed = capsys.readouterr().out
    options = ShardingOptions(stage=stage)
    sent = plan.traffic(plan_module(parameters_of(Tree(gpt())), options), world, shards)
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    crossing = [(a, b) for a, b in pairs if a * hosts // world == 0 != b * hosts // world]
    gradients = sent.gradient_bytes / (world - 1) * len(crossing)
    of_replica = [(a, b) for a, b in crossing if a // shards == b // shards]
    if stage == 2:  # on the way that the library takes
        host_of = [rank * hosts // world for rank in range(shards)]
        source = _C.HostRoutes(host_of).source
        of_replica = [(a, b) for a, b in of_replica if source(a, b) == a]
    parameters = sent.parameter_bytes / (shards - 1) * len(of_replica)
    leaves = plan.between_hosts(sent, stage, world, shards, hosts)
    assert leaves == pytest.approx((gradients, parameters), abs=1)
    sizes = [f"{size / 2**20:,.1f} MiB of" for size in (gradients, parameters)]
    line = f"{sizes[0]} gradients and up to {sizes[1]} parameters leave each of the {hosts} hosts."
    assert (line in printed) == (hosts > 1)
    here = min(world // hosts, shards)
    if stage == 3 and here < shards:  # each part goes once to each other host of a replica
        part = sum(p.nbytes for p in gpt().parameters()) / shards
        to_copies, kept = plan.of_host_copies(
            plan_module(parameters_of(Tree(gpt())), options), world, shards, hosts
        )
        assert kept == pytest.approx((shards - here) // here * part, rel=0.02)
        assert to_copies == pytest.approx(world // hosts * kept)
        estimates = [
            zero_ext.estimate_memory(gpt(), world, 3, shards=shards, hosts=number)["shard"]
            for number in (hosts, None)
        ]
        assert kept == estimates[0] - estimates[1]
        with pytest.raises(ValueError, match="host_copies, which are on the CPU"):
            zero_ext.estimate_memory(gpt(), world, 3, shards=shards, hosts=hosts, device="cuda")
    assert ("host_copies" in printed) == (stage == 3 and here < shards)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("torch", "'torch' names no function"),
        ("torch:no_such_name", "names no function"),
        ("torch:get_num_threads", "made a int, not a module"),
        ("torch.nn:ReLU", "made a ReLU, not a module with parameters"),
    ],
)
def test_mistakes_in_the_model_are_named(model, message, capsys):
    with pytest.raises(SystemExit):
        plan.main([model, "--world-size", "8"])
    assert message in capsys.readouterr().err


def test_mistakes_in_the_ranks_are_named(capsys):
    with pytest.raises(SystemExit):
        plan.main([f"{__name__}:gpt", "--world-size", "0"])
    assert "world_size must be at least 1" in capsys.readouterr().err


def large() -> nn.Module:
    """Each of its 8 units has 19.5 MB of fp32 values; on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2210, 2210) for _ in range(8)))


@pytest.fixture
def advice(capsys):
    def say(*arguments: str, memory: float) -> str:
        plan.main([f"{__name__}:large", *arguments, "--device-memory", f"{memory}"])
        return capsys.readouterr().out.splitlines()[-1]

    return say


def gib_of(world: int, stage: int, **others) -> float:
    """On a device."""
    found = zero_ext.estimate_memory(large(), world, stage, device="cuda", **others)
    return (found["persistent"] + found["gathered"] + found["buckets"]) / 2**30


def test_the_smallest_stage_that_fits_is_named(advice):
    sizes = [gib_of(8, stage, shards=4) for stage in range(4)]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]  # a step has one backward
    for stage in (0, 1, 3):
        said = advice("--world-size", "8", "--shards", "4", memory=1.001 * sizes[stage])
        assert said.startswith(f"the smallest stage that fits: {stage}, {sizes[stage]:.1f} GiB of")
    # Stage 1 sums locally then, and both have the copy that undoes a backward.
    several = ("--world-size", "8", "--accumulation-steps", "2")
    copy = 4 * sum(p.numel() for p in large().parameters()) / 8 / 2**30
    for stage, local in ((1, True), (2, False)):
        size = gib_of(8, stage, local_accumulation=local) + copy
        assert f"fits: {stage}, " in advice(*several, memory=1.001 * size)


def test_what_would_fit_is_named_where_no_stage_does(advice):
    policy = CPUOffloadPolicy()
    world = ("--world-size", "2")
    text = f"no stage fits: stage 3 takes {gib_of(2, 3):.1f} GiB of "
    size = gib_of(2, 3, offload_policy=policy)
    said = advice(*world, memory=1.001 * size)
    assert said.startswith(text) and f"With --offload it takes {size:.1f} GiB of" in said
    said = advice(*world, "--shards", "1", "--offload", memory=1.001 * size)
    assert "With --shards 2 it takes" in said
    size = gib_of(8, 3, offload_policy=policy)
    assert "With --world-size 8 --offload it takes" in advice(*world, memory=1.001 * size)
    assert "More ranks do not help: cut the largest" in advice(*world, memory=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shards", "3"), "shards must divide"),
        (("--device-memory", "0"), "--device-memory must be positive"),
        (("--offload", "--device", "cpu"), "--offload changes nothing with --device cpu"),
        (("--accumulation-steps", "0"), "accumulation_steps must be at least 1"),
        (("--hosts", "3"), "8 ranks in replicas of 8 cannot be on 3 hosts"),
        (("--hosts", "0"), "8 ranks in replicas of 8 cannot be on 0 hosts"),
    ],
)
def test_mistakes_in_the_settings_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        plan.main([f"{__name__}:large", "--world-size", "8", *arguments])
    assert message in capsys.readouterr().err
