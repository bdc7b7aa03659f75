"""Factors on every rank, for inspection and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan.program import Exchange
from ds_kfac.state import LayerState


def gather_factors(
    layer: int,
    specs: Sequence[LayerSpec],
    exchange: Exchange,
    states: Mapping[int, LayerState],
    communicator: Communicator,
    *,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Broadcast a layer's factors from its owner. A collective.

    Args:
        layer: Index of the layer.
        specs: All layers.
        exchange: Says who owns it.
        states: Layers owned by this rank.
        communicator: The data group.
        like: Device and dtype of factors.

    Returns:
        ``A [columns, columns]`` and ``G [d_out, d_out]``, full and symmetric.
    """
    owner = exchange.owners[layer]
    factors = []
    for name, size in (("a", specs[layer].columns), ("g", specs[layer].d_out)):
        factor = like.new_empty(size, size)
        if owner == communicator.rank:
            factor = dict(states[layer].sides())[name].dense()
        factors.append(communicator.broadcast_(factor, owner, "inspection"))
    return factors[0], factors[1]
