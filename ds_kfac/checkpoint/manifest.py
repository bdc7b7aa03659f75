"""The manifest: what a saved K-FAC state consists of, checked before anything else is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_kfac.errors import StateError
from ds_kfac.layers.shards import TensorCut
from ds_kfac.layers.spec import LayerSpec

FILE = "manifest.json"
FORMAT = "ds_kfac checkpoint"
VERSION = 1
MAX_BYTES = 1 << 26
"""A larger manifest is not one: 64 MiB describe hundreds of thousands of layers."""

Count = Annotated[int, Field(ge=0)]
# A plain name that only this library gives: no folder, nothing that leads out of the checkpoint.
FILE_PATTERN = r"^step[0-9]+-[0-9a-f]{16}-rank[0-9]{5}\.safetensors$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StoredFile(_Strict):
    """A safetensors file, by name inside the checkpoint."""

    name: Annotated[str, Field(pattern=FILE_PATTERN)]
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredLayer(_Strict):
    """A layer's dims and blocks, and the index of the file that has its tensors."""

    name: str
    d_out: Count
    columns: Count
    a_blocks: list[tuple[Count, Count]]
    g_blocks: list[tuple[Count, Count]]
    file: Count = 0

    @classmethod
    def of(cls, spec: LayerSpec, file: int = 0) -> StoredLayer:
        """Describe a layer."""
        return cls(
            name=spec.name,
            d_out=spec.d_out,
            columns=spec.columns,
            a_blocks=[(block.start, block.end) for block in spec.a_blocks],
            g_blocks=[(block.start, block.end) for block in spec.g_blocks],
            file=file,
        )

    def difference(self, other: StoredLayer) -> str | None:
        """How another layer of that name differs from this one, in words."""
        if (self.d_out, self.columns) != (other.d_out, other.columns):
            return (
                f"is {other.d_out} x {other.columns} in the model, "
                f"{self.d_out} x {self.columns} in the checkpoint"
            )
        if (self.a_blocks, self.g_blocks) != (other.a_blocks, other.g_blocks):
            return "is cut into other blocks (kfac.max_factor_dim was different)"
        return None


class StoredCut(_Strict):
    """How a layer's weight was cut over tensor ranks, see :class:`ds_kfac.layers.shards.Shards`."""

    rows: bool
    ranges: list[list[tuple[Count, Count]]]


