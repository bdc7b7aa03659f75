"""``ds-kfac plan``: owners, memory, bytes and times of a run, without processes or memory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ds_kfac.cli import plan_source
from ds_kfac.cli.plan_source import Settings
from ds_kfac.errors import ConfigError
from ds_kfac.layers.discover import discover
from ds_kfac.layers.spec import LayerSpec, LayerTable
from ds_kfac.plan.derive import intervals
from ds_kfac.plan.estimate import KINDS, STAGES, Estimate, Machine, estimate, wire_of
from ds_kfac.plan.zero import Group, zero_layouts

_MIB = 1 << 20
_MEMORY = {
    "factors": "state: factors",
    "bases": "state: bases",
    "moments": "state: moments",
    "replicas": "state: bases, moments of others",
    "state": "state, total",
    "background": "beside training: next bases, copies",
    "statistics": "capture: sums",
    "reduction": "capture: reduce buffers",
    "sharing": "refresh: bases on their way",
    "exchange": "exchange buffers",
    "peak": "peak",
}

_OPTIONAL = ("background", "replicas", "sharing")  # left out where nobody has any


def report(options: argparse.Namespace) -> str:
    """Plan as the command line says.

    Args:
        options: ``dims``, ``model`` or ``hf_config``, and the other arguments of the command.

    Returns:
        Printable text.

    Raises:
        KFACError: Arguments, settings or model are wrong.
    """
    settings = plan_source.read_settings(options.config, options.stage)
    model = _model(options)
    if options.dims is not None:  # layers without names that a pattern could mean
        settings = replace(settings, kfac=settings.kfac.model_copy(update={"skip_layers": ()}))
    table, result, machine = run(model, settings, options)
    lines = [*_head(table, settings, result), ""]
    lines += [*_traffic_lines(result), "", *_memory_lines(result), ""]
    lines += _time_lines(result, machine)
    if options.owners:
        lines += ["", *_owner_lines(result)]
    if options.plot is not None:
        from ds_kfac.cli import plan_plot

        plan_plot.draw(result, options.plot)
    return "\n".join(lines) + "\n"


def run(
    model: nn.Module, settings: Settings, options: argparse.Namespace
) -> tuple[LayerTable, Estimate, Machine | None]:
    """Plan for a model.

    Args:
        model: On any device; the meta device will do.
        settings: From a DeepSpeed JSON.
        options: ``ranks``, ``tokens_per_rank``, ``flops``, ``bandwidth``.
    """
    table = discover(model, settings.kfac)
    weights = dict(model.named_parameters())
    stored = settings.gradients or _widest([weights[s.weight.name].dtype for s in table.layers])
    compute = torch.promote_types(stored, torch.float32)
    layouts = zero_layouts(
        _groups(model, table.layers, settings),
        stage=settings.stage,
        size=options.ranks,
        round_robin=settings.round_robin,
        alignment=16 // math.gcd(16, stored.itemsize) if settings.aligned else 1,
    )
    machine = _machine(model, options)
    result = estimate(
        table.layers,
        layouts,
        settings.kfac,
        wire_of(
            settings.kfac,
            stage=settings.stage,
            gradient_bytes=stored.itemsize,
            compute_bytes=compute.itemsize,
        ),
        size=options.ranks,
        momentum=settings.momentum,
        machine=machine,
    )
    return table, result, machine


def _model(options: argparse.Namespace) -> nn.Module:
    if options.model is not None:
        return plan_source.model_of_function(options.model)
    if options.hf_config is not None:
        return plan_source.model_of_hugging_face(options.hf_config)
    return plan_source.model_of_dims(options.dims)


def _groups(model: nn.Module, specs: Sequence[LayerSpec], settings: Settings) -> list[Group]:
    """Optimizer groups: all parameters in one, or for type KFAC the layers' in one of their own."""
    trained = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    if not settings.own_optimizer:
        return [trained]
    inside = {slot.name for spec in specs for slot in spec.slots}
    return [
        [item for item in trained if item[0] in inside],
        [item for item in trained if item[0] not in inside],
    ]


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _machine(model: nn.Module, options: argparse.Namespace) -> Machine | None:
    given = [options.tokens_per_rank, options.flops, options.bandwidth]
    if given == [None, None, None]:
        return None
    if None in given:
        raise ConfigError(
            "E220", "times need all three of --tokens-per-rank, --flops and --bandwidth"
        )
    products = plan_source.product_parameters(model)
    return Machine(
        rows=options.tokens_per_rank,
        flops=options.flops,
        bandwidth=options.bandwidth,
        model_flops=6.0 * products * options.tokens_per_rank,
    )


