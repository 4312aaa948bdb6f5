"""A byte-level GPT: plain PyTorch, nothing in it knows about ZeRO."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one entry per byte value


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int


SIZES = {
    "tiny": Shape(layers=2, hidden=64, heads=2),  # 0.1 M parameters: tests
    "small": Shape(layers=4, hidden=256, heads=4),  # 3 M
    "base": Shape(layers=6, hidden=384, heads=6),  # 11 M
    "medium": Shape(layers=8, hidden=512, heads=8),  # 25 M
    "large": Shape(layers=12, hidden=768, heads=12),  # 85 M, as GPT-2
}


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.attention_out = nn.Linear(shape.hidden, shape.hidden)
        self.mlp_norm = nn.LayerNorm(shape.hidden)
        self.mlp_in = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.mlp_out = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, sequence, hidden], as is the result."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, shape: Shape, max_sequence: int):
        super().__init__()
        self.max_sequence = max_sequence
        self.token = nn.Embedding(VOCABULARY, shape.hidden)
        self.position = nn.Embedding(max_sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        self.apply(_initialize)
        # Keeps the variance of the residual stream independent of the depth, as in GPT-2.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, sequence, 256] in fp32; given ``targets``, the mean loss in nats per byte.

        Args:
            tokens: [batch, sequence], int64.
            targets: [batch, sequence], int64, the byte after each token.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, generator: torch.Generator) -> bytes:
        """``prompt`` and ``length`` sampled bytes after it, at temperature 0.8."""
        text = list(prompt)
        for _ in range(length):
            tokens = torch.tensor([text[-self.max_sequence :]], device=self.device)
            probabilities = F.softmax(self(tokens)[0, -1] / 0.8, dim=-1)
            text.append(int(torch.multinomial(probabilities.cpu(), 1, generator=generator)))
        return bytes(text)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
