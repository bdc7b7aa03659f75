"""The figure of ``ds-kfac plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_kfac.errors import ConfigError
from ds_kfac.plan.estimate import KINDS, STAGES, Estimate

_STATE = ("factors", "bases", "moments", "replicas")
_MIB = 1 << 20


def draw(result: Estimate, path: Path) -> None:
    """Draw memory by rank, bytes by kind and, where known, times by stage.

    Args:
        result: The plan.
        path: PNG or any other format that matplotlib knows by its suffix.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write the file (E220).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("E220", f"--plot needs matplotlib: {error}") from error
    figure = Figure(figsize=(14, 4), layout="constrained")
    state, traffic, times = figure.subplots(1, 3)
    _draw_memory(state, result)
    _draw_traffic(traffic, result)
    _draw_times(times, result)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError("E220", f"--plot {path}: {error}") from error


def _draw_memory(axis: Any, result: Estimate) -> None:
    ranked = sorted(result.memory, key=lambda memory: -memory.state)
    edges = [rank - 0.5 for rank in range(len(ranked) + 1)]
    low = [0.0] * len(ranked)
    for name in _STATE:
        high = [b + getattr(memory, name) / _MIB for b, memory in zip(low, ranked, strict=True)]
        axis.stairs(high, edges, baseline=low, fill=True, label=name)
        low = high
    peak = [memory.peak / _MIB for memory in ranked]
    axis.stairs(peak, edges, color="black", label="peak with buffers")
    axis.set(title="memory of each rank", xlabel="ranks, largest state first", ylabel="MiB")
    axis.legend()


def _draw_traffic(axis: Any, result: Estimate) -> None:
    most = {kind: max(ordinary[kind] for ordinary in result.ordinary) for kind in KINDS}
    bars = {f"{kind}\neach step": count for kind, count in most.items()}
    bars["factors\neach capture"] = result.capture
    for kind in result.refresh[0]:
        most_of_kind = max(refresh[kind] for refresh in result.refresh)
        if most_of_kind:
            bars[f"{kind}\neach refresh"] = most_of_kind
    _bars(axis, {label: count / _MIB for label, count in bars.items()})
    axis.set(title="sent by the busiest rank", ylabel="MiB")


def _draw_times(axis: Any, result: Estimate) -> None:
    if not result.stages:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no times without FLOP/s and bandwidth", ha="center")
        return
    _bars(axis, {name: 1e3 * result.stages[name].per_step for name in STAGES})
    axis.set(title="time per step, slowest rank", ylabel="ms")


def _bars(axis: Any, values: dict[str, float]) -> None:
    bars = axis.bar(list(values), list(values.values()))
    axis.bar_label(bars, fmt="{:,.3g}")
    axis.tick_params(axis="x", labelsize=8)
