"""Cost of the work on a layer: floating-point operations and bytes, from its dims alone."""

from __future__ import annotations

from dataclasses import dataclass

from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.moments import outer_flops
from ds_kfac.math.packing import packed_numel

# Multiples of n^3 (numerics: measured in units of a matrix product of 2 n^3 operations).
_REFRESH = {"eigen": 2 * 5.0, "cholesky": 2 * 1.0}
NEWTON_SCHULZ_STEPS = 5


def factor_numel(spec: LayerSpec) -> int:
    """Elements of a layer's packed (upper-triangular) factors."""
    return sum(packed_numel(n) for n in spec.block_sizes)


def capture_flops(spec: LayerSpec, rows: int) -> float:
    """Operations of one rank's sums of outer products on an accelerator, for rows of a step."""
    return sum(outer_flops(rows, n) for n in spec.block_sizes)


def refresh_flops(spec: LayerSpec, solver: str) -> float:
    """Operations of one decomposition of all blocks of a layer."""
    return _REFRESH[solver] * sum(float(n) ** 3 for n in spec.block_sizes)


def side_refresh_flops(spec: LayerSpec, solver: str) -> tuple[float, float]:
    """Operations of one decomposition of A and of G."""
    a, g = (
        _REFRESH[solver] * sum(float(block.size) ** 3 for block in blocks)
        for blocks in (spec.a_blocks, spec.g_blocks)
    )
    return a, g


def direction_flops(spec: LayerSpec, direction: str, solver: str) -> float:
    """Operations of one direction of a layer."""
    rows, columns = spec.d_out, spec.columns
    block_row, block_column = spec.g_blocks[0].size, spec.a_blocks[0].size
    two_sided = 2.0 * rows * columns * (block_row + block_column)
    if direction == "orthogonal":
        part = rows // spec.parts
        return two_sided + spec.parts * _newton_schulz_flops(min(part, columns), max(part, columns))
    # Into the eigenbasis and back, or one damped inverse on each side.
    return two_sided * (2 if solver == "eigen" else 1)


def _newton_schulz_flops(short: int, long: int) -> float:
    """A Gram matrix, its polynomial and its product; wide matrices take most steps in pairs."""
    pairs = NEWTON_SCHULZ_STEPS // 2 if long > 2 * short else 0
    large = 4.0 * short * short * long
    return (NEWTON_SCHULZ_STEPS - 2 * pairs) * (large + 2.0 * short**3) + pairs * (
        large + 10.0 * short**3
    )


@dataclass(frozen=True)
class Work:
    """Operations per step of a layer.

    Attributes:
        direction: Of whoever computes its direction.
        refresh: Of whoever decomposes its factors, spread over the interval.
    """

    direction: float
    refresh: float

    @property
    def total(self) -> float:
        """Operations of an owner that does both."""
        return self.direction + self.refresh


def step_work(spec: LayerSpec, *, direction: str, solver: str, refresh_interval: int) -> Work:
    """Work of a layer per step."""
    return Work(
        direction_flops(spec, direction, solver), refresh_flops(spec, solver) / refresh_interval
    )


def step_flops(spec: LayerSpec, *, direction: str, solver: str, refresh_interval: int) -> float:
    """Operations per step: the direction, and a refresh spread over its interval."""
    interval = refresh_interval
    return step_work(spec, direction=direction, solver=solver, refresh_interval=interval).total