def _head(table: LayerTable, settings: Settings, result: Estimate) -> Iterator[str]:
    capture, refresh = intervals(settings.kfac)
    owned = [len(result.program.exchange.owned(rank)) for rank in range(result.size)]
    mean = sum(result.loads) / result.size
    yield table.coverage()
    yield (
        f"{result.size} data-parallel ranks, gradients as under ZeRO {settings.stage}; direction "
        f"{settings.kfac.direction}, solver {settings.kfac.resolved_solver}; statistics every "
        f"{capture} steps, bases every {refresh}"
    )
    yield (
        f"owners: {sum(count > 0 for count in owned)} of {result.size} ranks, at most "
        f"{max(owned)} layers each; the busiest has {max(result.loads) / mean:.2f} of the mean work"
    )


def _traffic_lines(result: Estimate) -> list[str]:
    rows = [("bytes a rank sends", "mean", "most")]
    for kind in KINDS:
        counts = [ordinary[kind] for ordinary in result.ordinary]
        rows.append((f"each step: {kind}", f"{sum(counts) // len(counts):,}", f"{max(counts):,}"))
    totals = [sum(ordinary.values()) for ordinary in result.ordinary]
    rows.append(("each step, total", f"{sum(totals) // len(totals):,}", f"{max(totals):,}"))
    rows.append(("each capture adds: factors", f"{result.capture:,}", f"{result.capture:,}"))
    for kind in result.refresh[0]:
        counts = [refresh[kind] for refresh in result.refresh]
        if any(counts):
            mean = f"{sum(counts) // len(counts):,}"
            rows.append((f"each refresh adds: {kind}", mean, f"{max(counts):,}"))
    return _aligned(rows)


def _memory_lines(result: Estimate) -> list[str]:
    rows = [("memory of a rank, MiB", "least", "mean", "most")]
    for name, label in _MEMORY.items():
        values = [getattr(memory, name) / _MIB for memory in result.memory]
        if name in _OPTIONAL and not any(values):
            continue
        mean = sum(values) / len(values)
        rows.append((label, f"{min(values):,.1f}", f"{mean:,.1f}", f"{max(values):,.1f}"))
    return _aligned(rows)


def _time_lines(result: Estimate, machine: Machine | None) -> list[str]:
    if machine is None:
        return ["times: give --tokens-per-rank, --flops and --bandwidth"]
    rows = [("time of the slowest rank, ms", "when due", "every", "per step")]
    for name in STAGES:
        stage = result.stages[name]
        if name == "sharing" and not stage.seconds:
            continue
        due, per_step = (f"{1e3 * value:,.2f}" for value in (stage.seconds, stage.per_step))
        rows.append((name, due, str(stage.interval), per_step))
    rows.append(("all of K-FAC", "", "", f"{1e3 * result.seconds:,.2f}"))
    rows.append(("the model's own products", "", "", f"{1e3 * machine.model_seconds:,.2f}"))
    overhead = result.seconds / machine.model_seconds
    return [*_aligned(rows), f"overhead: {100 * overhead:.1f} % of the model's own products"]


def _owner_lines(result: Estimate) -> list[str]:
    rows = [("layer", "owner")]
    owners = result.program.exchange.owners
    rows += [(spec.name, f"rank {owner}") for spec, owner in zip(result.specs, owners, strict=True)]
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
