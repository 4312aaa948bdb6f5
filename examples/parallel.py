"""Data, tensor, expert, context and pipeline parallelism in one script, with ZeRO over the data
ranks.

    torchrun --standalone --nproc-per-node 4 examples/parallel.py --tp 2 --stage 3
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --pp 2 --stage 1
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --cp 2 --stage 2
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --experts 4 --ep 2 --stage 3
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --tp 2 --fsdp2

Ranks that no option takes are data ranks. The losses are those of any other layout but for
roundings: each step has the same sequences. --fsdp2 trains with torch's fully_shard instead, and
--zero-fsdp with that of zero_ext.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_model import TOKENS, Block, Model, apply_tensor_parallelism
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import zero_ext
from zero_ext import fsdp

LENGTH, SEQUENCES, MICRO_BATCHES = 16, 16, 2


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch_of(step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This rank's sequences, and of each its part."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(0, TOKENS, (SEQUENCES, 1), generator=draw)
    tokens = (first + 7 * torch.arange(LENGTH + 1)) % TOKENS
    tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    parts = (each.chunk(mesh["cp"].size(), 1) for each in (tokens[:, :-1], tokens[:, 1:]))
    inputs, targets = (each[mesh["cp"].get_local_rank()].contiguous() for each in parts)
    return inputs, targets


def clip(model: nn.Module, mesh: DeviceMesh, max_norm: float) -> None:
    """By the norm over all pipeline stages."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tp", "ep", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="ranks of this dimension")
    parser.add_argument("--experts", type=int, default=0, help="in each layer, in place of its MLP")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--zero-fsdp", action="store_true")
    parser.add_argument("--one-f-one-b", action="store_true", help="schedule of --pp, not GPipe")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(given or None)
    if args.experts and (args.fsdp2 or args.zero_fsdp):
        parser.error("experts need one norm over both of their meshes, which fully_shard has not")
    return args


def make_mesh(args: argparse.Namespace) -> DeviceMesh:
    """``dp``: the ranks with sequences of their own; ``shards``: those that average gradients."""
    rows = dist.get_world_size() // (args.tp * args.ep * args.cp * args.pp)
    sizes = (args.pp, rows, args.ep, args.cp, args.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "rows", "ep", "cp", "tp"))
    mesh["rows", "ep"]._flatten("dp")
    mesh["rows", "ep", "cp"]._flatten("shards")
    return mesh


def shard(model: Model, mesh: DeviceMesh, args: argparse.Namespace) -> torch.optim.Optimizer:
    shards = mesh["shards"]
    if args.fsdp2 or args.zero_fsdp:
        call = fsdp.fully_shard if args.zero_fsdp else fully_shard
        for layer in model.layers:
            call(layer, mesh=shards)
        call(model, mesh=shards)
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    expert_mesh = mesh["ep"] if args.experts and shards.size() > 1 else None
    zero_ext.shard(model, args.stage, mesh=shards, expert_mesh=expert_mesh, units=Block)
    return zero_ext.optim.AdamW(model.parameters(), lr=0.01)


def run_micro_batches(model: Model, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    losses = []
    for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        losses.append(loss_of(model(x), y))
        (losses[-1] / MICRO_BATCHES).backward()
    return losses


def main(*given: str) -> list[float]:
    args = arguments(*given)
    mesh = make_mesh(args)
    model = Model(2, mesh, args.experts)
    if args.tp > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    optimizer = shard(model, mesh, args)
    place, group = mesh["pp"].get_local_rank(), mesh.get_group("pp")
    stage = PipelineStage(model, place, args.pp, torch.device("cpu"), group=group)
    schedule = Schedule1F1B if args.one_f_one_b else ScheduleGPipe
    pipeline = schedule(stage, MICRO_BATCHES, loss_fn=loss_of)
    losses: list[float] = []
    for step in range(args.steps):
        inputs, targets = batch_of(step, mesh)
        of_micro_batches: list[Tensor] = []
        if args.pp > 1:
            first = [inputs] if stage.is_first else []
            pipeline.step(*first, target=targets, losses=of_micro_batches)
        else:
            of_micro_batches = run_micro_batches(model, inputs, targets)
        clip(model, mesh, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(of_micro_batches).mean() if of_micro_batches else torch.zeros(())
        dist.all_reduce(total.detach_())  # the last stage's alone has a loss
        losses.append(total.item() / (dist.get_world_size() // args.pp))
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
