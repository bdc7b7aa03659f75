"""Marks in time: taken without waiting, read later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kfac.telemetry.clock import Clock


def test_the_processors_clock() -> None:
    clock = Clock(torch.device("cpu"))
    first, second = clock.mark(), clock.mark()
    assert 0 <= clock.nanoseconds(first, second) < 10**9


def test_cuda_events_are_recorded_at_once_and_waited_for_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed to see which calls are made."""
    log: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            log.append(stream)

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 1.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = Clock(torch.device("cuda:1"))
    first, second = clock.mark(), clock.mark()
    assert log == ["stream of cuda:1"] * 2
    assert clock.nanoseconds(first, second) == 1_250_000 and log[2:] == ["wait"]
