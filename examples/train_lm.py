"""Trains a byte-level GPT with zero_ext, or with plain PyTorch to compare.

torchrun --nproc-per-node 2 examples/train_lm.py --stage 2
torchrun --nproc-per-node 2 examples/train_lm.py --ddp
torchrun --nproc-per-node 4 examples/train_lm.py --stage 3 --resume runs/stage2/step-500
python examples/train_lm.py --size tiny --steps 100
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import baseline
import corpus
import torch
import torch.distributed as dist
from model import GPT, SIZES
from torch import Tensor
from tqdm import tqdm

HELD_OUT_WINDOWS = 256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--ddp", action="store_true", help="plain PyTorch instead of zero_ext")
    parser.add_argument(
        "--optimizer", default="adamw", choices=("adamw", "muon"), help="of the hidden matrices"
    )
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--text", help="file or directory; default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=700)
    parser.add_argument(
        "--accumulation-steps", type=positive, default=1, help="micro-batches per step"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=4, help="sequences per micro-batch, rank"
    )
    parser.add_argument("--sequence", type=positive, default=128, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "int8"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the parameters")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each rank")
    parser.add_argument("--out", type=Path, help="default: runs/stage<N> or runs/ddp")
    parser.add_argument(
        "--checkpoint-every", type=positive, metavar="STEPS", help="to OUT/step-<N>"
    )
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from there")
    arguments = parser.parse_args()
    if arguments.ddp and (arguments.checkpoint_every or arguments.resume):
        parser.error("--ddp is there to compare with, and has no checkpoints")
    if arguments.ddp and arguments.optimizer != "adamw":
        parser.error("--ddp is there to compare with, and has AdamW alone")
    arguments.name = "ddp" if arguments.ddp else f"stage{arguments.stage}"
    if arguments.optimizer != "adamw":
        arguments.name += f"-{arguments.optimizer}"
    if arguments.states != "fp32":
        arguments.name += f"-{arguments.states}"
    if arguments.seed != 0:
        arguments.name += f"-seed{arguments.seed}"
    arguments.out = arguments.out or Path("runs") / arguments.name
    if arguments.text is not None and not Path(arguments.text).exists():
        parser.error(f"--text {arguments.text} does not exist")
    if arguments.out.is_file():
        parser.error(f"--out {arguments.out} is a file, not a directory")
    return arguments


def shard(model: GPT, args: argparse.Namespace):
    """The model and its optimizers, distributed over the ranks. ZeRO is these lines."""
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if args.ddp:
        return baseline.distribute(model), [baseline.MasterAdamW(model.parameters(), **adamw)]
    import zero_ext

    model = zero_ext.shard(model, stage=args.stage, accumulation_steps=args.accumulation_steps)
    adamw["state_dtype"] = args.states
    if args.optimizer == "adamw":
        return model, [zero_ext.optim.AdamW(model.parameters(), **adamw)]
    groups = zero_ext.optim.muon_groups(model)
    # A larger rate than AdamW's: an orthogonalised update has no large elements.
    muon = {"lr": 4 * args.lr, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return model, [
        zero_ext.optim.Muon(groups.muon, **muon),
        zero_ext.optim.AdamW(groups.adamw, **adamw),
    ]


def save_checkpoint(args: argparse.Namespace, model, optimizers, schedulers, log: dict) -> None:
    import zero_ext

    extra = {"schedulers": [each.state_dict() for each in schedulers], "log": log}
    path = args.out / f"step-{len(log['loss'])}"
    zero_ext.checkpoint.save(path, model, optimizers, extra=extra)


def load_checkpoint(args: argparse.Namespace, model, optimizers, schedulers) -> dict:
    """Returns the log of the steps that were made."""
    import zero_ext

    extra = zero_ext.checkpoint.load(args.resume, model, optimizers)
    for scheduler, state in zip(schedulers, extra["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    return extra["log"] | {"bytes_held": 0}  # which were those of other ranks, or another stage


def clip_gradients(model: GPT, optimizers: list[torch.optim.Optimizer]) -> Tensor:
    if isinstance(optimizers[0], baseline.MasterAdamW):
        return optimizers[0].clip_grad_norm_(1.0)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def bytes_held(model: GPT, optimizers: list[torch.optim.Optimizer]) -> int:
    if isinstance(optimizers[0], baseline.MasterAdamW):
        return optimizers[0].bytes_held()
    import zero_ext

    return zero_ext.stats(model)["bytes_held"]


def warm_up_then_cosine(optimizer: torch.optim.Optimizer, steps: int):
    warm_up = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def train(model, optimizers, text: Tensor, args: argparse.Namespace, rank: int, world: int) -> dict:
    """Runs all steps and returns the log."""
    schedulers = [warm_up_then_cosine(optimizer, args.steps) for optimizer in optimizers]
    data = torch.Generator().manual_seed(1_000_003 * args.seed + rank)  # every rank reads its own
    step_bytes = world * args.accumulation_steps * args.batch_size * args.sequence
    log: dict[str, Any] = {"loss": [], "gradient_norm": [], "seconds": []}
    if args.resume:
        log = load_checkpoint(args, model, optimizers, schedulers)
    done = len(log["loss"])
    if done >= args.steps:
        raise SystemExit(f"--resume {args.resume} has made {done} steps: give more --steps")
    for _ in range(done * args.accumulation_steps):  # what was read before
        corpus.sample(text, args.batch_size, args.sequence, data)
    progress = tqdm(total=args.steps, initial=done, unit="step", disable=rank != 0, mininterval=1.0)
    start = time.perf_counter() - (log["seconds"][-1] if done else 0.0)
    for step in range(done, args.steps):
        total_loss = torch.zeros((), device=text.device)
        for _ in range(args.accumulation_steps):
            tokens, targets = corpus.sample(text, args.batch_size, args.sequence, data)
            loss = model(tokens, targets)
            (loss / args.accumulation_steps).backward()
            total_loss += loss.detach() / args.accumulation_steps
            if args.ddp:
                optimizers[0].accumulate()
        norm = clip_gradients(model, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        log["bytes_held"] = log.get("bytes_held") or bytes_held(model, optimizers)  # with gradients
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            scheduler.step()

        log["loss"].append(mean_over_ranks(total_loss))
        log["gradient_norm"].append(float(norm))
        log["seconds"].append(time.perf_counter() - start)
        speed = (step + 1) * step_bytes / log["seconds"][-1]
        progress.set_postfix_str(
            f"loss {log['loss'][-1]:.3f}, {speed:,.0f} tokens/s, "
            f"{log['bytes_held'] / 2**20:.1f} MiB/rank",
            refresh=False,
        )
        progress.update()
        if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
            save_checkpoint(args, model, optimizers, schedulers, log)
    progress.close()
    log["tokens_per_second"] = args.steps * step_bytes / log["seconds"][-1]
    return log


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, sequence: int, rank: int, world: int) -> float:
    """Mean nats per byte over fixed windows; each rank takes its share of them."""
    tokens, targets = corpus.evenly_spaced(text, HELD_OUT_WINDOWS, sequence)
    losses = [
        model(x, y) * len(x) / HELD_OUT_WINDOWS
        for x, y in zip(tokens[rank::world].split(8), targets[rank::world].split(8), strict=True)
    ]
    return mean_over_ranks(world * torch.stack(losses).sum())


def save(log: dict, out: Path) -> None:
    from plot_runs import plot

    out.mkdir(parents=True, exist_ok=True)
    (out / "log.json").write_text(json.dumps(log, default=str))
    plot([log], out / "loss.png")


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    texts = corpus.load(args.text)
    torch.manual_seed(args.seed)
    gpt = GPT(SIZES[args.size], args.sequence).to(device, DTYPES[args.dtype])
    model, optimizers = shard(gpt, args)
    if rank == 0:
        count = sum(p.numel() for p in gpt.parameters())
        print(f"{args.name}: {world} ranks, {count:,} parameters in {args.dtype}, ", end="")
        print(f"{len(texts.train):,} bytes of text, {len(texts.held_out):,} held out")

    log = train(model, optimizers, texts.train.to(device), args, rank, world)
    held_out = texts.held_out.to(device)
    log["held_out_loss"] = held_out_loss(gpt, held_out, args.sequence, rank, world)
    # On every rank: with stage 3 each holds a part of the parameters.
    sampled = gpt.generate(b"def ", 200, torch.Generator().manual_seed(args.seed))
    if rank == 0:
        log |= {"name": args.name, "world": world, "arguments": vars(args)}
        log["sample"] = sampled.decode(errors="replace")
        save(log, args.out)
        print(f"\n{log['sample']}\n")
        print(f"held-out loss {log['held_out_loss']:.3f} nats per byte")
        print(f"{log['tokens_per_second']:,.0f} tokens/s, {log['bytes_held']:,} bytes per rank")
        print(f"curve, log: {args.out}/loss.png, {args.out}/log.json")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
