"""Move named flat tensors between ranks, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Move:
    """One tensor that goes from one rank to another one.

    Attributes:
        key: Names it on both sides.
        source: Rank that has it.
        target: Rank that gets it.
        numel: Elements.
    """

    key: Hashable
    source: int
    target: int
    numel: int


class Moves:
    """All-to-alls that carry out the same moves again and again.

    What goes from one rank to another one is a stream, of which every round carries one piece.

    Args:
        moves: All moves of the group, in the same order on all ranks.
        communicator: The group.
        dtype: Of all tensors.
        device: Of all tensors.
        kind: Ledger entry.
        piece: Elements that a rank sends to another one in one round.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        communicator: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        piece: int,
    ) -> None:
        self._comm, self._kind, self._piece = communicator, kind, piece
        self._dtype, self._device = dtype, device
        rank = communicator.rank
        self._out: list[list[Move]] = [[] for _ in range(communicator.size)]
        self._in: list[list[Move]] = [[] for _ in range(communicator.size)]
        streams: dict[tuple[int, int], int] = {}
        for move in moves:  # once: there are thousands of them on many ranks
            if move.source == rank:
                self._out[move.target].append(move)
            if move.target == rank:
                self._in[move.source].append(move)
            pair = move.source, move.target
            streams[pair] = streams.get(pair, 0) + move.numel
        self._longest = max(streams.values(), default=0)

    def run(self, own: Mapping[Hashable, Tensor]) -> dict[Hashable, Tensor]:
        """Send and receive. A collective.

        Args:
            own: Tensors that this rank sends, flat, by key; a missing one is sent as zeros.

        Returns:
            Those it receives: views of one buffer per rank.
        """
        out = [
            stream(((m.key, m.numel) for m in moves), own, dtype=self._dtype, device=self._device)
            for moves in self._out
        ]
        received = [
            torch.empty(sum(m.numel for m in moves), dtype=self._dtype, device=self._device)
            for moves in self._in
        ]
        for start in range(0, self._longest, self._piece):
            send = [flat[start : start + self._piece] for flat in out]
            targets = [flat[start : start + self._piece] for flat in received]
            sizes = [target.numel() for target in targets]
            found = self._comm.all_to_all(
                torch.cat(send), [part.numel() for part in send], sizes, self._kind
            )
            for target, part in zip(targets, torch.split(found, sizes), strict=True):
                target.copy_(part)
        sent = sum(flat.numel() * flat.element_size() for flat in out)
        self._comm.ledger.plan(self._kind, sent)
        result: dict[Hashable, Tensor] = {}
        for moves, flat in zip(self._in, received, strict=True):
            parts = torch.split(flat, [m.numel for m in moves]) if moves else ()
            result.update(zip((m.key for m in moves), parts, strict=True))
        return result


def stream(
    sizes: Iterable[tuple[K, int]],
    own: Mapping[K, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Flat tensors one after the other.

    Args:
        sizes: Keys and elements, in order.
        own: Tensors by key; a missing one counts as zeros.
        dtype: Of all tensors.
        device: Of all tensors.
    """
    parts = [
        own[key] if key in own else torch.zeros(numel, dtype=dtype, device=device)
        for key, numel in sizes
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
