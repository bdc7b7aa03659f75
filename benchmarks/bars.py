"""Stacked bars: extra time of each system by part, one panel per pair of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.amortised import COLUMNS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, table: Sequence[Row], *, title: str) -> None:
    """Write a PNG.

    Args:
        path: File to write.
        table: Rows of all systems at all intervals; the baseline's are all zero and not drawn.
        title: Above the panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    intervals = list(dict.fromkeys((row.factor, row.inverse) for row in table))
    figure, axes = pyplot.subplots(
        1, len(intervals), figsize=(4.2 * len(intervals), 4.8), layout="constrained", squeeze=False
    )
    try:
        for axis, pair in zip(axes[0], intervals, strict=True):
            chosen = [row for row in table if (row.factor, row.inverse) == pair]
            _panel(axis, [row for row in chosen if any(row.parts.values())])
            axis.set_title(f"factors every {pair[0]}, inverses every {pair[1]} steps", fontsize=9)
        axes[0][0].set_ylabel("extra time over AdamW (AdamW steps)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _panel(axis: Axes, table: Sequence[Row]) -> None:
    places = range(len(table))
    above, below = [0.0] * len(table), [0.0] * len(table)
    for name in COLUMNS:
        values = [row.parts[name] for row in table]
        # Optimizer type KFAC spares AdamW's work on its layers: its rest may be negative.
        bottoms = [
            up if value >= 0 else down for value, up, down in zip(values, above, below, strict=True)
        ]
        axis.bar(places, values, bottom=bottoms, width=0.7, label=name)
        for i, value in enumerate(values):
            if value >= 0:
                above[i] += value
            else:
                below[i] += value
    totals = [row.extra for row in table]
    axis.scatter(places, totals, color="black", marker="_", s=120, zorder=3, label="total")
    for place, total, top in zip(places, totals, above, strict=True):
        where = (place, max(top, total))
        axis.annotate(f"{total:.2f}", where, ha="center", va="bottom", fontsize=8)
    axis.axhline(0.0, color="black", linewidth=0.8)
    names = [row.system for row in table]
    axis.set_xticks(list(places), names, rotation=40, ha="right", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.margins(y=0.1)
