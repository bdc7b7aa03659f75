"""Tables and bar charts that the smaller benchmarks share."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Sequence[str]]
"""Cells; the first row is the head, and the first column names the others."""


def text(rows: Rows, *, markdown: bool) -> str:
    """A table for a terminal or for Markdown."""
    if markdown:
        rule = ["---", *["---:"] * (len(rows[0]) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def write_csv(path: Path, rows: Rows) -> None:
    """The same as a file."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def draw(
    path: Path,
    values: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    label: str,
    goal: float | None = None,
    logarithmic: bool = False,
) -> bool:
    """Grouped bars as a PNG.

    Args:
        path: File to write.
        values: Height by group and by bar of the group.
        title: Above the figure.
        label: Of the vertical axis.
        goal: Drawn as a line.
        logarithmic: Scale of the vertical axis.

    Returns:
        Whether it was drawn: not without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.1 * len(values)), 4.5), layout="constrained")
    axis = figure.subplots()
    names = list(dict.fromkeys(name for group in values.values() for name in group))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(values))]
        heights = [group.get(name, 0.0) for group in values.values()]
        axis.bar(places, heights, width, label=name)
    if goal is not None:
        axis.axhline(goal, color="black", linestyle="--", linewidth=0.8, label=f"goal {goal:g}")
    axis.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)
    axis.set(title=title, ylabel=label, yscale="log" if logarithmic else "linear")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True


def publish(
    out: Path,
    name: str,
    rows: Rows,
    values: Mapping[str, Mapping[str, float]],
    *,
    markdown: bool,
    title: str,
    label: str,
    goal: float | None = None,
    logarithmic: bool = False,
) -> None:
    """Print a table, write ``name.csv`` and ``name.png``; arguments as for the parts."""
    print(title + "\n")
    print(text(rows, markdown=markdown) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / f"{name}.csv", rows)
    png = out / f"{name}.png"
    drawn = draw(png, values, title=title, label=label, goal=goal, logarithmic=logarithmic)
    print(f"written to {out}" + ("" if drawn else " (no PNG: matplotlib is missing)"))
