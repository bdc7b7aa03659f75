"""Saved layer states: whether they fit, and the live states they become.

Nothing that is in use is touched here. A state is built beside the present one and takes its
place once every rank has built its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config import KFACConfig
from ds_kfac.errors import StateError
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.average import WeightedAverage
from ds_kfac.math.packing import packed_numel
from ds_kfac.state import (
    IN_EIGENBASIS,
    MAX_COUNT,
    MOMENTS,
    SCALARS,
    UPCOMING,
    BlockBasis,
    LayerState,
    momentum_name,
)

KNOWN_MOMENTS = ("momentum", "rotated_momentum", "second", "adam_m", "adam_v")
_EIGEN, _CHOLESKY = {"mean", "vectors", "values"}, {"mean", "inverse"}
COUNTS = ("fallbacks", "folded_at", "refreshed_at", "failures", UPCOMING)
_BASES = ("basis", "next")  # those in use, and those that are to follow
_LISTED = 20
_FIX = "resume with the settings it was saved with, or start K-FAC anew (kfac.resume: 'fresh')"


@dataclass(frozen=True)
class Needs:
    """What the configured direction takes from a layer's state.

    Attributes:
        direction: The direction.
        solver: ``eigen`` or ``cholesky``.
        moments: Names of the moments it keeps.
        dtype: Compute dtype.
    """

    direction: str
    solver: str
    moments: tuple[str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, config: KFACConfig, momentum: float, dtype: torch.dtype) -> Needs:
        """From the settings and the momentum in force."""
        moments = [momentum_name(config.direction)] if momentum > 0 else []
        if config.direction in IN_EIGENBASIS:
            moments.append("second")
        if config.grafting == "adam":
            moments += ["adam_m", "adam_v"]
        return cls(config.direction, config.resolved_solver, tuple(moments), dtype)

    def kept(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A layer's saved entries without moments of another direction."""
        dropped = {MOMENTS + name for name in KNOWN_MOMENTS if name not in self.moments}
        return {key: value for key, value in saved.items() if key not in dropped}


def signature(config: KFACConfig) -> dict[str, Any]:
    """Settings that saved bases depend on."""
    return {
        "solver": config.resolved_solver,
        "per_factor": config.direction == "orthogonal",
        "damping_mode": config.damping_mode,
    }


def has_foreign_bases(state: LayerState, needs: Needs, *, same_damping: bool) -> bool:
    """Whether a state's bases come from another solver, or carry another kind of damping.

    Args:
        state: The layer.
        needs: What is configured.
        same_damping: Saved with damping of the same kind, which Cholesky inverses contain.
    """
    for name, side in state.sides():
        for basis in (*side.bases, *(state.upcoming.of(name)[0] if state.upcoming else ())):
            if basis is None:
                continue
            is_inverse = basis.inverse is not None
            if is_inverse != (needs.solver == "cholesky") or (is_inverse and not same_damping):
                return True
    return False


def lacks_bases(state: LayerState) -> bool:
    """Whether bases were taken away from a state, as a conversion does.

    A decomposition that failed from the start left none either, and its failures are counted.
    """
    return state.refreshed_at >= 0 and any(
        basis is None and failures == 0
        for _, side in state.sides()
        for basis, failures in zip(side.bases, side.failures, strict=True)
    )


@dataclass(frozen=True)
class Past:
    """How far a saved run had come: nothing in its layers can be of a later step.

    Attributes:
        step: Applied steps.
        begun: Steps that a layer may have counted, skipped ones included.
    """

    step: int
    begun: int

    def highest(self, name: str) -> int:
        """Largest value of an entry that counts."""
        if name in ("folded_at", "refreshed_at", UPCOMING):
            return self.step
        return self.begun if name in ("updates", "fallbacks") else MAX_COUNT


