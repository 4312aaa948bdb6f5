"""A fine-tuning loop, as it was written for DeepSpeed."""

import argparse

import deepspeed
import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, k):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(7, generator=generator)
        return x, x.sum().sign().clamp(0, 1).long()


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", required=True)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 2))
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=Data()
    )
    device = deepspeed.get_accelerator().current_device_name()
    losses = []
    for epoch in range(args.epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x.to(device)), y.to(device))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader), device=device)
        if deepspeed.comm.is_initialized():
            deepspeed.comm.all_reduce(mean)
            mean /= deepspeed.comm.get_world_size()
        losses.append(mean.item())
        engine.save_checkpoint(args.output, tag=f"epoch{epoch}", client_state={"epoch": epoch})
    _, client_state = engine.load_checkpoint(args.output)
    assert client_state["epoch"] == args.epochs - 1, client_state
    return losses, engine.global_steps, optimizer.param_groups[0]["lr"]


RESULT = main()
