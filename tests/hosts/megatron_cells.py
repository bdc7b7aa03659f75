"""Ways to train with megatron-core, each with what a single process would have done."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tests.hosts import megatron_oracle
from tests.hosts.megatron_model import Cell

NATURAL = {
    "direction": "natural",
    "damping": 0.1,
    "kl_clip": 0.001,
    "factor_update_steps": 1,
    "inv_update_steps": 1,
}
# The rarest expert sees few tokens: with little damping its direction is mostly rounding error.
DAMPED = {**NATURAL, "damping": 0.5}
ORTHOGONAL = {**NATURAL, "direction": "orthogonal", "kl_clip": None, "momentum": 0.9}
HYBRID = {**NATURAL, "strategy": "hybrid", "distribute": "factor"}
BY_FACTOR = {**NATURAL, "distribute": "factor"}
CUT = {**NATURAL, "max_factor_dim": 10}
ONE_STAGE = {**NATURAL, "skip_layers": ["decoder.layers.1", "*output_layer*"]}
SHARDED: dict[str, Any] = {"distributed": True, "optimizer": "adam"}
TOKENS: dict[str, Any] = {"tp": 2, "sp": True}
FUSION = {"gradient_accumulation_fusion": True}
FP32 = 1e-5
"""Largest difference of a weight to the fp64 oracle, relative to its parameter's largest."""
HALF = {"bf16": 3e-2, "fp16": 5e-3}


def cell(**options: Any) -> Cell:
    """A cell with K-FAC."""
    return Cell(**{"kfac": DAMPED if options.get("model") == "moe" else NATURAL, **options})


# name: (ranks, cell). Those of CI are trained by the tests, all of them by the table.
CI: dict[str, tuple[int, Cell]] = {
    "1": (1, cell()),
    "1 do": (1, cell(**SHARDED)),
    "1 llama clip": (1, cell(model="llama", clip=0.3)),
    "dp2": (2, cell(overlap=True)),
    "dp2 do": (2, cell(**SHARDED)),
    "dp2 do overlap clip": (2, cell(**SHARDED, overlap=True, clip=0.3)),
    "dp2 per-token": (2, cell(per_token=True)),
    "tp2": (2, cell(tp=2, clip=0.3)),
    "tp2 sp do": (2, cell(**TOKENS, **SHARDED)),
    "tp2 sp llama clip": (2, cell(**TOKENS, model="llama", clip=0.3)),
    "tp2 llama": (2, cell(tp=2, model="llama")),
    "tp2 sp llama orthogonal": (2, cell(**TOKENS, model="llama", kfac=ORTHOGONAL)),
    "tp2 sp blocks of 10": (2, cell(**TOKENS, model="llama", kfac=CUT)),
    "tp2 sp fused weight gradients": (2, cell(**TOKENS, extra=FUSION)),
    "tp2 sp te wrappers": (2, cell(**TOKENS, clip=0.3, wrappers=True)),
    "tp2 sp full recompute": (2, cell(**TOKENS, recompute="full")),
    "tp2 sp recompute layernorm": (2, cell(**TOKENS, recompute="layernorm")),
    "pp2 tied clip": (2, cell(pp=2, tied=True, clip=0.3)),
    "pp2 frozen": (2, cell(pp=2, freeze=("layers.1.mlp.linear_fc2",))),
    "pp2 one stage": (2, cell(pp=2, kfac=ONE_STAGE)),
    "pp2 vp2 per-token": (2, cell(pp=2, vp=2, layers=4, per_token=True)),
    "cp2 do": (2, cell(cp=2, **SHARDED)),
    "dp2 bf16 do": (2, cell(**SHARDED, dtype="bf16")),
    "tp2 sp bf16": (2, cell(**TOKENS, dtype="bf16")),
    "dp2 fp16 do": (2, cell(**SHARDED, dtype="fp16")),
    "pp2 fp16 overflows": (2, cell(pp=2, dtype="fp16", scale=0.0)),
    "moe ep2 do": (2, cell(model="moe", ep=2, **SHARDED)),
    "moe tp2 sp ep2": (2, cell(model="moe", ep=2, **TOKENS)),
    "tp2 sp dp2 do overlap": (4, cell(**TOKENS, **SHARDED, overlap=True)),
    "tp2 sp pp2 vp2": (4, cell(**TOKENS, pp=2, vp=2, layers=4)),
    "tp4 sp blocks of 10": (4, cell(tp=4, sp=True, kfac=CUT)),
    "pp2 dp2 hybrid by factor": (4, cell(pp=2, kfac=HYBRID)),
    "dp4 do two instances": (4, cell(**SHARDED, instances=2)),
    "moe ep2 dp2 pp2": (4, cell(model="moe", ep=2, pp=2, clip=0.3)),
}
TABLE: dict[str, tuple[int, Cell]] = {
    **CI,
    "1 tied": (1, cell(tied=True)),
    "1 moe": (1, cell(model="moe")),
    "1 bf16": (1, cell(dtype="bf16")),
    "1 fp16": (1, cell(dtype="fp16")),
    "dp2 llama": (2, cell(model="llama")),
    "dp2 bf16": (2, cell(dtype="bf16")),
    "dp2 fp16": (2, cell(dtype="fp16")),
    "dp2 fp16 overflows": (2, cell(dtype="fp16", scale=0.0)),
    "dp2 fp16 do overflows": (2, cell(**SHARDED, dtype="fp16", scale=0.0)),
    "tp2 sp": (2, cell(**TOKENS)),
    "tp2 do": (2, cell(tp=2, **SHARDED)),
    "tp2 sp fp16": (2, cell(**TOKENS, dtype="fp16")),
    "tp2 llama te wrappers": (2, cell(tp=2, model="llama", wrappers=True)),
    "tp2 sp te wrappers fused weight gradients": (
        2,
        cell(**TOKENS, wrappers=True, extra=FUSION),
    ),
    "tp2 recompute core_attn": (2, cell(tp=2, recompute="core_attn")),
    "pp2": (2, cell(pp=2)),
    "tp2 sp dp2 do by factor": (4, cell(**TOKENS, **SHARDED, kfac=BY_FACTOR)),
    "moe ep2 communication": (
        2,
        cell(model="moe", ep=2, kfac={**DAMPED, "strategy": "communication"}),
    ),
    "pp2 do": (2, cell(pp=2, **SHARDED)),
    "pp2 bf16": (2, cell(pp=2, dtype="bf16")),
    "cp2": (2, cell(cp=2)),
    "cp2 per-token": (2, cell(cp=2, per_token=True)),
    "moe dp2": (2, cell(model="moe")),
    "moe pp2": (2, cell(model="moe", pp=2)),
    "moe ep2": (2, cell(model="moe", ep=2)),
    "dp4": (4, cell()),
    "dp4 do": (4, cell(**SHARDED, micro=1)),
    "tp4": (4, cell(tp=4)),
    "tp4 sp do": (4, cell(tp=4, sp=True, **SHARDED)),
    "tp2 dp2": (4, cell(tp=2)),
    "tp2 sp dp2 do bf16": (4, cell(**TOKENS, **SHARDED, dtype="bf16")),
    "tp2 pp2": (4, cell(tp=2, pp=2)),
    "tp2 sp pp2 do": (4, cell(**TOKENS, pp=2, **SHARDED)),
    "tp2 sp cp2": (4, cell(**TOKENS, cp=2)),
    "tp2 sp cp2 do": (4, cell(**TOKENS, cp=2, **SHARDED)),
    "pp2 dp2 do overlap": (4, cell(pp=2, **SHARDED, overlap=True)),
    "pp2 cp2": (4, cell(pp=2, cp=2)),
    "pp2 cp2 do": (4, cell(pp=2, cp=2, **SHARDED)),
    "pp4": (4, cell(pp=4, layers=4)),
    "cp4": (4, cell(cp=4)),
    "cp2 dp2 do": (4, cell(cp=2, **SHARDED)),
    "moe ep4 do": (4, cell(model="moe", ep=4, **SHARDED)),
    "moe ep2 dp2 do": (4, cell(model="moe", ep=2, **SHARDED)),
    "moe tp2 sp ep2 dp2": (4, cell(model="moe", ep=2, **TOKENS)),
    "moe tp2 sp ep2 pp2": (4, cell(model="moe", ep=2, pp=2, **TOKENS)),
}


