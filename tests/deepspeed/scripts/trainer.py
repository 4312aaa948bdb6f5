"""A Trainer with a DeepSpeed file, as it was written for DeepSpeed."""

import sys

import torch
import transformers
from transformers import Trainer, TrainingArguments


def main():
    file, output = sys.argv[1:]
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 97, (24, 11), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output,
        deepspeed=file,
        bf16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=3,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(output)
    return trainer


RESULT = main()
