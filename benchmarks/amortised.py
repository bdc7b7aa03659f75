"""What a step costs on average at given intervals, and how the numbers are shown."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts import PARTS

COLUMNS = (*PARTS, "rest")
INTERVALS = ((1, 1), (10, 10), (10, 100))
"""Applied steps between two captures and between two refreshes."""

Cost = Mapping[str, float]
"""Time of a step by ``total``, ``wall`` and part, in units of an AdamW step."""


@dataclass(frozen=True)
class Sample:
    """One cycle of a system, in units of the AdamW steps measured around it.

    Attributes:
        plain: A step that neither captures nor refreshes.
        capture: A step that captures.
        refresh: A step that captures and refreshes.
    """

    plain: Cost
    capture: Cost
    refresh: Cost

    def at(self, factor: int, inverse: int) -> dict[str, float]:
        """Average step at these intervals, with the part of the extra time no part explains.

        Of ``inverse`` steps one is a refresh step, ``inverse / factor - 1`` others capture.

        Args:
            factor: Steps between two captures.
            inverse: Steps between two refreshes, a multiple of ``factor``.

        Raises:
            ValueError: The intervals do not fit.
        """
        if factor < 1 or inverse < 1 or inverse % factor:
            raise ValueError(f"{inverse} is not a multiple of {factor}")
        mean = {
            key: plain
            + (self.capture[key] - plain) / factor
            + (self.refresh[key] - self.capture[key]) / inverse
            for key, plain in self.plain.items()
        }
        mean["rest"] = mean["total"] - 1.0 - sum(mean[part] for part in PARTS)
        return mean


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        system: Name of the system.
        factor: Steps between two captures.
        inverse: Steps between two refreshes.
        total: Average step in AdamW steps: median over all cycles.
        quartiles: Quartiles of the same.
        wall: Median of its wall time, in wall time of AdamW steps.
        parts: Medians by column, in AdamW steps.
    """

    system: str
    factor: int
    inverse: int
    total: float
    quartiles: tuple[float, float]
    wall: float
    parts: Mapping[str, float]

    @property
    def extra(self) -> float:
        """Extra time over AdamW, in AdamW steps."""
        return self.total - 1.0


def rows(
    samples: Mapping[str, Sequence[Sample]], intervals: Iterable[tuple[int, int]] = INTERVALS
) -> list[Row]:
    """Medians over the cycles of each system, interval by interval.

    Args:
        samples: Cycles by system.
        intervals: Pairs of factor and inverse interval.
    """
    table = []
    for factor, inverse in intervals:
        for system, cycles in samples.items():
            means = [cycle.at(factor, inverse) for cycle in cycles]
            totals = [mean["total"] for mean in means]
            low, middle, high = (
                statistics.quantiles(totals, n=4, method="inclusive")
                if len(totals) > 1
                else totals * 3
            )
            parts = {name: statistics.median(mean[name] for mean in means) for name in COLUMNS}
            wall = statistics.median(mean["wall"] for mean in means)
            table.append(Row(system, factor, inverse, middle, (low, high), wall, parts))
    return table


def table_text(table: Sequence[Row], *, markdown: bool) -> str:
    """The table for a terminal or for Markdown.

    Args:
        table: Its rows.
        markdown: With pipes.
    """
    header = ["system", "factor / inverse", "step", "quartiles", "wall", *COLUMNS]
    lines = [
        [
            row.system,
            f"{row.factor} / {row.inverse}",
            f"{row.total:.2f}",
            f"{row.quartiles[0]:.2f}-{row.quartiles[1]:.2f}",
            f"{row.wall:.2f}",
            *(f"{row.parts[name]:.3f}" for name in COLUMNS),
        ]
        for row in table
    ]
    if markdown:
        rule = ["---", "---", *["---:"] * (len(header) - 2)]
        return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *lines)
    )


def verdict(table: Sequence[Row], ours: str, theirs: str, *, goal: float = 0.5) -> str:
    """The comparison of two systems' extra time at (10,100), as one line.

    Args:
        table: All rows.
        ours: Name of the first system.
        theirs: Name of the second, which may be missing.
        goal: Largest ratio aimed at.
    """
    factor, inverse = INTERVALS[-1]
    extra = {row.system: row.extra for row in table if (row.factor, row.inverse) == INTERVALS[-1]}
    line = f"extra time over AdamW at ({factor},{inverse}): {ours} {extra[ours]:.3f}"
    if theirs not in extra:
        return f"{line}; give --kfac-pytorch PATH to compare"
    ratio = extra[ours] / extra[theirs] if extra[theirs] > 0 else float("nan")
    return f"{line}, {theirs} {extra[theirs]:.3f}, ratio {ratio:.2f} (goal <= {goal})"


def write_csv(path: Path, table: Sequence[Row]) -> None:
    """Write the rows; all times in AdamW steps."""
    header = (
        "system",
        "factor_interval",
        "inverse_interval",
        "total",
        "quartile1",
        "quartile3",
        "wall",
    )
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow((*header, *COLUMNS))
        for row in table:
            numbers = (row.total, *row.quartiles, row.wall, *(row.parts[name] for name in COLUMNS))
            writer.writerow(
                (row.system, row.factor, row.inverse, *(f"{number:.5f}" for number in numbers))
            )
