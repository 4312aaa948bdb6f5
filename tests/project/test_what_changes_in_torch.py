"""docs/what_changes_in_torch.md names what zero_ext changes in torch. undo() takes it back."""

import json
import re
import subprocess
import sys

from test_rooms import ROOT

# Prints what has changed since before shard(): after a step, and after undo().
PROGRAM = """
import json, sys, types
import torch
# Names that appear with these have not changed.
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, zero_ext
# These change themselves when they are first used.
torch.autograd.profiler.profile().__enter__().__exit__(None, None, None)
for kind in (torch.optim.SGD, torch.optim.RMSprop):
    kind([torch.nn.Parameter(torch.zeros(1))])

KINDS = (types.FunctionType, types.BuiltinFunctionType, type, list, property, classmethod)

def names():
    found = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "torch"]:
        owners = {module.__name__: module}
        owners |= {f"{k.__module__}.{k.__qualname__}": k for k in vars(module).values()
                   if isinstance(k, type)}
        for prefix, owner in owners.items():
            for name, value in vars(owner).items():
                if isinstance(value, KINDS):
                    found[f"{prefix}.{name}"] = value, list(value) if type(value) is list else None
    hooks = [i for i in vars(torch.nn.modules.module).items() if isinstance(i[1], dict)]
    found |= {f"hooks {n}": (v, list(v)) for n, v in hooks}
    for name, value in torch._dynamo.config.get_config_copy().items():
        found[f"torch._dynamo.config.{name}"] = value, None
    return found

def changed():
    after = names()
    both = [name for name in before if name in after]
    same = lambda a, b: a is b or (not callable(a) and a == b)
    return [n for n in both if not all(map(same, before[n], after[n]))]

before = names()
model = zero_ext.shard(torch.nn.Linear(7, 5), 3, mesh="alone")
from zero_ext.fsdp import fully_shard
fully_shard(torch.nn.Linear(7, 5))
optimizer = zero_ext.optim.wrap(torch.optim.RMSprop, model.parameters())
model(torch.ones(3, 7)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
made = changed()
zero_ext._torch.undo()
print(json.dumps([made, changed()]))
"""


def test_the_page_lists_all_changes_and_they_are_undone():
    page = (ROOT / "docs/what_changes_in_torch.md").read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`torch[^|]*)\|", page, re.M)
        for name in re.findall(r"`([^`]+)`", row)
    }
    program = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    made, left = json.loads(told.stdout.splitlines()[-1])
    assert sorted(made) == sorted(listed)
    assert left == []
