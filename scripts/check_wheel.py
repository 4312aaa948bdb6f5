"""Is a wheel of `make wheel` installed without a compiler, and does it train? Needs no network.

    python scripts/check_wheel.py WHEEL PYTHON...

Run by `make wheel-check`. Each PYTHON belongs to an environment with another torch. Beside each, a
fresh environment is made that has that torch, and on PATH nothing but its own programs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import environments

INSTALL_SECONDS = 10
TRAIN = """
import torch, torch.distributed as dist, torch.nn as nn, zero_ext
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = zero_ext.shard(nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1)), stage=3)
optimizer = zero_ext.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(83, 13)
losses = []
for _ in range(5):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True), losses
print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
"""


def processor_seconds() -> float:
    """Of the processes that have ended: other programs on this machine do not count."""
    times = os.times()
    return times.children_user + times.children_system


def check(wheel: Path, with_torch: str, folder: Path) -> None:
    programs = environments.beside(with_torch, folder / "environment")
    program = folder / "train.py"
    program.write_text(TRAIN)
    names = {"PYTHONPATH", "CXX", "CC"}
    variables = {name: value for name, value in os.environ.items() if name not in names}
    variables |= {"PATH": str(programs), "OMP_NUM_THREADS": "1"}
    # No package comes from elsewhere: torch above all stays as it is.
    variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}

    def run(*arguments: str | Path) -> None:
        subprocess.run([programs / "python", *arguments], check=True, cwd=folder, env=variables)

    # A new environment of Python 3.11 has one that is too old for torch 2.14, which brings its own.
    run("-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
    begin = processor_seconds()
    run("-m", "pip", "install", "--quiet", wheel)
    seconds = processor_seconds() - begin
    print(f"installed in {seconds:.1f} s of processor time", flush=True)
    if seconds > INSTALL_SECONDS:
        raise SystemExit(f"Installing took {seconds:.1f} s, more than {INSTALL_SECONDS} s.")
    run("-m", "zero_ext.info")
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program)


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    for with_torch in sys.argv[2:]:
        print(f"== {with_torch}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            check(wheel, with_torch, Path(folder))


if __name__ == "__main__":
    main()
