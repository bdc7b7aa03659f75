"""What a failed job looks like to the test that started it."""

from __future__ import annotations

import traceback as traceback_module
from collections.abc import Sequence
from dataclasses import dataclass

PROCESS_DIED = "ProcessDied"
JOB_TIMEOUT = "JobTimeout"
STRAGGLER = "Straggler"


@dataclass(frozen=True)
class ErrorInfo:
    """One rank's failure, as plain text: exceptions themselves often cannot be pickled.

    Attributes:
        rank: Rank that failed.
        type_name: Class name of the exception, or ``ProcessDied``, ``JobTimeout``, ``Straggler``.
        text: ``str(exception)``.
        traceback: Formatted traceback, or the stack dump of a rank that had to be killed.
        bases: Names of all classes the exception is an instance of, most derived first.
        output: Last lines the rank wrote to stdout and stderr during the job.
    """

    rank: int
    type_name: str
    text: str
    traceback: str = ""
    bases: tuple[str, ...] = ()
    output: str = ""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> ErrorInfo:
        """Describe `error` without keeping a reference to it or trusting its ``__str__``."""
        try:
            text = str(error)
        except Exception as second:
            text = f"<str() of the exception raised {type(second).__name__}>"
        try:
            trace = "".join(traceback_module.format_exception(error))
        except Exception:
            trace = "".join(traceback_module.format_tb(error.__traceback__))
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return cls(rank, type(error).__name__, text, trace, bases)

    @property
    def same_error(self) -> tuple[str, str]:
        """Type and text: what must agree between ranks for a rank-symmetric error."""
        return self.type_name, self.text

    def __str__(self) -> str:
        parts = [f"[rank {self.rank}] {self.type_name}: {self.text}"]
        if self.traceback:
            parts.append(_indent(self.traceback))
        if self.output:
            parts.append("  output:\n" + _indent(self.output))
        return "\n".join(parts)


class WorldError(RuntimeError):
    """At least one rank of a job failed.

    Attributes:
        errors: Per rank its failure, or None where the rank returned.
    """

    def __init__(self, job: str, errors: Sequence[ErrorInfo | None]) -> None:
        self.errors = list(errors)
        lines = [f"{job} failed on {sum(e is not None for e in errors)} of {len(errors)} ranks"]
        for rank, error in enumerate(errors):
            lines.append(f"[rank {rank}] returned" if error is None else str(error))
        super().__init__("\n".join(lines))


class CollectiveMismatchError(AssertionError):
    """The ranks of a job did not make the same collective calls in the same order."""


def _indent(text: str) -> str:
    return "\n".join("  | " + line for line in text.rstrip().splitlines())
