"""Transformers' Trainer: another import, and the stage.   pip install ".[integrations]"

torchrun --standalone --nproc-per-node 2 examples/gallery/trainer.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from zero_ext.integrations.transformers import Trainer

TOKENS, LENGTH = 17, 24


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def make_dataset() -> list[dict[str, torch.Tensor]]:
    """Sequences in which each token tells the next one."""
    draw = torch.Generator().manual_seed(0)
    sequences = (torch.randint(TOKENS, (96, 1), generator=draw) + 3 * torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def main() -> Trainer:
    arguments = TrainingArguments(
        "runs/trainer",
        per_device_train_batch_size=4,
        max_steps=12,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(make_model(), arguments, train_dataset=make_dataset(), stage=3)
    result = trainer.train()
    if dist.get_rank() == 0:
        steps, loss = result.global_step, result.training_loss
        print(f"{steps} steps, mean loss of rank 0's samples: {loss:.4f}")
    return trainer


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
