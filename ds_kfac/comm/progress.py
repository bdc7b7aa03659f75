"""Where this rank is in its program, noted in memory as it goes: no I/O, no device, no messages.

A thread of the watchdog reads it when something takes too long.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from ds_kfac.errors import DistributedError, KFACError

OUTSIDE = "training script"
_SHOWN = 3


@dataclass(frozen=True)
class Wait:
    """A collective that this rank has entered and not left.

    Attributes:
        ranks: Global ranks of its group.
        number: It is the group's how many-eth collective of ds_kfac on this rank, from 1.
        kind: What it moves.
        place: Step, phase and layers, for messages.
        begun: ``time.monotonic()`` at its begin.
    """

    ranks: tuple[int, ...]
    number: int
    kind: str
    place: str
    begun: float

    def __str__(self) -> str:
        """``step 3, directions back, layers a, b (collective 17, kind directions)``."""
        return f"{self.place} (collective {self.number}, kind {self.kind})"


class Progress:
    """Position of this rank, shared by all communicators of a preconditioner.

    Attributes:
        waits: The collective this rank is in.
        counts: Collectives entered so far, by the ranks of the group.
        explain: Says which ranks are missing, given a collective that broke; set by a watchdog.
    """

    def __init__(self) -> None:
        self.waits: Wait | None = None
        self.counts: dict[tuple[int, ...], int] = defaultdict(int)
        self.explain: Callable[[Wait], str] | None = None
        self._step: int | None = None
        self._at: tuple[str, Sequence[str], float] = ("attach", (), time.monotonic())

    def begin(self, step: int) -> None:
        """A step begins, after what the training script did."""
        self._step = step
        self.at("gradients read")

    def at(self, phase: str, layers: Sequence[str] = ()) -> None:
        """A phase begins.

        Args:
            phase: Its name, as the guide has it.
            layers: What is worked on; must not change afterwards.
        """
        self._at = phase, layers, time.monotonic()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase that the training script asked for."""
        self.at(phase)
        try:
            yield
        finally:
            self.outside()

    def outside(self) -> None:
        """The training script goes on."""
        self.at(OUTSIDE)

    @property
    def place(self) -> str:
        """Step, phase and layers in words."""
        phase, layers, _ = self._at
        step = "" if self._step is None else f"step {self._step}, "
        more = len(layers) - _SHOWN
        names = ", ".join(layers[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{step}{phase}" + (f", layers {names}" if names else "")

    @property
    def seconds(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self._at[2]

    def wait(self, ranks: tuple[int, ...], kind: str) -> Waiting:
        """Context of a collective; inside another one it is a part of that."""
        return Waiting(self, ranks, kind)


class Waiting:
    """Notes that this rank is in a collective, and names it if it breaks."""

    def __init__(self, progress: Progress, ranks: tuple[int, ...], kind: str) -> None:
        self._progress, self._ranks, self._kind = progress, ranks, kind
        self._wait: Wait | None = None

    def __enter__(self) -> None:
        """The collective begins."""
        progress = self._progress
        if progress.waits is not None or len(self._ranks) < 2:
            return
        progress.counts[self._ranks] += 1
        number = progress.counts[self._ranks]
        self._wait = Wait(self._ranks, number, self._kind, progress.place, time.monotonic())
        progress.waits = self._wait

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over.

        Raises:
            DistributedError: It broke (E122).
        """
        wait, progress = self._wait, self._progress
        if wait is None:
            return
        try:
            if _is_broken(error):
                missing = "" if progress.explain is None else f"; {progress.explain(wait)}"
                raise DistributedError(
                    "E122", f"{wait}: lost the other ranks: {_first_line(error)}{missing}"
                ) from error
        finally:
            progress.waits = None


def _is_broken(error: BaseException | None) -> bool:
    """Whether the backend gave up; an own error or a lack of memory has a name already."""
    named = (KFACError, NotImplementedError, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and not isinstance(error, named)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
