"""``ds-kfac inspect``: what a saved K-FAC state holds, without a model or processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.checkpoint.manifest import FILE, Manifest, StoredLayer
from ds_kfac.checkpoint.reader import read_layers, read_manifest
from ds_kfac.errors import StateError
from ds_kfac.math.packing import unpack_upper

_TITLES = ("layer", "dims", "statistics", "bases", "failures", "cond A", "cond G", "finite")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a factor block.

    Attributes:
        side: ``a`` or ``g``.
        values: ``[n]`` fp64, ascending; None if the factor is not finite.
    """

    side: str
    values: Tensor | None

    def condition(self) -> float:
        """Largest over smallest eigenvalue; infinite for a singular factor, 1 for a zero one."""
        if self.values is None:
            return float("nan")
        low, high = float(self.values[0]), float(self.values[-1])
        if high <= 0:
            return 1.0
        # What is below rounding of an fp32 sum is zero.
        return high / low if low > high * 1e-7 else float("inf")


def locate(path: Path) -> Path:
    """The folder with the manifest.

    Args:
        path: That folder, a checkpoint's tag, or a directory of checkpoints with ``latest``.

    Raises:
        StateError: There is no K-FAC state (E304).
    """
    candidates = [path, path / "kfac"]
    latest = path / "latest"
    if latest.is_file():
        candidates.append(path / latest.read_text(encoding="utf-8").strip() / "kfac")
    for folder in candidates:
        if (folder / FILE).exists():
            return folder
    raise StateError("E304", f"no K-FAC state in {path}, nor in its folder kfac, nor in its latest")


def report(path: Path) -> tuple[str, list[Spectrum]]:
    """Read and verify everything.

    Args:
        path: See :func:`locate`.

    Returns:
        Printable text, and the spectra of all blocks.

    Raises:
        StateError: The state is missing, damaged or forged.
    """
    folder = locate(path)
    manifest = read_manifest(folder)
    assert manifest is not None
    layers = read_layers(folder, manifest, [layer.name for layer in manifest.layers])
    lines = [*_head(folder, manifest), ""]
    rows: list[tuple[str, ...]] = [_TITLES]
    spectra: list[Spectrum] = []
    for layer in manifest.layers:
        entries = layers[layer.name]
        try:
            of_layer = {side: list(_spectra(layer, side, entries)) for side in ("a", "g")}
            rows.append(_row(layer, entries, of_layer, manifest.step))
        except (KeyError, ValueError, RuntimeError) as error:
            raise StateError("E302", f"layer {layer.name}: not a layer's state: {error}") from error
        spectra += of_layer["a"] + of_layer["g"]
    return "\n".join(lines + _table(rows)) + "\n", spectra


def plot(spectra: list[Spectrum], path: Path) -> None:
    """Draw eigenvalues over their mean, one line per block.

    Args:
        spectra: From :func:`report`.
        path: PNG or any other format that matplotlib knows by its suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"a": "input factors A", "g": "output factors G"}
    for axis, (side, title) in zip(axes, titles.items(), strict=True):
        for spectrum in spectra:
            values = spectrum.values
            if side != spectrum.side or values is None or not float(values.mean()) > 0:
                continue
            scaled = (values.flip(0) / values.mean()).clamp(min=1e-8).tolist()
            axis.plot([i / len(scaled) for i in range(len(scaled))], scaled, lw=0.8, alpha=0.7)
        axis.set(title=title, xlabel="rank of the eigenvalue / size", yscale="log")
    axes[0].set_ylabel("eigenvalue / mean")
    figure.savefig(path, dpi=120)


def _head(folder: Path, manifest: Manifest) -> Iterator[str]:
    host = "" if manifest.host_step is None else f", step {manifest.host_step} of the engine"
    yield f"{folder}: K-FAC step {manifest.step}{host}, saved by ds_kfac {manifest.library}"
    config = manifest.config
    yield (
        f"direction {config.get('direction')}, solver {manifest.settings.get('solver')}, layers "
        f"shared out among {manifest.data_size} ranks, {len(manifest.counters)} ranks in all"
    )
    counts = {key: value for key, value in manifest.counters[0].items() if key != "decompositions"}
    yield "counters: " + ", ".join(f"{key} {value}" for key, value in counts.items())
    for file in manifest.files:
        yield f"sha256 {file.sha256}  {file.bytes:>12,} bytes  {file.name}"


def _spectra(layer: StoredLayer, side: str, entries: Mapping[str, Tensor]) -> Iterator[Spectrum]:
    for index, (start, end) in enumerate(layer.a_blocks if side == "a" else layer.g_blocks):
        total, weight = entries[f"{side}.{index}.total"], entries[f"{side}.{index}.weight"]
        factor = unpack_upper(total, total.new_empty(end - start, end - start)).double()
        factor = factor / weight.clamp(min=torch.finfo(torch.float64).tiny)
        finite = bool(factor.isfinite().all())
        yield Spectrum(side, torch.linalg.eigvalsh(factor) if finite else None)


def _row(
    layer: StoredLayer,
    entries: Mapping[str, Tensor],
    spectra: Mapping[str, list[Spectrum]],
    step: int,
) -> tuple[str, ...]:
    def age(entry: str) -> str:
        at = int(entries[entry])
        return "never" if at < 0 else f"step {at} ({step - at} ago)"

    failures = max(int(value) for key, value in entries.items() if key.endswith("failures"))
    finite = all(bool(value.isfinite().all()) for value in entries.values())
    # A maximum that keeps "not a number", which Python's does not.
    conditions = [
        float(torch.tensor([item.condition() for item in spectra[side]]).max())
        for side in ("a", "g")
    ]
    return (
        layer.name,
        f"{layer.d_out} x {layer.columns}",
        age("folded_at"),
        age("refreshed_at"),
        str(failures),
        *(f"{value:.1e}" for value in conditions),
        "yes" if finite else "NO",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
