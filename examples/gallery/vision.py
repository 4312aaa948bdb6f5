"""Images: BatchNorm, and torch's DistributedSampler.

torchrun --standalone --nproc-per-node 2 examples/gallery/vision.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero_ext

EPOCHS, BATCH = 3, 16


def make_dataset() -> TensorDataset:
    """Images of noise, brighter in the quarter that their class names."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(192, 3, 8, 8, generator=draw)
    classes = torch.arange(192) % 4
    for image, quarter in zip(images, classes.tolist(), strict=True):
        row, column = 4 * (quarter // 2), 4 * (quarter % 2)
        image[:, row : row + 4, column : column + 4] += 1.0
    return TensorDataset(images, classes)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4)]
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(32, 4))


def main() -> nn.Module:
    dist.init_process_group("gloo")
    dataset = make_dataset()
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    # As with DDP, forwards begin with rank 0's running statistics. Each batch is normalised alone.
    model = zero_ext.shard(make_model(), stage=2, broadcast_buffers=True)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order of the samples
        for images, classes in loader:
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    images, classes = dataset.tensors
    with torch.no_grad():  # on every rank: this forward, too, begins with rank 0's statistics
        right = (model(images).argmax(1) == classes).sum().item()
    if dist.get_rank() == 0:
        print(f"{right} of {len(classes)} images are classified correctly")
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
