"""Where the time of a training step goes: a Chrome trace of each rank, and one page.

    torchrun --nproc-per-node 2 benchmarks/profile_step.py --stage 2 --out build/profile

The traces, rank0.json and so on, are for chrome://tracing or ui.perfetto.dev. The page, page.png,
shows compute, reduction, gathers and waits in time and by unit, the exposed communication, and
which rank the others waited for. "wait" is waiting for another rank, "copy" is reading what it
has sent. Together with "gather" they are the exposed communication.
"""

import argparse
from pathlib import Path

import models
import profile_page
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import zero_ext

WARM_UP = 3  # steps


def training_step(model, optimizer, batch) -> None:
    with record_function(profile_page.STEP):
        with record_function("forward"):
            loss = model(batch)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
        with record_function("zero_grad"):
            optimizer.zero_grad()
        with record_function("loss"):
            loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.MAKERS, default="GPT")
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/profile"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    make_model, make_batch = models.MAKERS[args.model]
    model = zero_ext.shard(make_model().bfloat16(), args.stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    batch = make_batch(torch.Generator().manual_seed(rank))
    for _ in range(WARM_UP):
        training_step(model, optimizer, batch)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training_step(model, optimizer, batch)  # the first one starts the profiler's own work
        for _ in range(args.steps):
            training_step(model, optimizer, batch)
    args.out.mkdir(parents=True, exist_ok=True)
    trace = args.out / f"rank{rank}.json"
    profiler.export_chrome_trace(str(trace))
    mine = profile_page.analyse(profile_page.read(trace, skipped=1))
    profiles = [None] * world
    dist.all_gather_object(profiles, mine)
    if rank == 0:
        title = f"{args.model}, stage {args.stage}, {world} ranks"
        profile_page.draw(profiles, title, args.out / "page.png")
        print(profile_page.summary(profiles))
        print(f"{args.out / 'page.png'}, {args.out / 'rank0.json'} …")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
