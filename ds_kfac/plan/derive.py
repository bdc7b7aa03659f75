"""Settings, layers and layouts to a program: what attach executes and ``ds-kfac plan`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_kfac import schedules
from ds_kfac.config import KFACConfig
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan import cost
from ds_kfac.plan.placement import place
from ds_kfac.plan.program import Program, build
from ds_kfac.plan.topology import Layout

_LATE = 1_000_000  # intervals may be schedules; the latest value governs most of a run


def intervals(config: KFACConfig) -> tuple[int, int]:
    """Applied steps between two captures and between two refreshes, late in a run."""
    return (
        schedules.interval_at(config.factor_update_steps, _LATE),
        schedules.interval_at(config.inv_update_steps, _LATE),
    )


def costs(specs: Sequence[LayerSpec], config: KFACConfig) -> list[float]:
    """Operations per step of each layer at its owner."""
    return [
        cost.step_flops(
            spec,
            direction=config.direction,
            solver=config.resolved_solver,
            refresh_interval=intervals(config)[1],
        )
        for spec in specs
    ]


def derive(
    specs: Sequence[LayerSpec], layouts: Mapping[str, Layout], config: KFACConfig, *, size: int
) -> Program:
    """Choose owners and derive what moves.

    Args:
        specs: Layers.
        layouts: Gradient layout of every parameter of the layers, by name.
        config: Settings.
        size: Ranks that share the work.
    """
    owners = place(specs, costs(specs, config), layouts, size=size, strategy=config.strategy)
    return build(specs, layouts, owners, size=size)
