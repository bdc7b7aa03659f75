"""Fixtures of the hosts' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests._harness import World


@pytest.fixture(scope="session")
def megatron_world() -> Iterator[Callable[[int], World]]:
    """``megatron_world(n)``: n ranks for megatron-core alone, which changes torch on a CPU."""
    worlds: dict[int, World] = {}

    def world(size: int) -> World:
        return worlds.setdefault(size, World(size))

    yield world
    for each in worlds.values():
        each.close()
