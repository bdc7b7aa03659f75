"""Where DeepSpeed's ZeRO keeps reduced gradients, from sizes alone: layouts without an engine.

The rules are those of DeepSpeed 0.19; tests compare them with the tables of real engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_kfac.plan.topology import Layout, Piece

Group = Sequence[tuple[str, int]]
"""Names and elements of the parameters of an optimizer group, in its order."""

FLAT_ALIGNMENT = 2
"""A flattened group is padded to a multiple of this times the ranks (NCCL: 4 bytes of fp16)."""


def zero_layouts(
    groups: Sequence[Group],
    *,
    stage: int,
    size: int,
    round_robin: bool = False,
    alignment: int = 1,
) -> dict[str, Layout]:
    """Layout of every parameter's gradient under a ZeRO stage.

    Args:
        groups: Trainable parameters by optimizer group.
        stage: 0 keeps gradients whole; 1 and 2 cut each flattened group, 3 each parameter.
        size: Data-parallel ranks.
        round_robin: ``round_robin_gradients`` of stages 1 and 2.
        alignment: Elements that each parameter is padded to (``parameter_alignment`` of stages
            1 and 2).
    """
    result: dict[str, Layout] = {}
    for group in groups:
        if stage == 0:
            result.update((name, Layout(replicated=True)) for name, _ in group)
        elif stage == 3:
            result.update((name, _cut_evenly(numel, size)) for name, numel in group)
        else:
            order = [p for j in range(size) for p in group[j::size]] if round_robin else group
            result.update(_cut_group(order, size, alignment))
    return result


def _cut_evenly(numel: int, size: int) -> Layout:
    """Equal slices, the last ones short or empty."""
    part = -(-numel // size)
    starts = range(0, numel, part) if part else ()
    return Layout(
        tuple(Piece(i, start, min(part, numel - start)) for i, start in enumerate(starts))
    )


def _cut_group(group: Group, size: int, alignment: int) -> dict[str, Layout]:
    """Slices of a flattened group, of which every rank has one contiguous partition."""
    offsets, end = [], 0
    for _, numel in group:
        offsets.append(end)
        end += numel + (-(end + numel)) % alignment
    if group:
        end = offsets[-1] + group[-1][1]  # nothing is padded after the last parameter
    unit = FLAT_ALIGNMENT * size
    partition = -(-end // unit) * FLAT_ALIGNMENT
    layouts = {}
    for (name, numel), offset in zip(group, offsets, strict=True):
        pieces = []
        for rank in range(offset // partition, -(-(offset + numel) // partition)) if numel else ():
            start = max(offset, rank * partition)
            stop = min(offset + numel, (rank + 1) * partition)
            pieces.append(Piece(rank, start - offset, stop - start))
        layouts[name] = Layout(tuple(pieces))
    return layouts
