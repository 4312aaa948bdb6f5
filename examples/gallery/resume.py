"""A training that a scheduler may stop at any time: it goes on from its newest checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
    examples/gallery/resume.py runs/resumed
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zero_ext

SAVE_EVERY = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A function of the step: a run that goes on reads what an undisturbed one reads."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :8].argmax(1)


def main(out: str, steps: int = 20) -> nn.Module:
    # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of torchrun, or of slurm.sbatch.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = zero_ext.shard(make_model(), stage=2)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    done = 0
    newest = zero_ext.checkpoint.latest(out)  # None where there is none
    if newest is not None:
        extra = zero_ext.checkpoint.load(newest, model, optimizer)
        schedule.load_state_dict(extra["schedule"])
        done = extra["step"]
    for step in range(done, steps):
        x, y = batch_of(step, rank)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % SAVE_EVERY == 0:
            extra = {"step": step + 1, "schedule": schedule.state_dict()}
            zero_ext.checkpoint.save(f"{out}/step-{step + 1}", model, optimizer, extra=extra)
    if rank == 0:
        print(f"steps {done} to {steps}")
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main(sys.argv[1])
