"""Data, tensor, expert, context and pipeline parallelism in one script, with ZeRO over the data
ranks.

    torchrun --standalone --nproc-per-node 4 examples/parallel.py --tp 2 --stage 3
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --pp 2 --stage 1
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --cp 2 --stage 2
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --experts 4 --ep 2 --stage 3
    torchrun --standalone --nproc-per-node 4 examples/parallel.py --tp 2 --fsdp2

Ranks that no option takes are data ranks. The losses are those of any other layout but for
roundings: each step has the same sequences. --fsdp2 trains with torch's fully_shard instead, and
--zero-fsdp with that of zero_ext.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero_ext
from zero_ext import fsdp

WIDTH, HEADS, TOKENS, LENGTH, SEQUENCES, MICRO_BATCHES = 32, 4, 64, 16, 16, 2


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


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch_of(step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This rank's sequences, and of each its part."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(0, TOKENS, (SEQUENCES, 1), generator=draw)
    tokens = (first + 7 * torch.arange(LENGTH + 1)) % TOKENS
    tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    parts = (each.chunk(mesh["cp"].size(), 1) for each in (tokens[:, :-1], tokens[:, 1:]))
    inputs, targets = (each[mesh["cp"].get_local_rank()].contiguous() for each in parts)
    return inputs, targets


def clip(model: nn.Module, mesh: DeviceMesh, max_norm: float) -> None:
    """By the norm over all pipeline stages."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


def main(*arguments: str) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tp", "ep", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="in each layer, in place of its MLP")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--zero-fsdp", action="store_true")
    parser.add_argument("--one-f-one-b", action="store_true", help="schedule of --pp, not GPipe")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments or None)
    if args.fsdp2 and args.experts:
        parser.error("--fsdp2 takes no experts: torch has no norm over both of their meshes")
    rows = dist.get_world_size() // (args.tp * args.ep * args.cp * args.pp)
    sizes = (args.pp, rows, args.ep, args.cp, args.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "rows", "ep", "cp", "tp"))
    mesh["rows", "ep"]._flatten("dp")
    shards = mesh["rows", "ep", "cp"]._flatten("shards")
    model = Model(2, mesh, args.experts)
    if args.tp > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    if args.fsdp2 or args.zero_fsdp:
        shard = fsdp.fully_shard if args.zero_fsdp else fully_shard
        for layer in model.layers:
            shard(layer, mesh=shards)
        shard(model, mesh=shards)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    else:
        expert_mesh = mesh["ep"] if args.experts and shards.size() > 1 else None
        zero_ext.shard(model, args.stage, mesh=shards, expert_mesh=expert_mesh, units=Block)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    stage = PipelineStage(
        model, mesh["pp"].get_local_rank(), args.pp, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = Schedule1F1B if args.one_f_one_b else ScheduleGPipe
    pipeline = schedule(stage, MICRO_BATCHES, loss_fn=loss_of)
    for step in range(args.steps):
        inputs, targets = batch_of(step, mesh)
        of_micro_batches: list[Tensor] = []
        if args.pp > 1:
            pipeline.step(
                *([inputs] if stage.is_first else []), target=targets, losses=of_micro_batches
            )
        else:
            for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
                loss = loss_of(model(x), y)
                (loss / MICRO_BATCHES).backward()
                of_micro_batches.append(loss.detach())
        clip(model, mesh, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(of_micro_batches).mean() if of_micro_batches else torch.zeros(())
        dist.all_reduce(total)  # the last stage's alone has a loss
        losses.append(total.item() / (dist.get_world_size() // args.pp))
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