@dataclass(frozen=True)
class Expected:
    """What the oracle says.

    Attributes:
        weights: After the last step, by name.
        norms: Raw gradient norms.
        kl_scale: KL clip of the last step.
    """

    weights: dict[str, Tensor]
    norms: list[float]
    kl_scale: float


def expected(of: Cell) -> Expected:
    """The oracle's answer; cells that differ in their layout share it."""
    plain = Cell(
        model=of.model,
        layers=of.layers,
        tied=of.tied,
        optimizer=of.optimizer,
        clip=of.clip,
        steps=of.steps,
        lr=of.lr,
        freeze=of.freeze,
    )
    return _expected(plain, repr(sorted((of.kfac or {}).items())), _Settings(of.kfac or {}))


class _Settings(dict[str, Any]):
    """A dictionary beside the key that tells it from others."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


@functools.cache
def _expected(plain: Cell, key: str, settings: _Settings) -> Expected:
    options = {name: settings[name] for name in ("direction", "damping", "kl_clip")}
    if plain.model == "llama":  # gate and up
        layers = range(plain.layers)
        options["parts"] = {f"decoder.layers.{i}.mlp.linear_fc1": 2 for i in layers}
    options["max_factor_dim"] = settings.get("max_factor_dim")
    options["momentum"] = settings.get("momentum", 0.0)
    skipped = [pattern for pattern in settings.get("skip_layers", []) if "*" not in pattern]
    weights, norms, oracle = megatron_oracle.train(replace(plain), skip=skipped, **options)
    return Expected(weights, norms, oracle.kl_scale)


def tolerance(of: Cell) -> float:
    """Largest difference that rounding may make."""
    if of.kfac and of.kfac["direction"] == "orthogonal":
        return 10 * FP32
    return HALF.get(of.dtype, FP32)
