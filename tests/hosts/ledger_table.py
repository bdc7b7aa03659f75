"""P3 as a table: what moves per step under every ZeRO stage, beside the plan and the gradient.

Run ``python -m tests.hosts.ledger_table`` to print it. Bytes are those a rank sends in one
ordinary step, the largest over ranks; ``share`` is that of all gradient bytes of the model's
preconditioned layers, 1 being what a full copy of the gradient would take.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests._harness import close_all, world
from tests.hosts import promise_jobs

DEPTH, WIDTH, STEPS = 15, 12, 3
GRADIENT_BYTES = DEPTH * WIDTH * (WIDTH + 1) * 4
SIZES = (2, 4)
STAGES = ("0", "1", "2", "3")


@dataclass(frozen=True)
class Row:
    """One stage on a number of ranks."""

    stage: str
    size: int
    out: int
    back: int
    factors: int
    planned: bool

    @property
    def passed(self) -> bool:
        """Bytes are the plan's; under ZeRO 3 at most 2/dp of the gradient each way."""
        within = 2 * GRADIENT_BYTES / self.size
        return self.planned and (self.stage != "3" or max(self.out, self.back) <= within)


def measure(stage: str, size: int) -> Row:
    """Ledgers of all ranks over one capture step and two ordinary ones."""
    ledgers = [
        found["ledger"]
        for found in world(size).run(
            promise_jobs.traffic, stage, DEPTH, "natural", "zero_aligned", isolated=True
        )
    ]

    def most(kind: str, steps: int) -> int:
        return max(ledger["kinds"].get(kind, {"bytes": 0})["bytes"] // steps for ledger in ledgers)

    planned = all(
        entry["bytes"] == entry["planned_bytes"]
        for ledger in ledgers
        for entry in ledger["kinds"].values()
    )
    return Row(
        stage,
        size,
        most("gradients", STEPS),
        most("directions", STEPS),
        most("factors", 1),
        planned,
    )


def format_table(rows: list[Row]) -> str:
    """The table as text."""
    head = f"{'stage':<8}{'ranks':>6}{'gradients out':>15}{'share':>8}{'directions back':>17}"
    lines = [head + f"{'share':>8}{'factors/capture':>17}{'as planned':>12}"]
    for row in rows:
        shares = [bytes_ / GRADIENT_BYTES for bytes_ in (row.out, row.back)]
        lines.append(
            f"ZeRO {row.stage:<3}{row.size:>6}{row.out:>15,}{shares[0]:>8.2f}{row.back:>17,}"
            f"{shares[1]:>8.2f}{row.factors:>17,}{'yes' if row.planned else 'NO':>12}"
            + ("" if row.passed else "   FAILED")
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table; exit code 1 when bytes differ from the plan."""
    rows = [measure(stage, size) for size in SIZES for stage in STAGES]
    print(f"{DEPTH} layers, {GRADIENT_BYTES:,} bytes of gradient; bytes a rank sends per step")
    print(format_table(rows))
    close_all()
    return int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
