"""Jobs that train cells on DeepSpeed engines and report more than weights."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import ds_kfac
from tests._harness import deepspeed_cpu
from tests.hosts import topology_jobs as jobs
from tests.hosts import topology_table as table
from tests.hosts.topology_jobs import Cell

MAX_ATTEMPTS = 60


@dataclass
class Report:
    """What one cell came to.

    Attributes:
        weights: Whole weights by name, fp32.
        factors: ``(A, G)`` by layer.
        counters: The preconditioner's counters.
        norms: ``engine.get_global_grad_norm()`` after each applied step.
        scales: Loss scale in force at each attempt.
        wrapper: Class of ``engine.optimizer``.
    """

    weights: dict[str, Tensor]
    factors: dict[str, tuple[Tensor, Tensor]]
    counters: dict[str, int]
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    wrapper: str = ""


def cell(
    variant: str,
    host: str,
    *,
    accumulation: int = 1,
    uneven: bool = False,
    zero: dict[str, Any] | None = None,
    **changes: Any,
) -> Cell:
    """A cell of the topology table with more DeepSpeed JSON.

    Args:
        variant: Name in ``topology_table.VARIANTS``.
        host: ZeRO stage.
        accumulation: Micro-batches per step.
        uneven: Different numbers of rows per micro-batch.
        zero: More of the ``zero_optimization`` section.
        **changes: Other fields of the cell; ``extra`` is more JSON.
    """
    base = table.cell_of(variant, host, accumulation, uneven)
    extra = dict(changes.pop("extra", {}))
    if zero:
        extra = jobs.merged(extra, {"zero_optimization": zero})
    return replace(base, extra=extra, **changes)


def reports(rank: int, size: int, cells: list[Cell]) -> list[Report]:
    """Train every cell for ``STEPS`` applied steps; the data of a step depends on it alone."""
    gc.collect()
    gc.freeze()  # ZeRO 3 collects garbage at its start: half of the time of a small cell
    return [_report(rank, size, item) for item in cells]


def differences(found: list[Report], cells: list[Cell], variants: list[str]) -> dict[str, float]:
    """Largest relative weight difference of each cell to the fp64 oracle of its variant."""
    return {
        f"{index} {variant} Z{item.host} {item.accumulation} {item.extra}": difference(
            report.weights, table.oracle(variant)
        )
        for index, (report, item, variant) in enumerate(zip(found, cells, variants, strict=True))
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative difference of any weight."""
    return max(
        float((found[name].double() - value.double()).norm() / value.double().norm())
        for name, value in expected.items()
    )


def movement_error(found: dict[str, Tensor], exact: dict[str, Tensor], start: nn.Module) -> float:
    """Error of the weights' total movement, relative to its size (docs/adr/0006).

    Args:
        found: Weights by name.
        exact: What they should be, fp64.
        start: Holds the weights before training.
    """
    begun = {name: param.detach().double() for name, param in start.named_parameters()}
    error = sum(float((found[n].double() - w).square().sum()) for n, w in exact.items())
    moved = sum(float((w - begun[n]).square().sum()) for n, w in exact.items())
    return float((error / moved) ** 0.5)


def assert_close(size: int, cells: list[Cell], variants: list[str], found: list[Report]) -> None:
    """Every cell agrees with the oracle of its variant, within the variant's tolerance."""
    measured = differences(found, cells, variants)
    text = "\n".join(f"{size} ranks, {name}: {value:.1e}" for name, value in measured.items())
    print("\n" + text)
    limits = [table.VARIANTS[variant][2] for variant in variants]
    assert all(v <= limit for v, limit in zip(measured.values(), limits, strict=True)), "\n" + text


def assert_identical(first: Report, second: Report) -> None:
    """Weights and factors are equal to the last bit, applied steps and refreshes too."""
    for name, value in first.weights.items():
        assert torch.equal(value, second.weights[name]), name
    for name, both in first.factors.items():
        for one, other in zip(both, second.factors[name], strict=True):
            assert torch.equal(one, other), name
    for name in ("steps", "captures", "refreshes", "preconditions"):
        assert first.counters[name] == second.counters[name], name


def _report(rank: int, size: int, item: Cell) -> Report:
    engine = jobs.make_engine(item, size)
    kfac = engine.kfac
    norms, scales = [], []
    for _ in range(MAX_ATTEMPTS):
        step = kfac.counters.steps
        if step == jobs.STEPS:
            break
        scales.append(kfac._host.stored_scale())
        for x, y, factor in jobs.micro_batches(rank, size, item, step):
            output = engine(x.to(jobs.DTYPES[item.dtype]))
            engine.backward(jobs.loss_sum(output, y, integers=item.integers) * factor)
            if engine.managed_gradient_accumulation():
                engine.step()
        if not engine.managed_gradient_accumulation():
            engine.step()
        assert engine.was_step_applied() == (kfac.counters.steps == step + 1)
        if engine.was_step_applied():
            norms.append(float(engine.get_global_grad_norm()))
    report = Report(
        jobs.full_weights(engine),
        {name: kfac.factors(name) for name in kfac.owners},
        dict(vars(kfac.counters)),
        norms,
        scales,
        type(engine.optimizer).__name__,
    )
    engine.destroy()
    return report


def engine_of(net: nn.Module, config: dict[str, Any]) -> Any:
    """A real engine with K-FAC over any network."""
    deepspeed_cpu.prepare()
    params = [param for param in net.parameters() if param.requires_grad]
    return ds_kfac.initialize(model=net, model_parameters=params, config=config)[0]


def config_of(
    stage: int, size: int, kfac: dict[str, Any], *, zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    """JSON with plain SGD, no clipping and fp32: what is applied is the direction alone."""
    return {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "kfac": {
            "direction": "natural",
            "damping": 0.3,
            "kl_clip": None,
            "factor_update_steps": 1,
            "inv_update_steps": 1,
            "factor_decay": 0.95,
            **kfac,
        },
    }
