"""Bytes that ranks send, from a program alone: what the ledger of a real run will show.

Bytes are counted as :mod:`ds_kfac.comm.ledger` counts them, in its kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_kfac.plan.program import Exchange, Program

SCALAR_BYTES = 8  # votes are int64, norms and modelled changes fp64


@dataclass(frozen=True)
class Wire:
    """How numbers travel.

    Attributes:
        gradient_bytes: Bytes of an element of a stored gradient, which travels as it is stored.
        compute_bytes: Bytes of an element of factors and directions.
        scalars: Scalars that all ranks sum in a step: the norm of a sharded gradient, and the
            modelled change under a KL clip.
    """

    gradient_bytes: int
    compute_bytes: int
    scalars: int


@dataclass(frozen=True)
class Moved:
    """Elements that cross a rank's border in the exchange of a step, and those that it keeps.

    Attributes:
        gradients_out: Gradients sent to owners.
        gradients_in: Gradients received as an owner.
        directions_out: Directions sent back to holders of slices.
        directions_in: Directions received for the rank's slices.
    """

    gradients_out: int = 0
    gradients_in: int = 0
    directions_out: int = 0
    directions_in: int = 0


def moved(exchange: Exchange) -> list[Moved]:
    """What crosses each rank's border through all-to-all, in one pass over the table."""
    counts = [[0, 0, 0, 0] for _ in range(exchange.size)]
    for segment in exchange.segments:
        holder, owner = segment.holder, exchange.owners[segment.layer]
        if holder == owner:
            continue
        if segment.source:
            counts[holder][0] += segment.numel
            counts[owner][1] += segment.numel
        counts[owner][2] += segment.numel
        counts[holder][3] += segment.numel
    return [Moved(*count) for count in counts]


def ordinary_bytes(program: Program, wire: Wire) -> list[dict[str, int]]:
    """Bytes that each rank sends in every step, by kind.

    Args:
        program: The program of the group.
        wire: How numbers travel.
    """
    exchange = program.exchange
    size = exchange.size
    all_reduce = 2 * SCALAR_BYTES * (size - 1) // size
    return [
        {
            "vote": all_reduce,
            "scalars": wire.scalars * all_reduce,
            "gradients": part.gradients_out * wire.gradient_bytes,
            "directions": (part.directions_out + exchange.returned_numel(rank))
            * wire.compute_bytes,
        }
        for rank, part in enumerate(moved(exchange))
    ]


def capture_bytes(program: Program, wire: Wire) -> int:
    """Bytes that every rank sends in addition when statistics are captured (kind factors)."""
    others = program.exchange.size - 1
    return sum(part.part_numel for part in program.rounds) * others * wire.compute_bytes


def refresh_bytes(program: Program, wire: Wire) -> list[dict[str, int]]:
    """Bytes that each rank sends in addition when bases are recomputed, by kind.

    Args:
        program: The program of the group.
        wire: How numbers travel.

    Returns:
        Per rank ``bases``, what owners send to other gradient workers, and ``solving``, factors on
        their way to whoever decomposes them and bases on their way back.
    """
    others = program.exchange.workers - 1
    solving = [0] * program.exchange.size
    for loan in program.solving:
        solving[loan.owner] += loan.factor_numel
        solving[loan.solver] += loan.basis_numel
    item = wire.compute_bytes
    return [
        {"bases": stream * others * item, "solving": lent * item}
        for stream, lent in zip(program.stream_numels, solving, strict=True)
    ]


def run_bytes(
    ordinary: Mapping[str, int],
    per_capture: int,
    *,
    steps: int,
    captures: int,
    per_refresh: Mapping[str, int] | None = None,
    refreshes: int = 0,
) -> dict[str, int]:
    """What a rank's ledger shows after a number of steps, kinds without traffic left out.

    Args:
        ordinary: The rank's entry of :func:`ordinary_bytes`.
        per_capture: :func:`capture_bytes`.
        steps: Steps, captures among them.
        captures: Steps in which statistics were captured.
        per_refresh: The rank's entry of :func:`refresh_bytes`.
        refreshes: Steps in which bases were taken into use.
    """
    total = {kind: steps * count for kind, count in ordinary.items()}
    total["factors"] = captures * per_capture
    total |= {kind: refreshes * count for kind, count in (per_refresh or {}).items()}
    return {kind: count for kind, count in sorted(total.items()) if count}
