"""Rows and columns of the engine table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ds_kfac.errors import KFACError

T = TypeVar("T")

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

# name: (dtype of the model, more JSON, largest error allowed)
PRECISIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "fp32": ("fp32", {}, 1e-5),
    "bf16": ("bf16", {}, 6e-2),
    "bf16, fp32 sums": ("bf16", FP32_SUMS, 6e-2),
    "fp16": ("fp16", {"fp16": {"loss_scale": 64.0}}, 2e-2),
    "fp16, dynamic": ("fp16", {"fp16": {"initial_scale_power": 32, "hysteresis": 1}}, 2e-2),
    "autocast bf16": ("fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 6e-2),
    "autocast fp16": ("fp32", {"torch_autocast": {"enabled": True, "dtype": "float16"}}, 2e-2),
}


@dataclass(frozen=True)
class Choice:
    """Which rows of the table to measure; all by default.

    Attributes:
        engines: Patterns in the names of engines.
        sizes: Numbers of ranks.
        precisions: Names in ``PRECISIONS``.
    """

    engines: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2, 4)
    precisions: tuple[str, ...] = tuple(PRECISIONS)

    def wants(self, engine: str, size: int) -> bool:
        """Whether to measure an engine on a number of ranks."""
        named = not self.engines or any(re.search(p, engine, re.I) for p in self.engines)
        return named and size in self.sizes

    def keys(self, label: str, size: int, keys: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Of the ZeRO stages and accumulations of an engine those to measure."""
        return [key for key in keys if self.wants(f"{label}, {key[0]}", size)]


@dataclass(frozen=True)
class Row:
    """One engine on a number of ranks with one accumulation."""

    engine: str
    size: int
    accumulation: int
    cells: dict[str, float | str]

    @property
    def passed(self) -> bool:
        """Whether every cell that is not refused is within its tolerance."""
        return all(
            isinstance(value, str) or value <= PRECISIONS[name][2]
            for name, value in self.cells.items()
        )


def attempt(run: Callable[[], T]) -> T | str:
    """What a job returns, or who refuses to start its engine and why."""
    try:
        return run()
    except KFACError as error:
        return f"refused: {error}"
    except (ValueError, AssertionError, NotImplementedError) as error:
        return f"refused by DeepSpeed: {error}"
