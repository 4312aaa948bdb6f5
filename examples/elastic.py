"""A training that has the same bits on any number of ranks, and goes on when ranks are lost.

torchrun --nproc-per-node 3 examples/elastic.py --out runs/3-ranks
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 \\
    examples/elastic.py --out runs/losing-ranks --lose 60 120 180
python -m zero_ext.diff runs/3-ranks/log.jsonl runs/losing-ranks/log.jsonl
python examples/plot_runs.py runs/3-ranks runs/losing-ranks --out elastic.svg
"""

import argparse
import itertools
import json
import os
import signal
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
from model import GPT, SIZES
from torch.utils.data import DataLoader, TensorDataset

import zero_ext

MICRO_BATCHES, BATCH_SIZE = 12, 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="ZeRO stage")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--sequence", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--text", help="file or directory; default: Python's standard library")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--lose", type=int, nargs="*", default=[], help="steps after which rank 0 is killed"
    )
    return parser.parse_args()


def mean_in_order(losses: list[float]) -> float:
    """Of all micro-batches, added as one rank would. Collective."""
    of_ranks = [losses]
    if dist.is_initialized():
        of_ranks = [losses] * dist.get_world_size()
        dist.all_gather_object(of_ranks, losses)
    rows = itertools.zip_longest(*of_ranks)
    ordered = [loss for row in rows for loss in row if loss is not None]
    return sum(ordered) / len(ordered)


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = GPT(SIZES[args.size], args.sequence).bfloat16()
    zero_ext.shard(model, stage=args.stage, reduction="exchange")
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    count = args.steps * MICRO_BATCHES * BATCH_SIZE
    dataset = TensorDataset(
        *corpus.evenly_spaced(corpus.load(args.text).train, count, args.sequence)
    )
    batches = zero_ext.data.GlobalBatches(dataset, BATCH_SIZE, MICRO_BATCHES)
    loader = DataLoader(dataset, batch_sampler=batches)
    log = zero_ext.TrainingLog(args.out / "log.jsonl")
    with zero_ext.elastic.Run(
        model, optimizer, extra={"batches": batches}, run_id=args.out.name
    ) as run:
        for step in batches.steps(loader, model):
            losses = []
            for tokens, targets in step:
                loss = model(tokens, targets)
                loss.backward()
                losses.append(loss.item())
            optimizer.step(divide_by=len(step))
            optimizer.zero_grad()
            log.write(
                step.number,
                loss=mean_in_order(losses),
                norm=optimizer.grad_norm,
                fingerprint=zero_ext.fingerprint(model, optimizer),
            )
            run.keep()
            if run.step in args.lose and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        held = zero_ext.stats(model)["bytes_held"]
    if rank == 0:
        lines = [json.loads(line) for line in (args.out / "log.jsonl").read_text().splitlines()]
        curve = {"name": args.out.name, "loss": [line["loss"] for line in lines]}
        (args.out / "log.json").write_text(json.dumps(curve | {"bytes_held": held}))
        print(f"{args.out}: {len(lines)} steps, the last loss is {lines[-1]['loss']:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
