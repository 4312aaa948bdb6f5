"""A script of transformers, driven by flags. It knows nothing of zero_ext."""

from dataclasses import dataclass

import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Sizes:
    width: int = 24


class Summing(Trainer):
    """A subclass, as those of other libraries."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        losses.append(self.accelerator.gather(loss.detach()).mean().item())
        return loss


sizes, arguments = HfArgumentParser((Sizes, TrainingArguments)).parse_args_into_dataclasses()
torch.manual_seed(4)
config = transformers.LlamaConfig(
    vocab_size=97,
    hidden_size=sizes.width,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = transformers.LlamaForCausalLM(config)
tokens = torch.randint(0, 97, (24, 11), generator=torch.Generator().manual_seed(5))
losses: list[float] = []
trainer = Summing(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
trainer.train()
optimizer = trainer.optimizer