def check_layers(specs: Sequence[LayerSpec], saved: Any, needs: Needs, past: Past) -> None:
    """Check that saved states fit these layers, before any of them is used.

    Args:
        specs: The layers this rank owns.
        saved: What ``state_dict()["layers"]`` held.
        needs: What the configured direction takes.
        past: How far the run had come.

    Raises:
        StateError: Missing or foreign layers or entries, tensors of another size or dtype,
            numbers that are not finite or of later steps, or moments of another direction (E302).
    """
    if not isinstance(saved, Mapping):
        raise StateError("E302", f"saved K-FAC state has no layers but {type(saved).__name__}")
    problems: list[str] = []
    for spec in specs:
        found = saved.get(spec.name)
        if isinstance(found, Mapping):
            misfits = _misfits(spec, found, needs, past)
            problems += [f"layer {spec.name}: {text}" for text in misfits]
        else:
            problems.append(f"layer {spec.name}: missing")
    names = {spec.name for spec in specs}
    foreign = sorted(str(name) for name in saved if name not in names)
    problems += [f"layer {name}: not one of this rank's layers" for name in foreign]
    refuse(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raise one error that lists problems; nothing without any.

    Raises:
        StateError: There are problems (E302).
    """
    if not problems:
        return
    more = len(problems) - _LISTED
    listed = "; ".join(problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
    raise StateError("E302", f"saved K-FAC state does not fit: {listed}")


def _misfits(spec: LayerSpec, saved: Mapping[str, Any], needs: Needs, past: Past) -> list[str]:
    required, optional = _shapes(spec)
    missing = [f"{key} is missing" for key in required if key not in saved]
    problems = []
    for key, value in saved.items():
        if key not in required and key not in optional:
            problems.append(f"{key} is unknown")
        else:
            expected = required.get(key, optional.get(key, ()))
            problems += _misfit(key, value, expected, needs.dtype)
            problems += _misplaced(key, value, past)
    # Only where every entry is as expected can more be asked about them.
    return missing + problems or [
        *_average_misfits(spec, saved),
        *_basis_misfits(spec, saved),
        *_moment_misfits(saved, needs),
    ]


def _misplaced(key: str, value: Any, past: Past) -> Iterator[str]:
    """An average that is decayed by the steps since a later one grows without bound."""
    name = key.rpartition(".")[2]
    scalar = value.ndim == 0 if isinstance(value, Tensor) else type(value) is int
    if not scalar or not (name in COUNTS or key == "updates"):
        return
    highest = past.highest(name)
    if value > highest:
        number = value.item() if isinstance(value, Tensor) else value
        yield f"{key} is {number!r:.30}, above {highest}: the state is of step {past.step}"


def _misfit(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    found = tuple(getattr(value, "shape", ()))
    name = key.rpartition(".")[2]
    whole = name in COUNTS
    if found != shape:
        yield f"{key} is {found}, expected {shape}"
        return
    if whole and type(value) is int:
        value = torch.tensor(max(-MAX_COUNT, min(value, MAX_COUNT)))
    expected = torch.int64 if whole else torch.float64 if name in ("updates", "weight") else dtype
    if not isinstance(value, Tensor):
        yield f"{key} is {value!r:.50}, expected a tensor"
    elif value.dtype != expected:
        yield f"{key} is {value.dtype}, expected {expected}"
    elif not bool(torch.isfinite(value).all()):
        yield f"{key} is not finite"
    else:
        lowest = {"folded_at": -1, "refreshed_at": -1}.get(name, 0)
        if (whole or name in ("updates", "weight", "values")) and bool((value < lowest).any()):
            yield f"{key} is below {lowest}"


def _shapes(spec: LayerSpec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the entries that a saved layer has to have and of those that it may have."""
    required: dict[str, tuple[int, ...]] = dict.fromkeys(SCALARS, ())
    matrix = (spec.d_out, spec.columns)
    optional: dict[str, tuple[int, ...]] = {MOMENTS + name: matrix for name in KNOWN_MOMENTS}
    optional[UPCOMING] = ()
    for prefix, n in _blocks(spec):
        required[prefix + "total"] = (packed_numel(n),)
        required |= {prefix + "weight": (), prefix + "failures": ()}
        shapes = {"mean": (), "vectors": (n, n), "values": (n,), "inverse": (n, n)}
        for kind in _BASES:
            optional |= {f"{prefix}{kind}.{key}": shape for key, shape in shapes.items()}
    return required, optional


def _blocks(spec: LayerSpec) -> Iterator[tuple[str, int]]:
    for name, blocks in (("a", spec.a_blocks), ("g", spec.g_blocks)):
        for index, block in enumerate(blocks):
            yield f"{name}.{index}.", block.size


def _average_misfits(spec: LayerSpec, saved: Mapping[str, Any]) -> Iterator[str]:
    for prefix, _ in _blocks(spec):
        weight = torch.as_tensor(saved[prefix + "weight"])
        mean = WeightedAverage(saved[prefix + "total"], weight).value()
        if not bool(torch.isfinite(mean).all()):
            yield f"{prefix}total over {prefix}weight is not finite"


def _basis_misfits(spec: LayerSpec, saved: Mapping[str, Any]) -> Iterator[str]:
    names = [item.name for item in fields(BlockBasis)]
    for prefix, _ in _blocks(spec):
        for kind in _BASES:
            parts = {name for name in names if f"{prefix}{kind}.{name}" in saved}
            if parts not in (set(), _EIGEN, _CHOLESKY):
                yield f"{prefix}{kind} has only {', '.join(sorted(parts))}"
            elif parts and kind == "next" and UPCOMING not in saved:
                yield f"{prefix}next has no {UPCOMING}"


def _moment_misfits(saved: Mapping[str, Any], needs: Needs) -> Iterator[str]:
    if float(saved["updates"]) == 0:
        return
    lacking = [name for name in needs.moments if MOMENTS + name not in saved]
    if not lacking:
        return
    inverses = any(key.endswith("basis.inverse") for key in saved)
    if inverses and needs.solver == "eigen" and "second" in lacking:
        yield (
            f"holds Cholesky inverses; direction {needs.direction!r} needs second moments in an "
            f"eigenbasis, which cannot be made from them: {_FIX}"
        )
    else:
        names = ", ".join(MOMENTS + name for name in lacking)
        yield f"{names} missing, which direction {needs.direction!r} as configured keeps: {_FIX}"
