"""Cells, the unit of a resumable experiment, and the file that keeps their results.

One line of JSON per finished cell: an interrupted experiment starts again and computes only what
is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DIVERGED = math.inf


@dataclass(frozen=True)
class Setting:
    """What is tuned.

    Attributes:
        lr: Rate of the hidden layers.
        aux_lr: Rate of everything else.
        warmup: Steps, not a share: a share would shorten it for the shorter of two runs.
    """

    lr: float
    aux_lr: float
    warmup: int

    def __str__(self) -> str:
        """Short text for tables."""
        return f"{self.lr:g} / {self.aux_lr:g} / {self.warmup}"


@dataclass(frozen=True)
class Cell:
    """One complete training run.

    Attributes:
        task: Name of the data and model.
        optimizer: Name in ``optimizers.BUILDERS``.
        setting: Rates and warm-up.
        steps: Length of the schedule.
        seed: Of the initial weights and the batches.
        batch: Sequences or images per step.
        options: JSON text of further settings of the optimizer.
    """

    task: str
    optimizer: str
    setting: Setting
    steps: int
    seed: int
    batch: int
    options: str = "{}"

    @property
    def more(self) -> dict[str, Any]:
        """Further settings of the optimizer."""
        found: dict[str, Any] = json.loads(self.options)
        return found

    @property
    def method(self) -> tuple[str, str, int, str]:
        """Everything but setting, steps and seed."""
        return self.task, self.optimizer, self.batch, self.options

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Cell:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**data, "setting": Setting(**data["setting"])})


@dataclass(frozen=True)
class Record:
    """A finished cell.

    Attributes:
        cell: What was run.
        select: Loss on the data that settings are chosen by.
        loss: Loss on data that nothing is chosen by.
        accuracy: On the same data; None for text.
        cpu: Processor seconds of the training steps.
        curve: ``(step, loss on a part of the data)`` during training.
        data: One line that identifies the data.
    """

    cell: Cell
    select: float
    loss: float
    accuracy: float | None
    cpu: float
    curve: tuple[tuple[int, float], ...] = ()
    data: str = ""

    def line(self) -> str:
        """JSON without NaN or Infinity; a diverged run has null."""
        content = asdict(self)
        for key in ("select", "loss"):
            content[key] = content[key] if math.isfinite(content[key]) else None
        content["curve"] = [pair for pair in self.curve if math.isfinite(pair[1])]
        return json.dumps(content, sort_keys=True, allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> Record:
        """Inverse of :meth:`line`."""
        data = json.loads(line)
        losses = {k: DIVERGED if data[k] is None else data[k] for k in ("select", "loss")}
        curve = tuple((int(step), float(loss)) for step, loss in data["curve"])
        return cls(**{**data, **losses, "cell": Cell.parse(data["cell"]), "curve": curve})


@dataclass
class Results:
    """The results file.

    Args:
        path: JSON lines; need not exist.
    """

    path: Path
    records: dict[Cell, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what is there; a last line cut off by an interruption is dropped."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        complete, rest = lines[:-1], lines[-1]
        for line in complete:
            record = Record.parse(line)
            self.records[record.cell] = record
        if rest:
            self.path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a record to the file."""
        self.records[record.cell] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(record.line() + "\n")

    def best(self, cell: Cell) -> Setting:
        """The tuned setting of a cell's method, at the length where most settings were tried.

        Raises:
            LookupError: Nothing was tuned for it.
        """
        by_length: dict[int, list[Record]] = {}
        for record in self.records.values():
            if record.cell.method == cell.method and record.cell.seed == 0:
                by_length.setdefault(record.cell.steps, []).append(record)
        if not by_length:
            raise LookupError(f"no tuned setting of {cell.optimizer} on {cell.task}")
        tried = max(by_length.values(), key=len)
        return min(tried, key=lambda record: record.select).cell.setting


def by_length(records: Iterable[Record]) -> dict[int, Record]:
    """Records by the length of their schedules, shortest first."""
    return {r.cell.steps: r for r in sorted(records, key=lambda record: record.cell.steps)}