class StoredTensor(_Strict):
    """The tensor-parallel layout of a run.

    Attributes:
        mode: ``exact``: layers are whole ones; ``block``: each rank's shards are layers.
        ranks: Tensor ranks.
        cuts: Layers that were cut, by name.
        biases: Layers whose bias is whole on every tensor rank, and not part of the state.
    """

    mode: Literal["exact", "block"]
    ranks: Annotated[int, Field(ge=1)]
    cuts: dict[str, StoredCut]
    biases: list[str] = []

    @classmethod
    def of(cls, cut: TensorCut | None, left_out: Iterable[str] = ()) -> StoredTensor | None:
        """Describe what is cut; None where nothing is.

        Args:
            cut: The cut of a model, or of one stage of it.
            left_out: Names of what stays with the base optimizer.
        """
        if cut is None or not cut.modules:
            return None
        cuts = {
            name: StoredCut(rows=shards.rows, ranges=[list(ranges) for ranges in shards.ranges])
            for name, shards in cut.modules.items()
        }
        ranks = next(iter(cut.modules.values())).size
        biases = sorted(f"{name}.bias" for name in cut.modules)
        return cls(
            mode="block" if cut.blocks else "exact",
            ranks=ranks,
            cuts=cuts,
            biases=[name.removesuffix(".bias") for name in set(left_out).intersection(biases)],
        )

    @classmethod
    def joined(cls, parts: Iterable[StoredTensor | None]) -> StoredTensor | None:
        """The layout of a model from those of its stages, of which each knows its own layers."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        cuts = {name: cut for part in known for name, cut in part.cuts.items()}
        biases = sorted({name for part in known for name in part.biases})
        return known[0].model_copy(update={"cuts": cuts, "biases": biases})

    def fits(self, other: StoredTensor) -> bool:
        """Whether layers are cut alike."""
        return (self.mode, self.ranks, self.cuts) == (other.mode, other.ranks, other.cuts)

    def __str__(self) -> str:
        """Mode and degree."""
        return f"tensor_parallel {self.mode!r} on {self.ranks} tensor ranks"


class Manifest(_Strict):
    """Everything about a saved state but its tensors.

    Attributes:
        save_id: Names this save: the host's checkpoint carries it too.
        library: Version of ds_kfac that wrote it.
        step: Applied K-FAC steps.
        host_step: The host's own step counter, or None where there is none.
        data_size: Ranks among which layers were shared out.
        settings: What bases depend on, see :func:`ds_kfac.restore.signature`.
        config: The whole ``kfac`` configuration.
        counters: Counts of every rank of the model, by name.
        files: Files with tensors.
        layers: All layers of the model.
        tensor: The tensor-parallel layout; None where nothing was cut.
        decisions: What the cost governor had decided, see :mod:`ds_kfac.pace`.
    """

    save_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    library: str
    step: Count
    host_step: Count | None
    data_size: Annotated[int, Field(ge=1)]
    settings: dict[str, Any]
    config: dict[str, Any]
    counters: Annotated[list[dict[str, Count]], Field(min_length=1)]
    files: list[StoredFile]
    layers: list[StoredLayer]
    tensor: StoredTensor | None = None
    decisions: list[dict[str, Count]] = []

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        _unique("file", (file.name for file in self.files))
        _unique("layer", (layer.name for layer in self.layers))
        for layer in self.layers:
            if layer.file >= len(self.files):
                raise ValueError(f"layer {layer.name!r} is in file {layer.file}, which is none")
        if any(counts.get("steps") != self.step for counts in self.counters):
            raise ValueError(f"counters are not those of step {self.step}")
        return self

    def dump(self) -> bytes:
        """As JSON, with a checksum of the content."""
        content = self.model_dump(mode="json")
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": checksum(content),
            "content": content,
        }
        return (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()

    def counters_of(self, rank: int, size: int) -> dict[str, int]:
        """Counts of a rank.

        With another number of ranks the work done so far counts on the first.

        Args:
            rank: The rank.
            size: Ranks there are now.
        """
        if size == len(self.counters):
            return dict(self.counters[rank])
        done = sum(counts.get("decompositions", 0) for counts in self.counters)
        return {**self.counters[0], "decompositions": done if rank == 0 else 0}

    def tensor_misfit(self, here: StoredTensor | None) -> str | None:
        """Why the state does not fit a run's tensor-parallel layout, or None.

        States of whole layers fit every degree.

        Args:
            here: Layout of the run.
        """
        saved = self.tensor if self.tensor and self.tensor.mode == "block" else None
        now = here if here and here.mode == "block" else None
        if saved is now or (saved is not None and now is not None and saved.fits(now)):
            return None
        words, wanted = _in_words(saved, self.tensor), _in_words(now, here)
        cure = "start K-FAC anew (kfac.resume: 'fresh')"
        if self.tensor is not None:  # else it does not say how layers are cut
            degree = "" if now is None else f" --tensor-ranks {now.ranks}"
            cure = f"convert it with 'ds-kfac convert CHECKPOINT NEW{degree}', or {cure}"
        return f"the K-FAC state is that of {words}, this run has {wanted}: {cure}"

    def misfits(self, model: Mapping[str, StoredLayer]) -> list[str]:
        """What keeps this state from being that of a model, in words.

        Args:
            model: All layers of the model by name.
        """
        saved = {layer.name: layer for layer in self.layers}
        problems = [f"layer {name}: not in the checkpoint" for name in model if name not in saved]
        for name, layer in saved.items():
            if name not in model:
                problems.append(f"layer {name}: not preconditioned in this model")
            elif (difference := layer.difference(model[name])) is not None:
                problems.append(f"layer {name}: {difference}")
        return problems


def _in_words(blocks: StoredTensor | None, layout: StoredTensor | None) -> str:
    if blocks is not None:
        return str(blocks)
    ranks = 1 if layout is None else layout.ranks
    return f"whole layers ({ranks} tensor rank{'s' * (ranks > 1)})"


def parse(data: bytes, where: str) -> Manifest:
    """Read a manifest that may come from anywhere.

    Args:
        data: Content of the file.
        where: Its path, for messages.

    Raises:
        StateError: It is of another version (E308), was damaged (E301), or is none (E306).
    """
    try:
        whole = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StateError("E306", f"{where} is not a manifest: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise StateError("E306", f"{where} is not a manifest of ds_kfac")
    if whole.get("version") != VERSION or isinstance(whole["version"], bool):
        raise StateError(
            "E308",
            f"{where} has version {whole.get('version')!r:.50}; this version of ds_kfac reads "
            f"{VERSION}",
        )
    content = whole.get("content")
    if whole.get("checksum") != checksum(content):
        raise StateError("E301", f"{where} is damaged: its checksum differs")
    try:
        return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5]
        ]
        raise StateError("E306", f"{where} is malformed: {'; '.join(problems)}") from None


def checksum(content: Any) -> str:
    """Hash of a manifest's content, however it is laid out."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name!r} occurs twice")
        seen.add(name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _unique("key", (key for key, _ in pairs))
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
