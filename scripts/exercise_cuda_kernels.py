"""Every CUDA kernel over short ranges: compute-sanitizer would take hours for the tests."""

import torch

import zero_ext
from zero_ext import _C, ops


def exercise(numel: int, dtype: torch.dtype, offset: int) -> None:
    def data(kind=torch.float32):
        return torch.rand(numel + offset, device="cuda").to(kind)[offset:]

    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    grads, total = [data(dtype) for _ in range(5)], data()
    for fresh in [False, True]:
        ops.accumulate_(grads[0], total, 0.3, fresh=fresh, nonfinite=flag)
        ops.accumulate_ranks_(grads, total, 0.3, fresh=fresh, nonfinite=flag)
        pieces = list(grads[0].tensor_split(70)), list(total.tensor_split(70))
        ops.accumulate_list_(*pieces, 0.3, fresh=fresh, nonfinite=flag)
    for target in [torch.float32, torch.bfloat16, torch.float16]:
        flat = data(target)
        ops.cast_(grads[0], flat)
        for add in [False, True]:
            ops.flatten_([grads[1]], flat, [0], add=add, nonfinite=flag)
    steps_done = torch.zeros(1, device="cuda")
    factor = torch.ones(1, device="cuda")
    for number in [
        {"step": 3},
        {"steps_done": steps_done, "skip": flag, "grad_factor": factor},
    ]:
        state = [data(), data(dtype), data(), data(), data(), data()]
        ops.adamw_(*state, lr=0.1, weight_decay=0.1, **number)
        halves = [data(torch.bfloat16), data(torch.bfloat16)]
        ops.adamw_(*state[:3], *halves, lr=0.1, weight_decay=0.1, **number)
        codes = [data().to(torch.int8), data().to(torch.uint8)]
        scales = [torch.ones(-(-numel // 256), device="cuda") for _ in codes]
        ops.adamw_(*state[:3], *codes, lr=0.1, weight_decay=0.1, scales=scales, **number)
        number.pop("step", None)
        ops.sgd_(*state[:4], lr=0.1, momentum=0.9, **number)
    ops.find_nonfinite_([total], flag)
    _C.square_digits(total)
    ops.adopt_writes_(grads[0], total)


for numel in [1, 9, 4097, 30_001]:
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        for offset in [0, 1]:
            exercise(numel, dtype, offset)
# The one that ops do not reach: the factor that clips.
model = torch.nn.Linear(7, 13, device="cuda")
optimizer = zero_ext.optim.AdamW(model.parameters(), max_grad_norm=0.01)
model(torch.rand(3, 7, device="cuda")).sum().backward()
optimizer.step()
torch.cuda.synchronize()
print("every kernel ran")
