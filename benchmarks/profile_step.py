"""A training of a model of models.py, for ``make profile``."""

import argparse

import models
import torch
import torch.distributed as dist

import zero_ext

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.MAKERS, default="GPT")
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_model, make_batch = models.MAKERS[args.model]
    model = zero_ext.shard(make_model().bfloat16(), args.stage)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-4)
    batch = make_batch(torch.Generator().manual_seed(dist.get_rank()))
    while True:  # zero_ext.profile ends it
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
