"""Shared fixtures: deterministic in-process tests and pools of worker processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded

import numpy as np
import pytest
import torch

from tests import _harness
from tests._harness import deepspeed_cpu


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the bits of a decomposition depend on the number of threads."""
    torch.set_num_threads(1)
    try:
        import hypothesis
    except ImportError:
        return
    hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load DeepSpeed into the forkserver only if a collected test will use it."""
    if any("deepspeed" in item.nodeid or "/hosts/" in item.nodeid for item in session.items):
        _harness.preload(*deepspeed_cpu.PRELOAD)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    default_dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(default_dtype)
    torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], _harness.World]]:
    """``world(n)``: the shared pool of n gloo ranks."""
    yield _harness.world
    _harness.close_all()


@pytest.fixture(scope="session")
def run_world(world: Callable[[int], _harness.World]) -> Callable[..., list[Any]]:
    """``run_world(n, fn, *args, **options)``: short for ``world(n).run(fn, *args, **options)``."""

    def run(size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return world(size).run(fn, *args, **options)

    return run
