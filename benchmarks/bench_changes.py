"""What ``change_token`` costs a step, and what its changes cost beside whole parameters.

    torchrun --nproc-per-node 2 benchmarks/bench_changes.py [--rounds 15] [--results FOLDER]

A step (backward and update) while a token lives, of one without. The changes of one step at a
learning rate of 1e-5 are gathered, and applied to a copy beside the time to copy all parameters.
98 of the GPT's 149 parameters have less than 5,000 elements. One parameter of 32 Mi elements shows
what applying costs without the calls of small ones.
Targets: a step 1.05, applying 2 copies. The other rows have none.
"""

import argparse

import models
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext
from zero_ext.state.receiving import digest_of

LR = 1e-5
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    report.add_arguments(parser)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = []
    make_model, make_batch = models.MAKERS["GPT"]
    for stage in (2, 3):
        torch.manual_seed(0)
        model = zero_ext.shard(make_model(), stage, mp_policy=POLICY)
        optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR)
        batch = make_batch(torch.Generator().manual_seed(dist.get_rank()))
        rows += rows_of(f"GPT, stage {stage}", model, optimizer, batch, args.rounds)
    rows.append(row_of_update(args.rounds))
    rows += [row_of_apply(share, args.rounds) for share in (0.01, 0.03)]
    if dist.get_rank() == 0:
        report.write("changes", rows, args.results)
    dist.destroy_process_group()


def rows_of(name, model, optimizer, batch, rounds) -> list:
    def step():
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    begin, end, held = token_of(model)
    # The update after the end gives up the marks.
    calls = {"begin": begin, "marked": step, "end": end, "plain": step}
    seconds = report.alternate(calls, rounds, dist.barrier)
    steps = seconds["plain"]
    rows = [
        report.at_most(f"{name}: step, token / none", seconds["marked"], steps, 1.05),
        report.at_most(f"{name}: change_token / step", seconds["begin"], steps, None),
    ]
    copy = {n: p.clone() for n, p in zero_ext.iter_full_params(model)}
    other = {n: p.clone() for n, p in copy.items()}
    begin()
    step()
    changes = [*zero_ext.iter_changed_params(model, since=held[0])]
    numel = sum(p.numel() for p in copy.values())
    share = sum(change.values.numel() for change in changes) / numel

    calls = {
        "gather": lambda: [*zero_ext.iter_changed_params(model, since=held[0])],
        "apply": lambda: zero_ext.apply_changes(copy, changes),
        "copy": lambda: copy_all(copy, other),
    }
    seconds = report.alternate(calls, rounds, dist.barrier)
    some = f"{name}, {share:.1%} of the elements"
    return [
        *rows,
        report.at_most(f"{some}: gather / step", seconds["gather"], steps, None),
        report.at_most(f"{some}: apply / copy", seconds["apply"], seconds["copy"], 2),
    ]


def row_of_update(rounds: int) -> report.Row:
    """Of step() alone, where each rank trains a model of its own: its time is the update's."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)])
    mesh = DeviceMesh("cpu", [dist.get_rank()])
    model = zero_ext.shard(model, 2, mesh=mesh, mp_policy=POLICY)
    optimizer = zero_ext.optim.AdamW(model.parameters(), lr=LR)
    begin, end, _ = token_of(model)

    def before():
        optimizer.zero_grad()
        model(torch.randn(4, 2048, dtype=torch.bfloat16)).float().square().sum().backward()
        dist.barrier()

    # The first step after the end gives up the marks.
    calls = {"begin": begin, "marked": optimizer.step, "end": end, "last": optimizer.step}
    seconds = report.alternate({**calls, "plain": optimizer.step}, rounds, before)
    name = "update of 25,165,824 elements: step(), token / none"
    return report.at_most(name, seconds["marked"], seconds["plain"], 1.05)


def token_of(model):
    """Two functions that take and give up a token of the model, and the list that holds it."""
    held = []
    return lambda: held.append(zero_ext.change_token(model)), held.clear, held


def row_of_apply(share: float, rounds: int) -> report.Row:
    copy = {"weight": torch.randn(2**25).bfloat16()}
    other = {"weight": copy["weight"].clone()}
    indices = torch.randperm(2**25)[: int(share * 2**25)].sort().values
    values = torch.randn(len(indices)).bfloat16()
    after = copy["weight"].clone()
    after[indices] = values
    digest = digest_of(after)
    change = ("weight", indices.int(), values, digest, None)
    calls = {
        "apply": lambda: zero_ext.apply_changes(copy, [change]),
        "copy": lambda: copy_all(copy, other),
    }
    seconds = report.alternate(calls, rounds, dist.barrier)
    name = f"one parameter, {share:.0%} of the elements: apply / copy"
    return report.at_most(name, seconds["apply"], seconds["copy"], 2)


def copy_all(source: dict, target: dict) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


if __name__ == "__main__":
    main()
