"""Memory that ds_kfac takes on each rank, from a program alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_kfac.config import KFACConfig
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.packing import packed_numel
from ds_kfac.plan.program import Exchange, Program
from ds_kfac.plan.traffic import Moved, Wire, moved

_COUNTER_BYTES = 8  # weights of averages and counters of a layer are fp64 and int64
_COUNTERS = 3  # updates, fallbacks and the last fold


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        factors: Running averages of owned layers, packed, with their counters.
        bases: What the last refresh computed from them.
        moments: Momentum and second moments of owned layers.
        statistics: Sums of a capture step, of all layers: every rank has them.
        reduction: Buffers that bring these sums to their owners.
        exchange: Gradients and directions on their way, at their peak.
        background: Next bases of owned layers, and the copies of factors that they are computed
            from, with ``background_inverse`` from a refresh to the use of its bases.
        replicas: Bases and moments of layers that others own and whose direction is computed
            here, too.
        sharing: Buffers that bring factors to those who decompose them, and bases to all who
            compute with them.
    """

    factors: int = 0
    bases: int = 0
    moments: int = 0
    statistics: int = 0
    reduction: int = 0
    exchange: int = 0
    background: int = 0
    replicas: int = 0
    sharing: int = 0

    @property
    def state(self) -> int:
        """What stays between steps."""
        return self.factors + self.bases + self.moments + self.replicas

    @property
    def buffers(self) -> int:
        """Most that comes on top of it inside a step."""
        return max(self.statistics + max(self.reduction, self.sharing), self.exchange)

    @property
    def peak(self) -> int:
        """State, what is computed beside training, and buffers."""
        return self.state + self.background + self.buffers


def moment_count(config: KFACConfig, momentum: float) -> int:
    """Matrices of a layer's size that its direction keeps.

    Args:
        config: Settings.
        momentum: Decay in force of the gradient average.
    """
    averaged = momentum > 0
    second = config.direction in ("ekfac", "eigen_adam")
    return averaged + second + 2 * (config.grafting == "adam")


def layer_state(spec: LayerSpec, *, solver: str, moments: int, item: int) -> tuple[int, int, int]:
    """Bytes of factors, bases and moments of a layer at its owner.

    Args:
        spec: The layer.
        solver: ``eigen`` or ``cholesky``.
        moments: See :func:`moment_count`.
        item: Bytes of an element.
    """
    sizes = spec.block_sizes
    counters = len(sizes) + _COUNTERS  # a weight per block
    factors = sum(packed_numel(n) for n in sizes) * item + counters * _COUNTER_BYTES
    # Eigenvectors and eigenvalues, or an inverse; and the factor's mean eigenvalue.
    bases = sum(n * n + 1 + (n if solver == "eigen" else 0) for n in sizes) * item
    return factors, bases, moments * spec.numel * item


def rank_memory(
    specs: Sequence[LayerSpec],
    program: Program,
    wire: Wire,
    *,
    solver: str,
    moments: int,
    background: bool = False,
) -> list[RankMemory]:
    """Memory of every rank.

    Args:
        specs: Layers.
        program: Their program.
        wire: Bytes of elements.
        solver: ``eigen`` or ``cholesky``.
        moments: See :func:`moment_count`.
        background: Bases are computed beside training.
    """
    exchange, item = program.exchange, wire.compute_bytes
    states = [(0, 0, 0)] * exchange.size
    sharded, owned, copies, copied = ([0] * exchange.size for _ in range(4))
    for layer, (spec, owner) in enumerate(zip(specs, exchange.owners, strict=True)):
        parts = layer_state(spec, solver=solver, moments=moments, item=item)
        before = states[owner]
        states[owner] = before[0] + parts[0], before[1] + parts[1], before[2] + parts[2]
        owned[owner] += spec.numel
        copies[owner] += sum(packed_numel(n) for n in spec.block_sizes)
        copied[owner] += parts[1] + parts[2] + _COUNTERS * _COUNTER_BYTES
        sharded[owner] += 0 if layer in exchange.replicated else spec.numel
    replicas, sharing = _others_of_column(exchange, copied), _sharing_numels(program)
    statistics = sum(n * n for spec in specs for n in spec.block_sizes) * item
    reduction = _reduction_numel(program) * item
    gathered = exchange.gather_numel * (exchange.size + 1)
    if exchange.spread is not None:  # what an owner deals out, a share, and all shares
        gathered = exchange.gather_numel + exchange.spread.share_numel * (exchange.size + 2)
    return [
        RankMemory(
            *states[rank],
            statistics,
            reduction,
            _exchange_bytes(part, owned[rank], sharded[rank], gathered, wire)
            if exchange.workers == 1
            else (sum(exchange.numels) + exchange.passed_numel(rank)) * item,
            copies[rank] * item + states[rank][1] if background else 0,
            replicas[rank],
            sharing[rank] * item,
        )
        for rank, part in enumerate(moved(exchange))
    ]


def _others_of_column(exchange: Exchange, values: Sequence[int]) -> list[int]:
    """Per rank the sum of a value over the other ranks that compute the same directions."""
    grid = exchange.grid
    sums = [0] * grid.columns
    for rank, value in enumerate(values):
        sums[grid.column_of(rank)] += value
    return [sums[grid.column_of(rank)] - value for rank, value in enumerate(values)]


def _sharing_numels(program: Program) -> list[int]:
    """Bases and lent factors on their way: what is sent and received, and buffers of a round."""
    exchange = program.exchange
    lent = [0] * exchange.size
    for loan in program.solving:
        for rank in (loan.owner, loan.solver):
            lent[rank] += 2 * (loan.factor_numel + loan.basis_numel)
    if exchange.workers == 1:
        return lent
    own = program.stream_numels
    piece = [min(numel, program.piece_numel) for numel in own]
    others, pieces = _others_of_column(exchange, own), _others_of_column(exchange, piece)
    return [
        lent[rank] + own[rank] + others[rank] + (exchange.workers - 1) * piece[rank] + pieces[rank]
        for rank in range(exchange.size)
    ]


def _reduction_numel(program: Program) -> int:
    """A round's buffer holds every owner's part; received parts stay until all are there."""
    size, kept, most = program.exchange.size, 0, 0
    for part in program.rounds:
        kept += part.part_numel if size > 1 else 0
        most = max(most, size * part.part_numel + kept)
    return most


def _exchange_bytes(part: Moved, owned: int, sharded: int, gathered: int, wire: Wire) -> int:
    """The larger of the way out (gradients) and the way back (directions)."""
    out = (sharded + part.gradients_out + part.gradients_in) * wire.gradient_bytes
    back = owned + part.directions_out + part.directions_in + gathered
    return max(out, back * wire.compute_bytes)
