"""A model that is built in pieces, as it was written for DeepSpeed."""

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, size=7):
        super().__init__()
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return self.head(x)


def main():
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    rank = deepspeed.comm.get_rank() if deepspeed.comm.is_initialized() else 0
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model.head.weight, 0.125)
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=CONFIG)
    head = safe_get_full_fp32_param(engine.module.head.weight)
    losses = []
    for step in range(24):
        generator = torch.Generator().manual_seed(10 * (step % 4) + rank)
        x = torch.randn(4, 7, generator=generator)
        loss = (engine(x).squeeze(1) - x.sum(1)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        norm = sum(p.detach().pow(2).sum().item() for p in engine.module.parameters())
    engine.destroy()
    return losses, head, norm


RESULT = main()
