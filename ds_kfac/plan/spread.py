"""Directions of few owners on their way to very many ranks: scattered first, then gathered.

An all-gather of whole layers is padded to the largest owner's part. With more ranks than layers
most parts are padding. So owners first deal their directions out in equal shares, one to every
rank, and then all ranks gather these: what a rank sends is its own layers and, in shares, about as
many elements as all layers have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_kfac.plan.program import Exchange


@dataclass(frozen=True)
class Slice:
    """Part of a layer's flat direction in one share.

    Attributes:
        layer: Index of the layer.
        owner: Its owner.
        share: Index of the share, which is the rank that gathers it for all.
        start: First element in the layer.
        position: First element in the share.
        numel: Elements.
    """

    layer: int
    owner: int
    share: int
    start: int
    position: int
    numel: int


@dataclass(frozen=True)
class Spread:
    """All replicated layers, one after another in table order, cut into equal shares.

    Attributes:
        share_numel: Elements of a share; the last ones may be filled up.
        slices: In order.
        sent_numels: Elements that each rank sends in both steps.
    """

    share_numel: int
    slices: tuple[Slice, ...]
    sent_numels: tuple[int, ...]

    @classmethod
    def of(cls, exchange: Exchange) -> Spread:
        """Cut the layers of an exchange."""
        total = sum(exchange.numels[layer] for layer in exchange.replicated)
        share_numel = -(-total // exchange.size)
        slices = tuple(_slices(exchange, share_numel))
        sent = [share_numel * (exchange.size - 1)] * exchange.size
        for part in slices:
            sent[part.owner] += part.numel * (part.owner != part.share)
        return cls(share_numel, slices, tuple(sent))

    def most_sent(self, largest: int) -> int:
        """A bound of what any rank sends, given the largest owner's elements."""
        return largest + self.share_numel * (len(self.sent_numels) - 1)


def _slices(exchange: Exchange, share_numel: int) -> Iterator[Slice]:
    begin = 0
    for layer in sorted(exchange.replicated):
        start, end = 0, exchange.numels[layer]
        while start < end:
            share, position = divmod(begin + start, share_numel)
            numel = min(end - start, share_numel - position)
            yield Slice(layer, exchange.owners[layer], share, start, position, numel)
            start += numel
        begin += end
