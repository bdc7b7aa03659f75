"""A rank's own work between collectives: what fails there must not leave other ranks waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Guard:
    """Runs local work of a step; an error is kept for the next vote instead of raised.

    Raised at once it would end this rank, and the others would wait for it in the next
    collective until a watchdog kills them, none of them saying why.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """The error that waits for the next vote."""
        return self._error

    def run(self, work: Callable[[], Result]) -> Result | None:
        """Run something that involves no other rank.

        Args:
            work: Takes nothing; may fail halfway.

        Returns:
            Its result, or None if it failed.
        """
        try:
            return work()
        except Exception as error:
            self.keep(error)
            return None

    def keep(self, error: Exception | None) -> None:
        """Keep an error that was caught elsewhere; the first one counts."""
        self._error = self._error or error

    def take(self) -> Exception | None:
        """Hand over the waiting error and forget it."""
        error, self._error = self._error, None
        return error
