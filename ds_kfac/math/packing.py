"""Exact upper triangles of symmetric matrices as flat vectors, for buckets and checkpoints.

The packed order follows a binary tree over leaves of 64 rows instead of running row by row. All
leaves of one matrix, and all off-diagonal panels of one level of the tree, have the same shape and
lie at equal distances along the diagonal, so each group is *one* strided copy: packing a 4096
matrix takes a dozen kernels and never builds an index larger than one leaf.

Order of the packed vector for a matrix of size ``n``:

1. the upper triangles of the ``n // 64`` full leaves, row-major inside a leaf;
2. the upper triangle of the remaining ``n % 64`` rows;
3. for ``s = 64, 128, 256, ...`` below ``n``: the panels ``[2is : (2i+1)s, (2i+1)s : (2i+2)s]``,
   row-major, the last one narrower where ``n`` ends inside it.

The order depends on ``n`` alone, so ranks and checkpoints agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_LEAF = 64


class _Group(NamedTuple):
    """Equal submatrices: the first at (row, col), each ``step`` further down the diagonal."""

    blocks: int
    row: int
    col: int
    height: int
    width: int
    step: int


def packed_numel(n: int) -> int:
    """Returns the number of elements in the upper triangle of an ``n x n`` matrix."""
    return n * (n + 1) // 2


def unpacked_size(numel: int) -> int:
    """Returns ``n`` of the ``n x n`` matrix whose upper triangle has this many elements."""
    return (math.isqrt(8 * numel + 1) - 1) // 2


@torch.no_grad()
def pack_upper(matrix: Tensor, out: Tensor) -> Tensor:
    """Copies the upper triangle of ``matrix`` into ``out``.

    The strictly lower triangle is never read.

    Args:
        matrix: ``[n, n]``, any strides.
        out: ``[n (n + 1) / 2]``, contiguous (a slice of a flat bucket will do), same device. Values
            are converted if its dtype differs.

    Returns:
        ``out``.

    Raises:
        ValueError: if a shape is wrong or ``out`` is not contiguous.
    """
    _check(matrix, out)
    position = 0
    for leaf in _leaves(matrix.shape[0]):
        size = leaf.height
        span = leaf.blocks * packed_numel(size)
        blocks = _view(matrix, leaf).reshape(leaf.blocks, size * size)
        target = out[position : position + span].view(leaf.blocks, packed_numel(size))
        target.copy_(blocks.index_select(1, _triangle(size, matrix.device)))
        position += span
    for panel in _panels(matrix.shape[0]):
        span = panel.blocks * panel.height * panel.width
        target = out[position : position + span].view(panel.blocks, panel.height, panel.width)
        target.copy_(_view(matrix, panel))
        position += span
    return out


@torch.no_grad()
def unpack_upper(packed: Tensor, out: Tensor) -> Tensor:
    """Writes the full symmetric matrix of a packed upper triangle into ``out``.

    Args:
        packed: ``[n (n + 1) / 2]``, contiguous, as written by :func:`pack_upper`.
        out: ``[n, n]``, any strides, same device. Every element is written, so it may be
            uninitialised; the result is exactly symmetric.

    Returns:
        ``out``.

    Raises:
        ValueError: if a shape is wrong or ``packed`` is not contiguous.
    """
    _check(out, packed)
    position = 0
    for leaf in _leaves(out.shape[0]):
        size = leaf.height
        span = leaf.blocks * packed_numel(size)
        source = packed[position : position + span].view(leaf.blocks, packed_numel(size))
        square = source.index_select(1, _square(size, packed.device))
        _view(out, leaf).copy_(square.view(leaf.blocks, size, size))
        position += span
    for panel in _panels(out.shape[0]):
        span = panel.blocks * panel.height * panel.width
        source = packed[position : position + span].view(panel.blocks, panel.height, panel.width)
        _view(out, panel).copy_(source)
        _mirror(source, _view(out.t(), panel).mT)
        position += span
    return out


def _leaves(n: int) -> Iterator[_Group]:
    full, rest = divmod(n, _LEAF)
    if full:
        yield _Group(full, 0, 0, _LEAF, _LEAF, _LEAF)
    if rest:
        yield _Group(1, full * _LEAF, full * _LEAF, rest, rest, 0)


def _panels(n: int) -> Iterator[_Group]:
    size = _LEAF
    while size < n:
        full, rest = divmod(n, 2 * size)
        if full:
            yield _Group(full, 0, size, size, size, 2 * size)
        if rest > size:
            start = 2 * size * full
            yield _Group(1, start, start + size, size, rest - size, 0)
        size *= 2


def _view(matrix: Tensor, group: _Group) -> Tensor:
    """Returns the ``[blocks, height, width]`` view of a group of submatrices."""
    down, right = matrix.stride()
    return matrix.as_strided(
        (group.blocks, group.height, group.width),
        (group.step * (down + right), down, right),
        matrix.storage_offset() + group.row * down + group.col * right,
    )


def _mirror(panels: Tensor, target: Tensor) -> None:
    """Copies ``[blocks, height, width]`` transposed into ``[blocks, width, height]``."""
    if panels.device.type != "cpu":
        target.copy_(panels.mT)
        return
    # On the CPU torch transposes cache-friendly only into a contiguous matrix, so go through one.
    for panel, place in zip(panels, target, strict=True):
        place.copy_(panel.t().contiguous())


@cache
def _triangle(size: int, device: torch.device) -> Tensor:
    """Positions of the upper triangle in a flattened ``size x size`` leaf."""
    rows, cols = torch.triu_indices(size, size, device=device).unbind()
    return rows * size + cols


@cache
def _square(size: int, device: torch.device) -> Tensor:
    """For every element of a flattened symmetric leaf, its position in the packed triangle."""
    rows, cols = torch.triu_indices(size, size, device=device).unbind()
    order = torch.arange(rows.numel(), device=device)
    square = torch.empty(size, size, dtype=torch.int64, device=device)
    square[rows, cols] = order
    square[cols, rows] = order
    return square.flatten()


def _check(matrix: Tensor, packed: Tensor) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"expected a square matrix, got shape {tuple(matrix.shape)}")
    expected = packed_numel(matrix.shape[0])
    if packed.dim() != 1 or packed.numel() != expected:
        raise ValueError(
            f"the upper triangle of a {matrix.shape[0]} x {matrix.shape[0]} matrix has {expected} "
            f"elements, got a packed tensor of shape {tuple(packed.shape)}"
        )
    if not packed.is_contiguous():
        raise ValueError(f"the packed tensor must be contiguous, got stride {packed.stride()}")
