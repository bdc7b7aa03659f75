"""Everything that can be said about a run before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_kfac import schedules
from ds_kfac.config import KFACConfig
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan import cost
from ds_kfac.plan.derive import costs, derive, intervals
from ds_kfac.plan.memory import RankMemory, moment_count, rank_memory
from ds_kfac.plan.program import Exchange, Program
from ds_kfac.plan.topology import Layout
from ds_kfac.plan.traffic import Wire, capture_bytes, ordinary_bytes, refresh_bytes

KINDS = ("vote", "scalars", "gradients", "directions")
STAGES = ("capture", "reduce", "refresh", "sharing", "exchange", "direction")


@dataclass(frozen=True)
class Machine:
    """What a rank can do, for estimates of time.

    Attributes:
        rows: Rows (tokens) that each layer sees per rank and step.
        flops: Operations per second that matrix products reach.
        bandwidth: Bytes per second that a rank can send.
        model_flops: Operations of the model's own forward and backward pass per rank and step.
    """

    rows: int
    flops: float
    bandwidth: float
    model_flops: float

    @property
    def model_seconds(self) -> float:
        """Time of the model's own passes."""
        return self.model_flops / self.flops


@dataclass(frozen=True)
class Stage:
    """One part of the work.

    Attributes:
        seconds: Time each time that it is done, on the slowest rank.
        interval: Steps between two times.
    """

    seconds: float
    interval: int = 1

    @property
    def per_step(self) -> float:
        """Seconds per step on average."""
        return self.seconds / self.interval


@dataclass(frozen=True)
class Estimate:
    """A plan and what follows from it.

    Attributes:
        specs: Layers.
        program: Owners and everything that moves.
        loads: Operations per step of each rank as an owner.
        ordinary: Bytes that each rank sends in every step, by kind.
        capture: Bytes that every rank sends in addition in a capture step.
        refresh: Bytes that each rank sends in addition in a refresh step, by kind.
        memory: Of each rank.
        stages: Times by stage; empty without a machine.
    """

    specs: tuple[LayerSpec, ...]
    program: Program
    loads: tuple[float, ...]
    ordinary: tuple[Mapping[str, int], ...]
    capture: int
    refresh: tuple[Mapping[str, int], ...]
    memory: tuple[RankMemory, ...]
    stages: Mapping[str, Stage]

    @property
    def size(self) -> int:
        """Ranks."""
        return self.program.exchange.size

    @property
    def seconds(self) -> float:
        """Time that K-FAC adds to a step on average."""
        return sum(stage.per_step for stage in self.stages.values())


def wire_of(config: KFACConfig, *, stage: int, gradient_bytes: int, compute_bytes: int) -> Wire:
    """How numbers travel.

    Args:
        config: Settings.
        stage: ZeRO stage; gradients are whole on every rank under 0.
        gradient_bytes: See :class:`Wire`.
        compute_bytes: See :class:`Wire`.
    """
    clips = config.uses_kl_clip and config.kl_clip is not None
    return Wire(gradient_bytes, compute_bytes, int(stage > 0) + int(clips))


def estimate(
    specs: Sequence[LayerSpec],
    layouts: Mapping[str, Layout],
    config: KFACConfig,
    wire: Wire,
    *,
    size: int,
    momentum: float,
    machine: Machine | None = None,
) -> Estimate:
    """Plan a run.

    Args:
        specs: Layers.
        layouts: Gradient layout of every parameter of the layers, by name.
        config: Settings.
        wire: How numbers travel.
        size: Data-parallel ranks.
        momentum: Decay in force of the gradient average.
        machine: For times.
    """
    program = derive(specs, layouts, config, size=size)
    solver = config.resolved_solver
    ordinary = ordinary_bytes(program, wire)
    per_capture, per_refresh = capture_bytes(program, wire), refresh_bytes(program, wire)
    memory = rank_memory(
        specs,
        program,
        wire,
        solver=solver,
        moments=moment_count(config, momentum),
        background=config.background_inverse,
    )
    stages: dict[str, Stage] = {}
    if machine is not None:
        moving = max(counts["gradients"] + counts["directions"] for counts in ordinary)
        traffic = per_capture, max(sum(counts.values()) for counts in per_refresh), moving
        stages = _stages(specs, program, config, machine, traffic=traffic)
    return Estimate(
        specs=tuple(specs),
        program=program,
        loads=tuple(_loads(specs, program, config)),
        ordinary=tuple(ordinary),
        capture=per_capture,
        refresh=tuple(per_refresh),
        memory=tuple(memory),
        stages=stages,
    )


def _stages(
    specs: Sequence[LayerSpec],
    program: Program,
    config: KFACConfig,
    machine: Machine,
    *,
    traffic: tuple[int, int, int],
) -> dict[str, Stage]:
    capture_interval, refresh_interval = intervals(config)
    fraction = schedules.value_at(config.factor_token_fraction, capture_interval * 10**6)
    rows = -(-machine.rows // max(1, round(1.0 / fraction)))
    solver = config.resolved_solver
    direction = [cost.direction_flops(spec, config.direction, solver) for spec in specs]
    capture = sum(cost.capture_flops(spec, rows) for spec in specs)
    per_capture, per_refresh, per_step = traffic
    slowest = (
        max(_refresh_loads(specs, program, solver)),
        max(_by_computer(direction, program.exchange)),
    )
    return {
        "capture": Stage(capture / machine.flops, capture_interval),
        "reduce": Stage(per_capture / machine.bandwidth, capture_interval),
        "refresh": Stage(slowest[0] / machine.flops, refresh_interval),
        "sharing": Stage(per_refresh / machine.bandwidth, refresh_interval),
        "exchange": Stage(per_step / machine.bandwidth),
        "direction": Stage(slowest[1] / machine.flops),
    }


def _loads(specs: Sequence[LayerSpec], program: Program, config: KFACConfig) -> list[float]:
    """Operations per step of each rank."""
    interval = intervals(config)[1]
    refresh = _refresh_loads(specs, program, config.resolved_solver)
    direction = _by_computer([item.direction for item in costs(specs, config)], program.exchange)
    return [r / interval + d for r, d in zip(refresh, direction, strict=True)]


def _refresh_loads(specs: Sequence[LayerSpec], program: Program, solver: str) -> list[float]:
    """Operations of a refresh on each rank."""
    exchange = program.exchange
    sums = [0.0] * exchange.size
    solvers = program.solvers or [(owner, owner) for owner in exchange.owners]
    for spec, ranks in zip(specs, solvers, strict=True):
        for rank, flops in zip(ranks, cost.side_refresh_flops(spec, solver), strict=True):
            sums[rank] += flops
    return sums


def _by_computer(values: Sequence[float], exchange: Exchange) -> list[float]:
    """Per rank the sum over the layers whose direction it computes."""
    grid = exchange.grid
    sums = [0.0] * grid.columns
    for value, owner in zip(values, exchange.owners, strict=True):
        sums[grid.column_of(owner)] += value
    return [sums[grid.column_of(rank)] for rank in range(exchange.size)]
