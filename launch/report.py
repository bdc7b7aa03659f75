"""What a training run leaves behind: its record, the CSV, and the comparison of two runs."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class TableError(ValueError):
    """A file is no table that :func:`write_csv` wrote."""


COLUMNS = ("run", "step", "seconds", "train_loss", "val_loss", "lr")


@dataclass(frozen=True)
class Row:
    """One optimizer step.

    Attributes:
        step: steps taken, this one included (0: before the first).
        seconds: training time so far, validation not counted.
        train_loss: mean over the global batch, nats per byte (None in step 0).
        val_loss: validation loss after the step, where it was measured.
        lr: learning rate of the first parameter group in this step.
    """

    step: int
    seconds: float
    train_loss: float | None
    val_loss: float | None
    lr: float


@dataclass(frozen=True)
class RunLog:
    """A complete training run.

    Attributes:
        name: label in plots and tables.
        rows: one per step.
        final_loss: validation loss over all fixed sequences after the last step.
        coverage: one line that says what was preconditioned.
    """

    name: str
    rows: Sequence[Row]
    final_loss: float
    coverage: str = field(default="")

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.rows[-1].step

    @property
    def seconds(self) -> float:
        """Training time of the run."""
        return self.rows[-1].seconds


def write_csv(path: Path, runs: Sequence[RunLog]) -> None:
    """Write the rows of all runs; a value that was not measured is left empty."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run in runs:
            for row in run.rows:
                train = "" if row.train_loss is None else f"{row.train_loss:.6f}"
                val = "" if row.val_loss is None else f"{row.val_loss:.6f}"
                fields = (run.name, row.step, f"{row.seconds:.3f}", train, val, f"{row.lr:.6g}")
                writer.writerow(fields)


def read_csv(path: Path) -> RunLog:
    """Read the last run of a table that :func:`write_csv` wrote.

    Raises:
        TableError: there is no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            fields = list(csv.DictReader(stream))
        name = fields[-1]["run"]
        rows = [_row(row) for row in fields if row["run"] == name]
        final = next(row.val_loss for row in reversed(rows) if row.val_loss is not None)
    except (OSError, KeyError, IndexError, ValueError, StopIteration) as error:
        raise TableError(f"{path} is no table of a training run: {error!r}") from error
    return RunLog(name, rows, final)


def _row(fields: dict[str, str]) -> Row:
    train, val = (float(fields[key]) if fields[key] else None for key in COLUMNS[3:5])
    return Row(int(fields["step"]), float(fields["seconds"]), train, val, float(fields["lr"]))


def reached(baseline: RunLog, candidate: RunLog) -> bool:
    """Tell whether the candidate's final validation loss is at most the baseline's."""
    return candidate.final_loss <= baseline.final_loss


def comparison(baseline: RunLog, candidate: RunLog) -> str:
    """A table of both complete runs and the verdict, as text.

    Both losses are those at the end of a complete schedule; nothing is read off the middle of a
    longer run, where the learning rate is still high.
    """
    lines = [f"{'run':<10} {'val loss':>9} {'steps':>7} {'seconds':>9} {'s/step':>8}"]
    for run in (baseline, candidate):
        per_step = run.seconds / run.steps
        lines.append(
            f"{run.name:<10} {run.final_loss:>9.4f} {run.steps:>7d} {run.seconds:>9.1f} "
            f"{per_step:>8.3f}"
        )
    steps = f"{100 * candidate.steps / baseline.steps:.0f} % of its steps"
    time = f"{100 * candidate.seconds / baseline.seconds:.0f} % of its time"
    if reached(baseline, candidate):
        verdict = (
            f"{candidate.name} reached {baseline.name}'s final loss "
            f"({baseline.final_loss:.4f}) in {steps} and {time}"
        )
    else:
        verdict = (
            f"{candidate.name} did not reach {baseline.name}'s final loss "
            f"({baseline.final_loss:.4f}): {candidate.final_loss:.4f} after {steps} and {time}"
        )
    return "\n".join([*lines, verdict])
