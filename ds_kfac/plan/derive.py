"""Settings, layers and layouts to a program: what attach executes and ``ds-kfac plan`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_kfac import schedules
from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan import cost
from ds_kfac.plan.placement import place, place_in_columns, place_sides
from ds_kfac.plan.program import Program, build
from ds_kfac.plan.topology import Layout, WorkerGrid

SHARED = ("communication", "hybrid")
"""Strategies in which several ranks compute the direction of a layer."""
DEFAULT_FRACTION = 0.5
_TYPICAL = schedules.interval_at(KFACConfig.model_fields["inv_update_steps"].default, 0)
_LATE = 1_000_000  # intervals may be schedules; the latest value governs most of a run


def intervals(config: KFACConfig) -> tuple[int, int]:
    """Applied steps between two captures and between two refreshes, late in a run."""
    return (
        schedules.interval_at(config.factor_update_steps, _LATE),
        schedules.interval_at(config.inv_update_steps, _LATE),
    )


def costs(specs: Sequence[LayerSpec], config: KFACConfig) -> list[cost.Work]:
    """Operations per step of each layer.

    An interval that changes within a run counts as the default: owners do not, and a run under
    ``max_overhead`` has those of its repetition with the schedules it has led to.
    """
    fixed = isinstance(config.inv_update_steps, int | float) and config.max_overhead is None
    interval = intervals(config)[1] if fixed else _TYPICAL
    return [
        cost.step_work(
            spec,
            direction=config.direction,
            solver=config.resolved_solver,
            refresh_interval=interval,
        )
        for spec in specs
    ]


def workers(config: KFACConfig, size: int) -> int:
    """Ranks that compute the direction of a layer.

    Raises:
        ConfigError: ``grad_worker_fraction`` does not divide the ranks (E214).
    """
    if size == 1 or config.strategy not in SHARED:
        return 1
    if config.strategy == "communication":
        return size
    fraction = (
        DEFAULT_FRACTION
        if config.grad_worker_fraction is None
        else (float(config.grad_worker_fraction))
    )
    count = max(1, round(fraction * size))
    if size % count or abs(count - max(1.0, fraction * size)) > 1e-3:
        allowed = [f"{n}/{size}" for n in range(1, size + 1) if size % n == 0]
        raise ConfigError(
            "E214",
            f"kfac.grad_worker_fraction {fraction:g} of {size} ranks is {fraction * size:g} ranks: "
            f"ranks have to fall into equal groups; use one of {', '.join(allowed)}",
        )
    return count


def _refuse_cut_gradients(
    specs: Sequence[LayerSpec], layouts: Mapping[str, Layout], config: KFACConfig
) -> None:
    cut = [s.name for s in specs if any(not layouts[slot.name].replicated for slot in s.slots)]
    if cut:
        raise UnsupportedError(
            "E156",
            f"kfac.strategy {config.strategy!r} needs gradients that are whole on every rank "
            f"(DistributedDataParallel, ZeRO 0 without AutoTP); those of {len(cut)} layers are cut "
            f"over the ranks ({', '.join(cut[:3])}{', ...' if len(cut) > 3 else ''}). Every "
            "gradient worker would have to gather them in every step, which moves more than "
            "directions do: use 'zero_aligned', which moves only what is not at its owner",
        )


def derive(
    specs: Sequence[LayerSpec], layouts: Mapping[str, Layout], config: KFACConfig, *, size: int
) -> Program:
    """Choose owners and derive what moves.

    Args:
        specs: Layers.
        layouts: Gradient layout of every parameter of the layers, by name.
        config: Settings.
        size: Ranks that share the work.

    Raises:
        ConfigError: ``grad_worker_fraction`` does not divide the ranks (E214).
        UnsupportedError: The strategy has no meaning for these layouts (E156).
    """
    work, count = costs(specs, config), workers(config, size)
    if count > 1:
        _refuse_cut_gradients(specs, layouts, config)
        owners = place_in_columns(work, WorkerGrid(size, count))
    else:
        strategy = "memory" if config.strategy in SHARED else config.strategy
        owners = place(specs, [item.total for item in work], layouts, size=size, strategy=strategy)
    solver = config.resolved_solver
    solvers: tuple[tuple[int, int], ...] = ()
    if config.distribute == "factor" and size > 1:
        flops = [cost.side_refresh_flops(spec, solver) for spec in specs]
        solvers = place_sides(flops, owners, size=size)
    return build(specs, layouts, owners, size=size, workers=count, solver=solver, solvers=solvers)
