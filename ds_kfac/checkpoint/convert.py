"""Saved states for another tensor-parallel layout, offline: no model, no processes.

In ``block`` mode the shards of a layer are layers of their own. The factor of the side that is cut
is then known in diagonal blocks only: put together they are the whole layer's factor with zeros
between shards, an approximation, while taking a shard out of a whole factor is exact. The other
factor is the same for all shards. Moments of gradients are cut and joined like the weight.
Bases are left out, and are recomputed when the state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.checkpoint import disk
from ds_kfac.checkpoint.manifest import (
    FILE,
    Manifest,
    StoredCut,
    StoredFile,
    StoredLayer,
    StoredTensor,
)
from ds_kfac.errors import StateError
from ds_kfac.layers.blocks import cut
from ds_kfac.layers.shards import Shards, fused_ranges
from ds_kfac.math.packing import pack_upper, packed_numel, unpack_upper
from ds_kfac.state import MOMENTS, SCALARS

Entries = Mapping[str, Tensor]
_ROTATED = ("rotated_momentum", "second")


@dataclass
class Whole:
    """A layer without its cut.

    Attributes:
        factors: ``a`` and ``g``, dense ``[n, n]`` sums, and their weights.
        moments: ``[d_out, columns]`` by name.
        scalars: Counters of the layer.
    """

    factors: dict[str, tuple[Tensor, Tensor]]
    moments: dict[str, Tensor]
    scalars: dict[str, Tensor]


def convert(
    manifest: Manifest, layers: Mapping[str, Entries], ranks: int
) -> tuple[StoredTensor | None, dict[str, tuple[Whole, tuple[int, int]]]]:
    """Layers for another number of tensor ranks.

    Args:
        manifest: What they were saved with.
        layers: Entries of all layers, by stored name.
        ranks: Tensor ranks of ``block`` mode; 1 gives whole layers, which ``exact`` mode takes
            at any degree.

    Returns:
        The new layout, and by stored name each new layer with its dims.

    Raises:
        StateError: The layout is not known, cannot be cut evenly, or moments live in eigenbases
            of the old shards (E303).
    """
    for name, entries in layers.items():
        for moment in _ROTATED:
            if MOMENTS + moment in entries:
                raise StateError(
                    "E303",
                    f"layer {name}: direction {manifest.config.get('direction')!r} keeps moments "
                    "in eigenbases, which other shards do not have: start K-FAC anew "
                    "(kfac.resume: 'fresh')",
                )
    _refuse_unknown(manifest, ranks)
    cuts = {} if manifest.tensor is None else manifest.tensor.cuts
    old = {name: _shards(item) for name, item in cuts.items()}
    new = {name: _recut(name, shards, ranks) for name, shards in old.items()}
    result: dict[str, tuple[Whole, tuple[int, int]]] = {}
    biases: list[str] = []
    for name, whole in _whole_layers(manifest, layers, old):
        if ranks == 1:
            result[name] = whole, _dims(whole)
            continue
        if name in new and not new[name].rows and _dims(whole)[1] > new[name].cut_size:
            biases.append(name)
        for rank in range(ranks):
            part = whole if name not in new else _take(whole, new[name], rank)
            result[f"{name}@tensor{rank}"] = part, _dims(part)
    if ranks == 1:
        # How layers were cut is kept: the result may be cut again.
        known = manifest.tensor
        return known and known.model_copy(update={"mode": "exact"}), result
    known_biases = [] if manifest.tensor is None else manifest.tensor.biases
    return (
        StoredTensor(
            mode="block", ranks=ranks, cuts=_stored(new), biases=sorted({*biases, *known_biases})
        ),
        result,
    )


def _refuse_unknown(manifest: Manifest, ranks: int) -> None:
    """Layouts that need what a state does not have."""
    anew = "start K-FAC anew (kfac.resume: 'fresh')"
    if manifest.tensor is None and ranks > 1:
        raise StateError(
            "E303",
            "this state was saved without tensor parallelism, and does not say how layers are "
            f"cut: {anew}",
        )
    biases = [] if manifest.tensor is None else manifest.tensor.biases
    if biases and ranks == 1:
        raise StateError(
            "E303",
            f"whole layers have their biases, which tensor_parallel 'block' leaves to the base "
            f"optimizer where inputs are cut: this state has no statistics of those of "
            f"{', '.join(biases[:5])} ({len(biases)} layers): {anew}",
        )
    experts = [layer.name for layer in manifest.layers if ".local_experts." in layer.name]
    if experts and ranks > 1:
        raise StateError(
            "E303",
            f"the state does not say on which tensor rank an expert is ({experts[0]}): {anew}",
        )


def write(
    folder: Path,
    manifest: Manifest,
    tensor: StoredTensor | None,
    layers: Mapping[str, tuple[Whole, tuple[int, int]]],
) -> None:
    """Write converted layers as a checkpoint of one file.

    Args:
        folder: Must not hold a checkpoint.
        manifest: Of the original.
        tensor: The new layout.
        layers: From :func:`convert`.

    Raises:
        StateError: There is a checkpoint already (E307).
    """
    largest = int(manifest.config["max_factor_dim"])
    tensors: dict[str, Tensor] = {}
    stored = []
    for name, (whole, (d_out, columns)) in layers.items():
        blocks = {"a": cut(columns, largest), "g": cut(d_out, largest)}
        for side, (dense, weight) in whole.factors.items():
            for index, (start, end) in enumerate(blocks[side]):
                packed = dense.new_empty(packed_numel(end - start))
                pack_upper(dense[start:end, start:end], packed)
                prefix = f"{name}/{side}.{index}."
                tensors[prefix + "total"], tensors[prefix + "weight"] = packed, weight.clone()
                tensors[prefix + "failures"] = torch.tensor(0)
        tensors |= {f"{name}/{MOMENTS}{key}": value for key, value in whole.moments.items()}
        tensors |= {f"{name}/{key}": value.clone() for key, value in whole.scalars.items()}
        a_blocks, g_blocks = ([(b.start, b.end) for b in blocks[side]] for side in ("a", "g"))
        stored.append(
            StoredLayer(
                name=name, d_out=d_out, columns=columns, a_blocks=a_blocks, g_blocks=g_blocks
            )
        )
    _write(folder, manifest.model_copy(update={"layers": stored, "tensor": tensor}), tensors)


def rewrite(folder: Path, manifest: Manifest, layers: Mapping[str, Entries]) -> None:
    """Write layers as they are as a checkpoint of one file: owners are no part of a state.

    Args:
        folder: Must not hold a checkpoint.
        manifest: Of the original.
        layers: Entries of all layers, by stored name; bases too.

    Raises:
        StateError: There is a checkpoint already (E307).
    """
    tensors = {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, entries in layers.items()
        for key, value in entries.items()
    }
    stored = [layer.model_copy(update={"file": 0}) for layer in manifest.layers]
    _write(folder, manifest.model_copy(update={"layers": stored}), tensors)


def _write(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of one file.

    Raises:
        StateError: There is a checkpoint already (E307).
    """
    if (folder / FILE).exists():
        raise StateError("E307", f"{folder} holds a K-FAC state already: give another folder")
    path = folder / f"step{manifest.step}-{manifest.save_id}-rank00000.safetensors"
    disk.make_folder(folder)
    size, sha256 = disk.write_tensors(path, dict(tensors))
    file = StoredFile(name=path.name, bytes=size, sha256=sha256)
    disk.write_atomically(folder / FILE, manifest.model_copy(update={"files": [file]}).dump())


