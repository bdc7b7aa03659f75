"""Rows of a call under tensor parallelism: each tensor rank works on its share of them.

All tensor ranks see the same rows, on one side of a cut layer each only its own features. The
rows are shared out: a rank is handed the missing features of its share by the others, and
what it adds to the sums is that of no other rank. So nothing is counted twice, the products of
a step are shared out as well, and a side that is whole everywhere is never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.layers.shards import Shards
from ds_kfac.plan.tensor import row_shares, sent_rows_numel


class RowSharing:
    """Shares out the rows of calls in a tensor group.

    Args:
        communicator: The tensor group; None for a rank that keeps all rows.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._comm = communicator or Communicator(None, Ledger())

    @property
    def counts(self) -> bool:
        """Whether this rank counts the call, which all tensor ranks see."""
        return self._comm.rank == 0

    def of_call(
        self, rows: Tensor, shards: Shards | None, side: str, sample: slice
    ) -> tuple[Tensor, int | None]:
        """What of a call this rank works on. A collective on the side that is cut.

        Args:
            rows: ``[T, features]``, one side of the call as hooks see it.
            shards: How the layer is cut.
            side: ``"a"`` for inputs, ``"g"`` for output gradients.
            sample: Rows that are used.

        Returns:
            Its rows with all features, and how many rows of the call it counts: None where
            another rank does.
        """
        missing = shards is not None and shards.missing_side == side
        if shards is not None and shards.tokens:
            # Rows are shared out already where features are whole; samples of shares are the
            # same rows on both sides.
            mine = self.take(rows, shards) if missing else rows
            return mine[sample], mine.shape[0]
        used = self.take(rows[sample], shards if missing else None)
        return used, rows.shape[0] if self.counts else None

    def take(self, rows: Tensor, shards: Shards | None) -> Tensor:
        """This rank's share of a call's rows, all features. A collective with ``shards``.

        Args:
            rows: ``[T, features]``, the same T on all ranks.
            shards: How the features are cut; None where every rank has all of them.

        Returns:
            ``[T / ranks, all features]``, as balanced as it can be.
        """
        size, rank = self._comm.size, self._comm.rank
        if size == 1:
            return rows
        counts = row_shares(rows.shape[0], size)
        if shards is None:
            return rows.narrow(0, sum(counts[:rank]), counts[rank])
        # Consecutive rows are consecutive in memory: the matrix is its own send buffer.
        send = rows.contiguous().view(-1)
        width, mine = rows.shape[1], counts[rank]
        received = self._comm.all_to_all(
            send,
            [count * width for count in counts],
            [mine * other for other in shards.widths],
            "rows",
        )
        planned = sent_rows_numel(shards, rows.shape[0], rank)
        self._comm.ledger.plan("rows", planned * send.element_size())
        parts = torch.split(received, [mine * other for other in shards.widths])
        views = [part.view(mine, other) for part, other in zip(parts, shards.widths, strict=True)]
        return shards.join(views, 1)
