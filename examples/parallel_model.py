"""A small transformer whose parts know on which ranks they compute, and its plan of tensor
parallelism. Nothing in it knows about ZeRO; parallel.py trains it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, TOKENS = 32, 4, 64


class Attention(nn.Module):
    """Causal. Where ``context`` cuts the sequence, its ranks gather keys and values."""

    def __init__(self, context: DeviceMesh):
        super().__init__()
        self.context = context
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(2, (-1, WIDTH // HEADS)) for each in (self.q, self.k, self.v))
        ranks, rank = self.context.size(), self.context.get_local_rank()
        if ranks > 1:
            k, v = (all_gather_tensor_autograd(each, 1, self.context) for each in (k, v))
        begin, end = rank * q.shape[1], k.shape[1]
        seen = torch.arange(end) <= torch.arange(begin, begin + q.shape[1])[:, None]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Each token goes to one of ``count``. Each rank of ``mesh`` has some of them."""

    def __init__(self, count: int, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.router = mesh, nn.Linear(WIDTH, count, bias=False)
        up, down = (torch.randn(count, *s) / 8 for s in ((WIDTH, WIDTH), (WIDTH, WIDTH)))
        self.up, self.down = (
            nn.Parameter(distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None))
            for w in (up, down)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order, group = torch.argsort(chosen, stable=True), self.mesh.get_group()
        sent = torch.bincount(chosen, minlength=self.router.out_features)
        sent = sent.view(self.mesh.size(), -1)  # to each rank, for each of its experts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        from_each, to_each = received.sum(1).tolist(), sent.sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], from_each, to_each, group)
        up, down = (w.to_local() for w in (self.up, self.down) if isinstance(w, DTensor))
        done = [
            F.silu(part @ up[k % len(up)]) @ down[k % len(up)]
            for k, part in enumerate(here.split(received.flatten().tolist()))
        ]
        back = all_to_all_single_autograd(torch.cat(done), to_each, from_each, group)
        mixed = torch.zeros_like(tokens).index_copy(0, order, back)
        return (weight.unsqueeze(1) * mixed).view_as(x)


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh, experts: int):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention(mesh["cp"])
        self.mlp_norm, self.mlp = (
            nn.RMSNorm(WIDTH),
            Experts(experts, mesh["ep"]) if experts else MLP(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """The layers of one pipeline stage; the first one embeds tokens, the last one has the head."""

    def __init__(self, layers: int, mesh: DeviceMesh, experts: int = 0):
        super().__init__()
        stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
        torch.manual_seed(0)  # alike on all ranks; other stages' layers are thrown away
        embedding, norm = nn.Embedding(TOKENS, WIDTH), nn.RMSNorm(WIDTH)
        blocks = [Block(mesh, experts) for _ in range(layers)]
        head = nn.Linear(WIDTH, TOKENS, bias=False)
        begin, end = stage * layers // stages, (stage + 1) * layers // stages
        self.embedding = embedding if stage == 0 else None
        self.layers = nn.ModuleList(blocks[begin:end])
        self.norm = norm if stage == stages - 1 else None
        self.head = head if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def apply_tensor_parallelism(model: Model, tp: DeviceMesh) -> None:
    """Columns, then rows; between them the sequence is cut, and norms sum their gradients."""
    cut, whole = Shard(1), Replicate()
    plan: dict = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=whole, output_layouts=cut)
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=cut, output_layouts=whole)
    parallelize_module(model, tp, plan)
    of_layer = {
        **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()),
        "attention": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), ColwiseParallel()),
        **dict.fromkeys(("attention.o", "mlp.down"), RowwiseParallel(output_layouts=cut)),
        "mlp.up": ColwiseParallel(input_layouts=cut),
    }
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):  # which all of these ranks compute alike
            before = PrepareModuleInput(
                input_layouts=cut, desired_input_layouts=whole, use_local_output=True
            )
            after = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut)
            parallelize_module(layer.mlp, tp, before)
            parallelize_module(layer.mlp, tp, after)
        parallelize_module(layer, tp, of_layer)