def _whole_layers(
    manifest: Manifest, layers: Mapping[str, Entries], cuts: Mapping[str, Shards]
) -> Iterator[tuple[str, Whole]]:
    described = {layer.name: layer for layer in manifest.layers}
    if manifest.tensor is None or manifest.tensor.mode == "exact":
        for name, entries in layers.items():
            yield name, _read(described[name], entries)
        return
    for name in dict.fromkeys(stored.rpartition("@tensor")[0] for stored in layers):
        names = [f"{name}@tensor{rank}" for rank in range(manifest.tensor.ranks)]
        # A rank that holds nothing of a layer has none of that name.
        parts = [_read(described[n], layers[n]) if n in layers else None for n in names]
        if name in cuts:
            yield name, _join(parts, cuts[name])
        else:  # the same on all tensor ranks
            yield name, next(part for part in parts if part is not None)


def _read(layer: StoredLayer, entries: Entries) -> Whole:
    factors = {}
    for side, blocks in (("a", layer.a_blocks), ("g", layer.g_blocks)):
        weight = entries[f"{side}.0.weight"]
        dense = entries[f"{side}.0.total"].new_zeros(blocks[-1][1], blocks[-1][1])
        for index, (start, end) in enumerate(blocks):
            total = entries[f"{side}.{index}.total"]
            dense[start:end, start:end] = unpack_upper(
                total, total.new_empty(end - start, end - start)
            )
        factors[side] = dense, weight
    moments = {k.removeprefix(MOMENTS): v for k, v in entries.items() if k.startswith(MOMENTS)}
    return Whole(factors, moments, {key: entries[key] for key in SCALARS})


