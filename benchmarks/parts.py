"""Where the time of a step goes, measured from outside by wrapping functions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class PartTimer:
    """Seconds by part since the last reset.

    A wrapped function that calls another one is charged only for its own share, so that the
    parts add up.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inner: list[float] = []
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.seconds = dict.fromkeys(PARTS, 0.0)

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
            self._inner.append(0.0)
            start = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = self._clock() - start
                self.seconds[part] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return timed
