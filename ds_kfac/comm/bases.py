"""Bring what owners have computed of a layer to the other ranks that compute its direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.moves import stream
from ds_kfac.plan.program import Exchange


class Sharing:
    """Owners send one flat tensor per layer to every other rank of their column.

    A rank's layers are one stream, cut into pieces of bounded size regardless of layers: one
    all-to-all per piece, in which all columns take part at once.

    Args:
        exchange: Owners and columns.
        numels: Elements of each layer's tensor.
        communicator: The ranks that share the layers' work.
        dtype: Of all tensors.
        device: Of all tensors.
        kind: Ledger entry.
        piece: Elements that a rank sends to another one in one round.
    """

    def __init__(
        self,
        exchange: Exchange,
        numels: Sequence[int],
        communicator: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kind: str,
        piece: int,
    ) -> None:
        self._comm, self._numels, self._kind = communicator, numels, kind
        self._dtype, self._device = dtype, device
        self.owned = exchange.owned(communicator.rank)
        self._layers = {
            rank: exchange.owned(rank)
            for rank in exchange.grid.column(communicator.rank)
            if rank != communicator.rank
        }
        sums = [0] * exchange.size
        for layer, owner in enumerate(exchange.owners):
            sums[owner] += numels[layer]
        self._streams = sums
        self._piece = piece

    def share(self, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send and receive. A collective.

        Args:
            own: Per owned layer its tensor, flat; a missing one is sent as zeros.

        Returns:
            The tensors of the layers that other ranks of the column own; views of one buffer per
            rank.
        """
        sizes = ((layer, self._numels[layer]) for layer in self.owned)
        flat = stream(sizes, own, dtype=self._dtype, device=self._device)
        received = {rank: flat.new_empty(self._streams[rank]) for rank in self._layers}
        for start in range(0, max(self._streams), self._piece):
            self._move(flat[start : start + self._piece], received, start)
        sent = flat.numel() * len(self._layers) * flat.element_size()
        self._comm.ledger.plan(self._kind, sent)
        result: dict[int, Tensor] = {}
        for rank, layers in self._layers.items():
            parts = torch.split(received[rank], [self._numels[layer] for layer in layers])
            result.update(zip(layers, parts, strict=True))
        return result

    def _move(self, piece: Tensor, received: Mapping[int, Tensor], start: int) -> None:
        size = self._comm.size
        targets = {rank: flat[start : start + self._piece] for rank, flat in received.items()}
        send = [piece.numel() * (rank in targets) for rank in range(size)]
        receive = [targets[rank].numel() if rank in targets else 0 for rank in range(size)]
        found = self._comm.all_to_all(piece.repeat(len(targets)), send, receive, self._kind)
        parts = torch.split(found, [t.numel() for t in targets.values()]) if targets else ()
        for target, part in zip(targets.values(), parts, strict=True):
            target.copy_(part)
