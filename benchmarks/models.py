"""The models of the step benchmarks, and plain PyTorch's way to train them with fp32 masters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GPT_VOCABULARY = 8192
GPT_SEQUENCE = 128
GPT_BATCH = 4


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """27.6 M parameters: 12 layers, hidden 384, 8,192 tokens, output layer of its own."""

    def __init__(self, layers: int = 12, hidden: int = 384, heads: int = 6):
        super().__init__()
        self.token = nn.Embedding(GPT_VOCABULARY, hidden)
        self.position = nn.Embedding(GPT_SEQUENCE, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, GPT_VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting ``tokens`` [batch, sequence + 1] from those before."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SmallLayers(nn.Module):
    """1,083 parameters, 2.25 M elements: 541 layers of 64×64 with biases, and a scale."""

    def __init__(self, layers: int = 541, width: int = 64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * 0.1
        return (x * self.scale).float().square().mean()


def gpt_batch(generator: torch.Generator) -> Tensor:
    return torch.randint(GPT_VOCABULARY, (GPT_BATCH, GPT_SEQUENCE + 1), generator=generator)


def small_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 64, generator=generator).bfloat16()


# By name: the model, and one rank's batch for it.
MAKERS = {"GPT": (GPT, gpt_batch), "small": (SmallLayers, small_batch)}


class MasterAdamW:
    """torch's fused AdamW on fp32 copies of bf16 parameters: what DDP users write by hand."""

    def __init__(self, parameters, lr: float = 1e-4):
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()  # or they would stay through the next forward
        torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
