"""Loss curves of several runs in one picture.

python examples/plot_runs.py runs/ddp runs/stage1 runs/stage2 --out loss.svg

For the documentation, with its colors and on no background:

export MATPLOTLIBRC=docs/pictures.mplstyle
python examples/plot_runs.py runs/ddp runs/stage1 runs/stage2 --out docs/loss.svg
python examples/plot_runs.py runs/stage2 runs/stage2-muon --out docs/muon_loss.svg

States in fewer bits, three seeds each:

for states in fp32 int8; do for seed in 0 1 2; do
  torchrun --nproc-per-node 2 examples/train_lm.py --size small --states $states --seed $seed
done; done
python examples/plot_runs.py runs/stage2{,-seed1,-seed2} runs/stage2-int8{,-seed1,-seed2} \\
    --out docs/states_loss.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTHING = 0.95  # of the exponential moving average that is drawn over the raw losses


def smooth(losses: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start at zero as Adam's moments are."""
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed.append(average / (1 - SMOOTHING**step))
    return smoothed


def plot(logs: list[dict], path: Path) -> None:
    """Draws the training loss of each log, as train_lm.py writes it, against the step."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, log in enumerate(logs):
        held_out = f", held out {log['held_out_loss']:.3f}" if "held_out_loss" in log else ""
        label = f"{log['name']}{held_out}, {log['bytes_held'] / 2**20:.0f} MiB per rank"
        if len(logs) == 1:
            axes.plot(log["loss"], color=f"C{i}", alpha=0.25, linewidth=0.7)
        style = ("-", "--", ":", "-.", (0, (1, 6)))[i % 5]  # agreeing curves stay visible
        axes.plot(smooth(log["loss"]), linestyle=style, color=f"C{i}", label=label)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title="byte-level GPT")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="log.json files, or their directories")
    parser.add_argument("--out", type=Path, default=Path("loss.png"))
    args = parser.parse_args()
    files = [run / "log.json" if run.is_dir() else run for run in args.runs]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot([json.loads(file.read_text()) for file in files], args.out)


if __name__ == "__main__":
    main()
