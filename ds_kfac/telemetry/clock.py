"""Points in time that cost nothing to take: read later, they never wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""What :meth:`Clock.mark` returns."""


class Clock:
    """Times work on a device.

    Args:
        device: CUDA devices record events in the current stream; elsewhere the processor's own
            clock is read, which is exact where operations are done when they return.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Remember this moment."""
        if self._device is None:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nanoseconds(self, start: Mark, end: Mark) -> int:
        """Time between two marks; waits for the second one if it is still to come."""
        if self._device is None:
            return int(end) - int(start)
        end.synchronize()
        return round(float(start.elapsed_time(end)) * 1e6)
