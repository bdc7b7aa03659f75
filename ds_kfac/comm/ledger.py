"""Counts what was moved, by kind, and compares it with what the plan predicts.

Bytes are those that leave this rank under the standard algorithms: an all-to-all sends
its parts for other ranks, an all-gather its part to each other rank, a reduce-scatter
``(R-1)/R`` of its buffer, an all-reduce twice that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """Calls and bytes of one kind of traffic."""

    calls: int = 0
    sent_bytes: int = 0
    planned_bytes: int = 0


@dataclass
class Ledger:
    """Traffic of ds_kfac on this rank since the last reset."""

    entries: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))
    steps: int = 0

    def record(self, kind: str, sent_bytes: int) -> None:
        """Count one collective and the bytes it sent."""
        entry = self.entries[kind]
        entry.calls += 1
        entry.sent_bytes += sent_bytes

    def plan(self, kind: str, planned_bytes: int) -> None:
        """Add what the plan says a collective of this kind sends."""
        self.entries[kind].planned_bytes += planned_bytes

    def reset(self) -> None:
        """Start counting anew."""
        self.entries.clear()
        self.steps = 0

    def report(self) -> dict[str, Any]:
        """Per kind ``calls``, ``bytes`` and ``planned_bytes``, and the totals and steps."""
        kinds = {
            kind: {
                "calls": entry.calls,
                "bytes": entry.sent_bytes,
                "planned_bytes": entry.planned_bytes,
            }
            for kind, entry in sorted(self.entries.items())
        }
        return {
            "steps": self.steps,
            "calls": sum(entry.calls for entry in self.entries.values()),
            "bytes": sum(entry.sent_bytes for entry in self.entries.values()),
            "planned_bytes": sum(entry.planned_bytes for entry in self.entries.values()),
            "kinds": kinds,
        }
