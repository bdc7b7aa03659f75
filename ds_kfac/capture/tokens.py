"""Sequence parallelism where every tensor rank's shards are layers of their own.

One side of a layer is then computed from a rank's own tokens, although its features are those
of all tensor ranks: their sums are added up before anybody uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.capture.session import Pending
from ds_kfac.comm.communicator import Communicator
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.packing import pack_upper, packed_numel, unpack_upper


def add_up_tokens(
    pending: dict[str, Pending],
    specs: Sequence[LayerSpec],
    sides: Mapping[str, str],
    tensor: Communicator,
    *,
    like: Tensor,
) -> None:
    """Add up the sums that cover a rank's own tokens only. A collective per such layer.

    Args:
        pending: Statistics of the step, by layer name; changed in place.
        specs: This rank's layers, the same on all tensor ranks but for their numbers.
        sides: Per layer the side in question, ``"a"`` or ``"g"``.
        tensor: The tensor group.
        like: Tensor whose dtype and device the sums have.
    """
    for spec in specs:
        if spec.name not in sides:
            continue
        sums = pending.get(spec.name)
        if sums is None:  # other ranks may have some
            sums = pending[spec.name] = Pending.zeros(spec, like.device, like.dtype)
        _add_up(sums, sides[spec.name], tensor)


def _add_up(sums: Pending, side: str, tensor: Communicator) -> None:
    blocks = sums.a if side == "a" else sums.g
    counts = [sums.rows_used, sums.rows_seen] if side == "a" else [sums.loss_terms]
    sizes = [packed_numel(block.shape[0]) for block in blocks]
    packed = blocks[0].new_empty(sum(sizes) + len(counts))
    *parts, tail = torch.split(packed, [*sizes, len(counts)])
    for block, part in zip(blocks, parts, strict=True):
        pack_upper(block, part)
    for place, count in zip(tail, counts, strict=True):
        place.fill_(count)
    tensor.sum_(packed, "tokens", planned_bytes=packed.numel() * packed.element_size())
    for block, part in zip(blocks, parts, strict=True):
        unpack_upper(part, block)
    if side == "a":
        sums.rows_used, sums.rows_seen = tail[0], tail[1]
    else:
        sums.loss_terms = tail[0]
