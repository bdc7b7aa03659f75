"""A and G of a layer decomposed on different ranks (Pauloski et al. 2020, factor-wise).

The owner keeps both factors, lends one or both to other ranks for the time of a refresh, and gets
bases back. Whatever is kept of a layer between steps stays with its owner.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.moves import Move, Moves
from ds_kfac.config import KFACConfig
from ds_kfac.layers.blocks import Block
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.packing import packed_numel
from ds_kfac.owner import Owner
from ds_kfac.plan.program import Program
from ds_kfac.refresh import (
    RefreshSettings,
    SideBases,
    SideFactors,
    Snapshot,
    decompose_sides,
    prepared,
)
from ds_kfac.replicas import pack_side, unpack_side
from ds_kfac.state import NextBases

logger = logging.getLogger(__name__)

_Side = tuple[int, str]
"""Index of a layer, and ``a`` or ``g``."""


class FactorWise:
    """One rank's part in factor-wise refreshes.

    Args:
        program: Who lends what to whom.
        specs: Layers.
        owner: This rank's own layers.
        communicator: The ranks that share the layers' work.
        config: Settings.
        guard: Keeps errors of this rank's own work.
        dtype: Of factors and bases.
        device: Of factors and bases.
    """

    def __init__(
        self,
        program: Program,
        specs: Sequence[LayerSpec],
        owner: Owner,
        communicator: Communicator,
        config: KFACConfig,
        *,
        guard: Guard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._specs, self._owner, self._guard = specs, owner, guard
        self._solver = config.resolved_solver
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._rank = communicator.rank
        loans = {(loan.layer, loan.side): loan for loan in program.solving}
        self._lent = {side: loan for side, loan in loans.items() if loan.owner == self._rank}
        self._borrowed = {side: loan for side, loan in loans.items() if loan.solver == self._rank}
        self._factors, self._bases = (
            Moves(
                moves,
                communicator,
                dtype=dtype,
                device=device,
                kind="solving",
                piece=program.piece_numel,
            )
            for moves in (
                [Move(s, n.owner, n.solver, n.factor_numel) for s, n in loans.items()],
                [Move(s, n.solver, n.owner, n.basis_numel) for s, n in loans.items()],
            )
        )

    def refresh(self, number: int) -> int:
        """Recompute all bases. A collective.

        Args:
            number: Applied-step counter.

        Returns:
            Blocks decomposed on this rank.
        """
        own: dict[_Side, SideFactors] = {}
        self._guard.run(lambda: own.update(self._prepare(number)))
        sent: Mapping[Hashable, Tensor] = self._guard.run(lambda: self._lend(own)) or {}
        received = self._factors.run(sent)
        solved: dict[_Side, SideBases] = {}
        self._guard.run(lambda: solved.update(self._solve(own, received, number)))
        back: Mapping[Hashable, Tensor] = self._guard.run(lambda: self._give_back(solved)) or {}
        returned = self._bases.run(back)
        self._guard.run(lambda: self._take(solved, returned, number))
        return sum(len(bases) for bases, _ in solved.values())

    def _prepare(self, number: int) -> dict[_Side, SideFactors]:
        settings = self._owner.refresh_settings(number)
        return {
            (layer, name): side
            for layer, state in self._owner.states.items()
            for name, side in prepared(Snapshot.of(state), settings).items()
        }

    def _lend(self, own: Mapping[_Side, SideFactors]) -> dict[Hashable, Tensor]:
        return {
            side: torch.cat([*own[side].packed, torch.stack(own[side].shifts).to(self._like)])
            for side in self._lent
            if side in own
        }

    def _solve(
        self, own: Mapping[_Side, SideFactors], received: Mapping[Hashable, Tensor], number: int
    ) -> dict[_Side, SideBases]:
        settings: RefreshSettings = self._owner.refresh_settings(number)
        sides = {side: factors for side, factors in own.items() if side not in self._lent}
        for side in self._borrowed:
            flat = received[side]
            sizes = [packed_numel(block.size) for block in self._blocks(side)]
            *packed, shifts = torch.split(flat, [*sizes, len(sizes)])
            sides[side] = SideFactors([p.clone() for p in packed], list(shifts.unbind()))
        solved = decompose_sides(list(sides.values()), settings)
        return dict(zip(sides, solved, strict=True))

    def _give_back(self, solved: Mapping[_Side, SideBases]) -> dict[Hashable, Tensor]:
        result: dict[Hashable, Tensor] = {}
        for side in self._borrowed:
            bases, reasons = solved[side]
            for index, basis in enumerate(bases):
                if basis is None:
                    logger.warning(
                        "KFAC-W110 layer %s, factor %s, block %d: decomposition for its owner "
                        "failed: %s",
                        self._specs[side[0]].name,
                        side[1].upper(),
                        index,
                        reasons[index],
                    )
            result[side] = pack_side(bases, self._blocks(side), self._solver, self._like)
        return result

    def _take(
        self,
        solved: Mapping[_Side, SideBases],
        returned: Mapping[Hashable, Tensor],
        number: int,
    ) -> None:
        found = {}
        for layer, state in self._owner.states.items():
            bases = NextBases.none(number, len(state.spec.a_blocks), len(state.spec.g_blocks))
            for name in ("a", "g"):
                side = layer, name
                if side in self._lent:
                    blocks, solver = self._blocks(side), self._lent[side].solver
                    values = unpack_side(returned[side], blocks, self._solver)
                    reasons = [f"it failed on rank {solver} of the group"] * len(values)
                else:
                    values, reasons = solved[side]
                bases.of(name)[0][:], bases.of(name)[1][:] = values, reasons
            found[layer] = bases
        self._owner.take(found)

    def _blocks(self, side: _Side) -> tuple[Block, ...]:
        spec = self._specs[side[0]]
        return spec.a_blocks if side[1] == "a" else spec.g_blocks
