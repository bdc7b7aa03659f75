"""Where the time of a step goes, measured from outside by wrapping functions."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

PARTS = ("capture", "reduce", "refresh", "exchange", "direction")
"""Parts of a preconditioned step; what is left of a step's extra time is the rest."""

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


class Wrapped(NamedTuple):
    """A function whose time is booked under a part.

    Attributes:
        part: One of :data:`PARTS`.
        home: Class or module the function is looked up in when it is called.
        name: Its name there.
    """

    part: str
    home: Any
    name: str


@dataclass
class _Call:
    """A call of a wrapped function: its part, its caller among the calls, and its marks."""

    part: str
    caller: int | None
    start: Any
    end: Any = None


class PartTimer:
    """Seconds by part since the last reset.

    A wrapped function that calls another one is charged only for its own share, so that the
    parts add up.

    Args:
        clock: Returns marks, plain seconds by default.
        elapsed: Seconds from the second mark to the first; asked when the seconds are, so that
            marks on a device are not waited for inside a step.
    """

    def __init__(
        self, clock: Callable[[], Any], elapsed: Callable[[Any, Any], float] = operator.sub
    ) -> None:
        self._clock = clock
        self._elapsed = elapsed
        self._calls: list[_Call] = []
        self._open: list[int] = []

    def reset(self) -> None:
        """Start a step."""
        self._calls = []

    @property
    def seconds(self) -> dict[str, float]:
        """Own time of the calls of each part."""
        sums = dict.fromkeys(PARTS, 0.0)
        for call in self._calls:
            spent = self._elapsed(call.end, call.start)
            sums[call.part] += spent
            if call.caller is not None:
                sums[self._calls[call.caller].part] -= spent
        return sums

    @contextmanager
    def installed(self, functions: Sequence[Wrapped]) -> Iterator[None]:
        """Wrap functions; leaving the context restores them."""
        originals = [(item.home, item.name, vars(item.home)[item.name]) for item in functions]
        try:
            for item, (_, _, original) in zip(functions, originals, strict=True):
                setattr(item.home, item.name, self._wrap(original, item.part))
            yield
        finally:
            for home, name, original in originals:
                setattr(home, name, original)

    def _wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            call = _Call(part, self._open[-1] if self._open else None, self._clock())
            self._open.append(len(self._calls))
            self._calls.append(call)
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()
                call.end = self._clock()

        return timed
