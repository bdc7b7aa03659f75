"""One picture per training command: loss over steps and loss over time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.report import RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("tab:gray", "tab:blue", "tab:orange", "tab:green")
SMOOTHING = 0.9


def smooth(values: Sequence[float], decay: float = SMOOTHING) -> list[float]:
    """Exponential moving average without the bias of its start."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total = decay * total + value
        weight = decay * weight + 1.0
        result.append(total / weight)
    return result


def draw(path: Path, runs: Sequence[RunLog], *, title: str) -> None:
    """Write a PNG with two panels: loss over steps, loss over training time.

    Args:
        path: file to write.
        runs: the curves; the first is what the others are compared with.
        title: above both panels.
    """
    import matplotlib

    matplotlib.use("Agg")  # a training job has no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    try:
        for axis, unit in zip(axes, ("steps", "seconds"), strict=True):
            _panel(axis, runs, unit)
        axes[0].set_ylabel("loss (nats per byte)")
        figure.suptitle(title)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _panel(axis: "Axes", runs: Sequence[RunLog], unit: str) -> None:
    colors = COLORS[1:] if len(runs) == 1 else COLORS
    spans = []
    for run, color in zip(runs, colors, strict=False):
        rows = [(float(row.step if unit == "steps" else row.seconds), row) for row in run.rows]
        trained = [(x, row.train_loss) for x, row in rows if row.train_loss is not None]
        measured = [(x, row.val_loss) for x, row in rows if row.val_loss is not None]
        x, losses = zip(*trained, strict=True)
        curve = smooth(losses)
        axis.plot(x, curve, color=color, alpha=0.3, linewidth=1, label=f"{run.name}, training")
        x, losses = zip(*measured, strict=True)
        label = f"{run.name}, validation (final {run.final_loss:.4f})"
        axis.plot(x, losses, color=color, marker="o", markersize=3, label=label)
        spans.append((min(*losses, curve[-1]), losses[1]))
    if len(runs) > 1:
        label = f"{runs[0].name}'s final loss"
        axis.axhline(runs[0].final_loss, color="black", linestyle=":", linewidth=1, label=label)
    _zoom(axis, spans)
    axis.set_xlabel("optimizer steps" if unit == "steps" else "training time (s)")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=8)


def _zoom(axis: "Axes", spans: Sequence[tuple[float, float]]) -> None:
    """Show from the lowest loss to the first validation after the start.

    The untrained model's loss would squeeze the interesting part into a strip.
    """
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    if math.isfinite(low) and math.isfinite(high) and high > low:
        margin = 0.08 * (high - low)
        axis.set_ylim(low - margin, high + 4 * margin)
