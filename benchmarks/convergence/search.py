"""The search for a setting, the same for every optimizer.

From a start on the grid it moves to better neighbours along one axis after the other until none is
better. So the setting it returns beat both neighbours on every axis (or lies at the grid's edge,
which is said), whoever chose the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.convergence.cells import Setting


@dataclass(frozen=True)
class Grid:
    """Values of each axis, increasing.

    Attributes:
        lr: Rates of the hidden layers.
        aux_lr: Rates of everything else.
        warmup: Steps.
    """

    lr: tuple[float, ...]
    aux_lr: tuple[float, ...]
    warmup: tuple[int, ...]

    def neighbours(self, setting: Setting, axis: str) -> Iterator[Setting]:
        """Settings one place away on an axis.

        Raises:
            ValueError: The setting is not on the grid.
        """
        values: tuple[Any, ...] = getattr(self, axis)
        place = values.index(getattr(setting, axis))
        for other in (place - 1, place + 1):
            if 0 <= other < len(values):
                yield replace(setting, **{axis: values[other]})

    def edges(self, setting: Setting) -> list[str]:
        """Axes on which a setting lies at the edge of the grid."""
        values = vars(setting)
        return [axis for axis in AXES if values[axis] in (vars(self)[axis][i] for i in (0, -1))]


AXES = ("lr", "aux_lr", "warmup")

TEXT_GRID = Grid(
    lr=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    aux_lr=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    warmup=(10, 20, 40, 80, 120),
)

IMAGE_GRID = Grid(
    lr=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128, 0.256),
    aux_lr=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128, 0.256),
    warmup=(5, 10, 20, 40, 80),
)
GRIDS = {"text": TEXT_GRID, "images": IMAGE_GRID}


def search(grid: Grid, start: Setting, evaluate: Callable[[Setting], float]) -> Setting:
    """Find a setting that is better than all its neighbours.

    Args:
        grid: Where to look.
        start: A setting on the grid.
        evaluate: Loss of a setting; asked again for settings it has seen.

    Raises:
        ValueError: The start is not on the grid.
    """
    best, unmoved, axis = start, 0, 0
    while unmoved < len(AXES):
        found = _line(grid, best, AXES[axis % len(AXES)], evaluate)
        unmoved = unmoved + 1 if found == best else 1
        best, axis = found, axis + 1
    return best


def _line(grid: Grid, start: Setting, axis: str, evaluate: Callable[[Setting], float]) -> Setting:
    best = start
    while True:
        better = min((best, *grid.neighbours(best, axis)), key=evaluate)
        if evaluate(better) >= evaluate(best):
            return best
        best = better
