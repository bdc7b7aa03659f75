"""Every error ds_kfac raises on purpose, each with a stable code.

A code never changes its meaning: scripts and dashboards may match on ``KFAC-Ennn``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KFACError(Exception):
    """Base of all ds_kfac errors.

    Args:
        code: Stable identifier such as ``"E201"``.
        message: What is wrong, the value, the allowed values and the fix.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"KFAC-{code} {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[KFACError], tuple[str, str]]:
        """Pickle by (code, message), so that errors survive process boundaries."""
        return type(self), (self.code, self.message)


class ConfigError(KFACError, ValueError):
    """A mistake in the user's configuration (codes E200 to E299)."""


class UnsupportedError(KFACError, NotImplementedError):
    """A host, layer or option that ds_kfac does not serve (codes E150 to E199)."""


class CoverageError(KFACError, ValueError):
    """The model offers nothing to precondition, or not what was asked (codes E130 to E139)."""


class NumericalError(KFACError, ArithmeticError):
    """Numbers that cannot be worked with (codes E100 to E119)."""


class DistributedError(KFACError, RuntimeError):
    """Ranks disagree, or one of them failed (codes E120 to E129)."""


class StateError(KFACError, ValueError):
    """A state that does not belong to this model or run (codes E300 to E319)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" did you mean 'x'?"`` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" did you mean {match[0]!r}?" if match else ""
