"""Training steps between hosts, as network namespaces of this machine: time, and bytes of a card.

    sudo python benchmarks/hosts.py [--hosts 2] [--ranks 2] [--rate 1gbit] [--results FOLDER]

Each namespace has one card, which sends --rate at most, and starts --ranks ranks; only ranks of one
namespace read each other's memory. Bytes are those that a card has sent in a step, beside those of
one bf16 ring over all ranks: 4 n (N - 1) / N for n elements and N ranks. Stages 0 to 3 are compared
with one process, bit for bit. Stage 2 runs at several learning rates, because hosts send each other
only the parameters that an update has changed. optimizer.step() is timed alone, too, beside a rate
that changes all of them. It needs root, and the commands ip and tc.
"""

import argparse
import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bench_step
import models
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext

CARD = "eth0"
PORT = 29571
COUNTED_STEPS = 3
STAGES = (0, 1, 2, 3)
SENDS_ALL = 1e-2  # a learning rate at which, with DECAY, nearly all elements change
DECAY = 10.0
LRS = (1e-6, 1e-5, 1e-3)  # beside 1e-4, of all others


def run_in_namespaces(args: argparse.Namespace, arguments: list[str]) -> int:
    """Makes the hosts, runs this program on all their ranks, and removes them again."""
    bridge = f"zx{os.getpid() % 10_000}"
    names = [f"{bridge}h{host}" for host in range(args.hosts)]
    address = lambda host: f"10.77.0.{host + 1}"  # noqa: E731
    try:
        _call(f"ip link add {bridge} type bridge")
        _call(f"ip link set {bridge} up")
        for host, name in enumerate(names):
            _call(f"ip netns add {name}")
            _call(f"ip link add {name} type veth peer name {CARD} netns {name}")
            _call(f"ip link set {name} master {bridge} up")
            inside = f"ip netns exec {name}"
            _call(f"{inside} ip address add {address(host)}/24 dev {CARD}")
            _call(f"{inside} ip link set {CARD} up")
            _call(f"{inside} ip link set lo up")
            shape = f"rate {args.rate} burst 256kb latency 50ms"
            _call(f"{inside} tc qdisc add dev {CARD} root tbf {shape}")
        runs = []
        for host, name in enumerate(names):
            launcher = f"ip netns exec {name} {sys.executable} -m torch.distributed.run"
            place = f"--nnodes {args.hosts} --node-rank {host} --nproc-per-node {args.ranks}"
            meet = f"--master-addr {address(0)} --master-port {PORT}"
            environment = {
                "GLOO_SOCKET_IFNAME": CARD,
                "OMP_NUM_THREADS": "1",
                "ZERO_EXT_CROSS_MEMORY": str(1 + host),
            }
            command = [*f"{launcher} {place} {meet}".split(), __file__, "--rank", *arguments]
            runs.append(subprocess.Popen(command, env={**os.environ, **environment}))
        codes = [run.wait() for run in runs]
        return int(any(codes))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        subprocess.run(["ip", "link", "delete", bridge], check=False)


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True)


def steps_of(model: nn.Module, batch, args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """By name: one training step of a copy of the model."""
    steps = {
        "DDP": bench_step.ddp_step(copy.deepcopy(model), batch, 1),
        "FSDP2": bench_step.fsdp_step(copy.deepcopy(model), batch, 1),
    }
    for stage in STAGES:
        steps[f"stage {stage}"] = bench_step.zero_step(copy.deepcopy(model), batch, 1, stage)
    steps["stage 3, host_copies"] = bench_step.zero_step(
        copy.deepcopy(model), batch, 1, stage=3, host_copies=True
    )
    for lr in LRS:
        steps[f"stage 2, lr {lr:g}"] = bench_step.zero_step(
            copy.deepcopy(model), batch, 1, stage=2, lr=lr
        )
    in_bf16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (args.hosts, args.ranks), mesh_dim_names=("hosts", "ranks"))
    for name, options in {
        "stage 2, collective, fp32": {},
        "stage 2, collective, bf16": {"mp_policy": in_bf16},
        "stage 2, mesh, collective, bf16": {"mp_policy": in_bf16, "mesh": mesh},
    }.items():
        steps[name] = bench_step.zero_step(
            copy.deepcopy(model), batch, 1, stage=2, reduction="collective", **options
        )
    return steps


