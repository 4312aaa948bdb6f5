"""What is trained with DeepSpeed and here: a model, its groups, a configuration, data.

As a program it writes the checkpoints of tests/deepspeed/checkpoints, with DeepSpeed on two ranks:

    torchrun --standalone --nproc-per-node 2 tests/support/deepspeed_models.py FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS = 2
MICROS = 2  # of each rank
STEPS = 3  # before the checkpoint is written, and as many after it
KINDS = {"stage1_fp16": (1, "fp16"), "stage2_bf16": (2, "bf16"), "stage3_fp16": (3, "fp16")}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Odd(nn.Module):
    """Sizes that no number of ranks divides; a buffer, a frozen and a tied parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.register_buffer("seen", torch.zeros(3))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Linear(13, 13, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.last = nn.Linear(13, 13)
        self.tied = nn.Linear(13, 13, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        x = self.norm(self.first(x)) * self.scale
        return self.tied(torch.tanh(self.last(torch.tanh(self.frozen(x)))))


def groups_of(model: nn.Module) -> list[dict]:
    """Two groups, the first with the frozen parameter."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def config_of(stage: int, precision: str) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0.05,  # always: DeepSpeed halves gradients when its scale grows
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.8, 0.9], "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.02, "warmup_type": "linear"},
        },
        # Several parts of a group with stage 3.
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 4}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def batch(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 7, generator=generator).to(dtype)


def train(engine, steps, dtype: torch.dtype, order) -> list[float]:
    """The losses of the micro-batches (micro, rank) of ``order``, in each step."""
    losses = []
    for step in steps:
        for micro, rank in order:
            loss = engine(batch(step, micro, rank, dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def write_checkpoint(folder: Path, stage: int, precision: str) -> None:
    """Train with DeepSpeed, and write a checkpoint and what DeepSpeed does after it. Collective."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    get_accelerator().is_fp16_supported = lambda: True
    model = Odd()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=config_of(stage, precision)
    )
    order = [(micro, dist.get_rank()) for micro in range(MICROS)]
    train(engine, range(STEPS), DTYPES[precision], order)

    def values():
        named = engine.module.named_parameters()
        return {n: safe_get_full_fp32_param(p).clone() for n, p in named if p.requires_grad}

    expected = {"values": values(), "scale": float(engine.optimizer.cur_scale)}
    if stage == 3:  # the others do not show them
        for state in ("exp_avg", "exp_avg_sq"):
            expected[state] = {
                n: safe_get_full_optimizer_state(p, state).clone()
                for n, p in engine.module.named_parameters()
                if p.requires_grad
            }
    engine.save_checkpoint(folder, client_state={"epoch": 3, "note": [1, "x"]})
    losses = train(engine, range(STEPS, 2 * STEPS), DTYPES[precision], order)
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, losses)
    expected |= {"losses": of_all, "later": values(), "later_scale": engine.optimizer.cur_scale}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
        for script in folder.glob("*.py"):  # of DeepSpeed's, copies of its package
            script.unlink()
    dist.barrier()


if __name__ == "__main__":
    import deepspeed

    deepspeed.init_distributed("gloo")
    for name, kind in KINDS.items():
        target = Path(sys.argv[1]) / name
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        write_checkpoint(target, *kind)