def _join(parts: list[Whole | None], shards: Shards) -> Whole:
    """One layer of its shards, of which some may be missing."""
    there = [(rank, part) for rank, part in enumerate(parts) if part is not None]
    first = there[0][1]
    cut_side, other = ("g", "a") if shards.rows else ("a", "g")
    weight = first.factors[cut_side][1]
    dense = first.factors[cut_side][0].new_zeros(shards.cut_size, shards.cut_size)
    sizes = list(_dims(first))
    sizes[shards.dim] = shards.cut_size
    moments = {name: value.new_zeros(sizes) for name, value in first.moments.items()}
    for rank, part in there:
        index = _index(shards, rank)
        dense[index.unsqueeze(1), index] = part.factors[cut_side][0]
        for name, value in part.moments.items():
            moments[name].index_copy_(shards.dim, index, value)
    return Whole({cut_side: (dense, weight), other: first.factors[other]}, moments, first.scalars)


def _take(whole: Whole, shards: Shards, rank: int) -> Whole:
    """What a rank holds of a layer."""
    index = _index(shards, rank)
    cut_side, other = ("g", "a") if shards.rows else ("a", "g")
    dense, weight = whole.factors[cut_side]
    moments = {
        name: value.index_select(shards.dim, index).contiguous()
        for name, value in whole.moments.items()
    }
    factors = {cut_side: (dense[index.unsqueeze(1), index], weight), other: whole.factors[other]}
    return Whole(factors, moments, whole.scalars)


def _index(shards: Shards, rank: int) -> Tensor:
    pieces = [torch.arange(start, end) for start, end in shards.ranges[rank]]
    return torch.cat(pieces) if pieces else torch.arange(0)


def _dims(whole: Whole) -> tuple[int, int]:
    return len(whole.factors["g"][0]), len(whole.factors["a"][0])


def _shards(stored: StoredCut) -> Shards:
    ranges = tuple(tuple((start, end) for start, end in pieces) for pieces in stored.ranges)
    size = max((end for pieces in ranges for _, end in pieces), default=0)
    dims = (size, 0) if stored.rows else (0, size)
    return Shards(*dims, stored.rows, ranges)


def _recut(name: str, shards: Shards, ranks: int) -> Shards:
    """The same fused matrices, each cut evenly over another number of ranks."""
    widths = []
    for part in zip(*shards.ranges, strict=True):
        total = sum(end - start for start, end in part)
        if total % ranks:
            raise StateError(
                "E303", f"layer {name}: {total} features cannot be cut evenly over {ranks} ranks"
            )
        widths.append([total // ranks] * ranks)
    return Shards(shards.d_out, shards.d_in, shards.rows, fused_ranges(widths))


def _stored(cuts: Mapping[str, Shards]) -> dict[str, StoredCut]:
    return {
        name: StoredCut(rows=shards.rows, ranges=[list(pieces) for pieces in shards.ranges])
        for name, shards in cuts.items()
    }