def sent_by_the_card(step: Callable[[], float]) -> float:
    """Bytes per step, of the host that sends most."""
    counter = Path(f"/sys/class/net/{CARD}/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    for _ in range(COUNTED_STEPS):
        step()
    dist.barrier()
    sent = torch.tensor((int(counter.read_text()) - before) / COUNTED_STEPS)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return sent.item()


def changed_rows(model: nn.Module, batch, where: str) -> Iterator[report.Row]:
    """What a rank sends of its updated parameters, of all of them; the share that has changed."""
    for lr in (*LRS, 1e-4):
        one = zero_ext.shard(copy.deepcopy(model), stage=2)
        step = bench_step.training_step(
            one, zero_ext.optim.AdamW(one.parameters(), lr=lr), batch, 1
        )
        share, sent = 0.0, one.stats()["bytes_to_hosts"]
        for _ in range(COUNTED_STEPS):
            before = [p.detach().clone() for p in one.parameters()]
            step()
            changed = sum(
                int((p != old).sum()) for p, old in zip(one.parameters(), before, strict=True)
            )
            share += changed / sum(p.numel() for p in one.parameters()) / COUNTED_STEPS
        sent = torch.tensor(float(one.stats()["bytes_to_hosts"] - sent))
        dist.all_reduce(sent)
        # Each rank's part goes to one rank of each other host.
        hosts = int(os.environ["GROUP_WORLD_SIZE"])
        whole = 2 * sum(p.numel() for p in one.parameters()) * (hosts - 1)
        sent = sent.item() / COUNTED_STEPS
        yield report.Row(
            f"{where}, lr {lr:g}, {share:.1%} changed: parameters sent / all of them",
            f"{sent / 1e6:.2f} MB",
            f"{whole / 1e6:.2f} MB",
            sent / whole,
            "at most",
            1.2 * share + 1 / 16,
        )


def update_rows(batch, where: str, rounds: int) -> Iterator[report.Row]:
    """Time of optimizer.step() alone, of where all parameters change and are sent. The model is
    larger, so that its bytes weigh more than the calls of a step."""
    model = models.GPT(layers=6, hidden=256, heads=4).bfloat16()
    runs = {}
    for lr in (*LRS, 1e-4, SENDS_ALL):
        one = zero_ext.shard(copy.deepcopy(model), stage=2)
        decay = DECAY if lr == SENDS_ALL else 0.01
        runs[lr] = one, zero_ext.optim.AdamW(one.parameters(), lr=lr, weight_decay=decay)
    seconds: dict[float, list[float]] = {lr: [] for lr in runs}
    for turn in range(rounds + report.WARM_UP):
        for lr, (one, optimizer) in runs.items():
            one(batch).backward()
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            if turn >= report.WARM_UP:
                seconds[lr].append(time.perf_counter() - start)
            optimizer.zero_grad()
    steps, hosts = rounds + report.WARM_UP, int(os.environ["GROUP_WORLD_SIZE"])
    sent = torch.tensor(float(runs[SENDS_ALL][0].stats()["bytes_to_hosts"]))
    dist.all_reduce(sent)
    assert sent >= 0.99 * steps * 2 * sum(p.numel() for p in model.parameters()) * (hosts - 1)
    for lr in (*LRS, 1e-4):
        name = f"{where}, stage 2: step() alone, lr {lr:g} / lr {SENDS_ALL:g}, which sends all"
        yield report.at_most(name, seconds[lr], seconds[SENDS_ALL], None)


def check_bits(model: nn.Module) -> None:
    """Stages 0 to 3 against one process that runs all ranks' batches; two steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = [models.gpt_batch(torch.Generator().manual_seed(r)) for r in range(world)]

    def train(one: nn.Module, own: list, **options) -> str:
        zero_ext.shard(one, **options)
        one.set_gradient_divide_factor(world)
        optimizer = zero_ext.optim.AdamW(one.parameters(), lr=1e-4)
        for _ in range(2):
            for batch in own:
                one(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero_ext.fingerprint(one)

    expected = train(copy.deepcopy(model), batches, stage=2, mesh="alone")
    for options in (*({"stage": stage} for stage in STAGES), {"stage": 3, "host_copies": True}):
        actual = train(copy.deepcopy(model), batches[rank : rank + 1], **options)
        assert actual == expected, f"{options} differs from one process"


def rows(args: argparse.Namespace) -> Iterator[report.Row]:
    torch.manual_seed(0)
    model = models.GPT(args.layers, args.hidden, heads=2).bfloat16()
    check_bits(model)
    batch = models.gpt_batch(torch.Generator().manual_seed(dist.get_rank()))
    steps = steps_of(model, batch, args)
    seconds = report.alternate(steps, args.rounds, dist.barrier)
    ring = 4 * sum(p.numel() for p in model.parameters()) * (1 - 1 / dist.get_world_size())
    where = f"{args.hosts} × {args.ranks} ranks, {args.rate}"
    for name, step in steps.items():
        sent = sent_by_the_card(step)
        yield report.Row(
            f"{where}: bytes of {name} / of a bf16 ring",
            f"{sent / 1e6:.2f} MB",
            f"{ring / 1e6:.2f} MB",
            sent / ring,
            "at most",
            None,
        )
    yield from changed_rows(model, batch, where)
    yield from update_rows(batch, where, args.rounds)
    for peer in ("DDP", "FSDP2"):
        for name in steps:
            if name != peer:
                pair = f"{where}: {name} / {peer}"
                yield report.at_most(pair, seconds[name], seconds[peer], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--rate", default="1gbit", help="of a card, as tc takes it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    report.add_arguments(parser)
    args = parser.parse_args()
    name = f"hosts_{args.hosts}x{args.ranks}_{args.rate}"
    if args.rank:
        return report.write_on_rank_0(name, rows(args), args.results)
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if os.getuid() != 0 or missing:
        print("Skipped: it needs root" + "".join(f", and the command {c}" for c in missing) + ".")
        return None
    return sys.exit(run_in_namespaces(args, sys.argv[1:]))


if __name__ == "__main__":
    main()
