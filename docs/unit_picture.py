"""Draws docs/unit.svg: a unit with its slots, ranges, pieces and runs.

MATPLOTLIBRC=docs/pictures.mplstyle python docs/unit_picture.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ALIGNMENT = 16  # elements
RANKS = 3
SLOTS = {"qkv.weight": 150, "ln.weight": 90, "up.weight": 400, "down.weight": 210}
COLORS = ["C0", "C1", "C2", "C3"]
INK = "#777c83"
ON_COLOR = {"color": "white"}
NOT_DECAYED = {"ln.weight"}  # in another parameter group
ROW = 0.62


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def box(axes, begin, end, row, **style):
    style = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.2} | style
    axes.add_patch(plt.Rectangle((begin, row), end - begin, ROW, **style))


def label(axes, begin, end, row, text, **style):
    axes.text((begin + end) / 2, row + ROW / 2, text, ha="center", va="center", **style)


def title(axes, row, text):
    axes.text(-24, row + ROW / 2, text, ha="right", va="center", fontsize=10, fontweight="bold")


def gap(axes, begin, end, row):
    if end > begin:
        box(axes, begin, end, row, hatch="/////", linewidth=0.6)


def main() -> None:
    slots, end = {}, 0
    for name, numel in SLOTS.items():
        slots[name] = (end, end + numel)
        end += aligned(numel)
    used = end
    range_numel = aligned(-(-used // RANKS))
    padded = RANKS * range_numel

    figure, axes = plt.subplots(figsize=(9.6, 3.9))
    rows = {"slots": 4.0, "ranges": 3.0, "pieces": 2.0, "runs": 1.0}

    title(axes, rows["slots"], "slots")
    title(axes, rows["ranges"], "ranges")
    title(axes, rows["pieces"], "pieces")
    title(axes, rows["runs"], "runs")
    for (name, (begin, end)), color in zip(slots.items(), COLORS, strict=True):
        after = begin + aligned(end - begin)
        box(axes, begin, end, rows["slots"], facecolor=color)
        gap(axes, end, after, rows["slots"])
        label(axes, begin, end, rows["slots"], name, fontsize=9, **ON_COLOR)
    gap(axes, used, padded, rows["slots"])

    runs = 0
    for rank in range(RANKS):
        first, last = rank * range_numel, (rank + 1) * range_numel
        box(axes, first, last, rows["ranges"], linewidth=2)
        label(axes, first, last, rows["ranges"], f"range {rank}, held by rank {rank}", fontsize=9)
        run = None  # begin, end, whether it is decayed
        drawn = []
        for (name, (begin, end)), color in zip(slots.items(), COLORS, strict=True):
            after = begin + aligned(end - begin)
            a, b, c = max(begin, first), min(end, last), min(after, last)
            if a >= b:
                continue
            box(axes, a, b, rows["pieces"], facecolor=color)
            label(axes, a, b, rows["pieces"], "piece", fontsize=8, **ON_COLOR)
            gap(axes, b, c, rows["pieces"])
            decayed = name not in NOT_DECAYED
            if run is not None and run[2] == decayed:
                run = (run[0], c, decayed)
            else:
                drawn += [run] if run is not None else []
                run = (a, c, decayed)
        for begin, end, _ in [*drawn, run]:
            runs += 1
            box(axes, begin, end, rows["runs"])
            label(axes, begin, end, rows["runs"], f"run {runs}", fontsize=8)
    for rank in range(RANKS + 1):
        at = rank * range_numel
        axes.plot(
            [at, at],
            [rows["runs"] - 0.12, rows["slots"] + ROW + 0.12],
            "--",
            color=INK,
            linewidth=1,
        )

    axes.annotate(
        "",
        (0, rows["slots"] + ROW + 0.3),
        (padded, rows["slots"] + ROW + 0.3),
        arrowprops={"arrowstyle": "<->", "color": INK},
    )
    unit = "one unit: 'layers.0', one flat index space"
    axes.text(padded / 2, rows["slots"] + ROW + 0.42, unit, ha="center", fontsize=10)
    box(axes, 0, 40, 0.2, hatch="/////", linewidth=0.6)
    notes = (
        "gap: holds zeros, so that every slot and range begins at a multiple of 64 bytes\n"
        "run: updated in one call; ln.weight is in another parameter group"
    )
    axes.text(52, 0.2 + ROW / 2, notes, va="center", fontsize=9)
    axes.set_xlim(-120, padded + 6)
    axes.set_ylim(0, 5.4)
    axes.axis("off")
    figure.savefig(
        Path(__file__).with_name("unit.svg"), bbox_inches="tight", metadata={"Date": None}
    )


main()
