"""bf16, fp16 and torch autocast under every stage; loss scales that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests._harness import world
from tests.hosts import deepspeed_cells as cells
from tests.hosts import topology_jobs as jobs
from tests.hosts import topology_table as table
from tests.hosts.deepspeed_cells import Report, cell
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

ACCUMULATE_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def static(scale: float) -> dict[str, Any]:
    return {"fp16": {"loss_scale": scale}}


def dynamic(power: int, **more: Any) -> dict[str, Any]:
    scale = {"loss_scale": 0, "initial_scale_power": power, "hysteresis": 1, **more}
    return {"fp16": scale}


def autocast(dtype: str) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype}}


def movement_error(report: Report, variant: str) -> float:
    """Error of the weights' total movement against the fp64 oracle, relative."""
    torch.manual_seed(7)
    return cells.movement_error(report.weights, table.oracle(variant), jobs.Net())


def check(found: list[Report], items: list[Cell], limit: float, variant: str = "natural") -> None:
    measured = [movement_error(report, variant) for report in found]
    lines = [
        f"{report.wrapper:<30} Z{item.host} {item.dtype} {item.extra}: {error:.1e}"
        for report, item, error in zip(found, items, measured, strict=True)
    ]
    print("\n" + "\n".join(lines))
    assert max(measured) < limit, "\n" + "\n".join(lines)


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_engines_move_weights_as_the_oracle_does(size: int) -> None:
    """bf16 keeps 8 bits: weights, activations and gradients are off by up to 2^-9 each.

    Damping limits the amplification of that error by the factors' inverses to about 10, so
    that a step may be off by a few percent, wherever gradients are kept. Stage 0 comes out
    far off if the step that its wrapper takes before training is not undone.
    """
    items = [cell("natural", host, dtype="bf16") for host in "0123"]
    items += [
        cell("natural", host, dtype="bf16", accumulation=4, extra=ACCUMULATE_FP32) for host in "123"
    ]
    items += [
        cell("natural", host, dtype="bf16", zero=OFFLOAD, extra=ACCUMULATE_FP32) for host in "13"
    ]
    items += [
        cell("natural", host, dtype="bf16", extra={"communication_data_type": "fp32"})
        for host in "023"
    ]
    found = world(size).run(cells.reports, items, timeout=240)[0]
    check(found, items, 0.06)
    assert found[0].wrapper == "FP16_UnfusedOptimizer"
    assert found[4].wrapper == "BF16_Optimizer"


def positive_reports(rank: int, size: int, items: list[Cell]) -> list[Report]:
    """As ``reports``, on integers that sum to more than the 256 that bf16 counts to."""

    def batch(step: int, *, integers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 5, (128, 8), generator=generator).float()
        return x, torch.randint(1, 3, (128, 24), generator=generator).float()

    original = jobs.batch
    jobs.batch = batch
    try:
        return cells.reports(rank, size, items)
    finally:
        jobs.batch = original


def test_fp32_accumulation_reaches_the_owner() -> None:
    """Sums of integers that fit fp32 and not bf16: exact wherever they are accumulated.

    ``BF16_Optimizer`` holds whole gradients, the others send slices: a wire in the model's
    dtype would round them.
    """
    kfac = {"direction": "orthogonal", **table.INTERVALS, "factor_decay": 0.5}
    places = [("1", {}), ("2", {}), ("3", {}), ("1", OFFLOAD), ("3", OFFLOAD)]
    items = [
        Cell(
            host,
            kfac,
            accumulation=8,
            dtype="bf16",
            integers=True,
            extra={
                **ACCUMULATE_FP32,
                "communication_data_type": "fp32",
                "zero_optimization": zero,
            },
        )
        for host, zero in places
    ]
    expected, *others = world(2).run(positive_reports, items)[0]
    assert expected.wrapper == "BF16_Optimizer"
    for report in others:
        cells.assert_identical(expected, report)


def fused_reports(rank: int, size: int, items: list[Cell]) -> list[Report]:
    """As ``reports``, with the wrapper that DeepSpeed reserves for its fused Adam.

    That optimizer needs a compiler; DeepSpeed tells by the class, so ds_kfac's stands in.
    """
    from deepspeed.runtime import engine as deepspeed_engine

    from ds_kfac import KFACOptimizer

    original = deepspeed_engine.FusedAdam
    deepspeed_engine.FusedAdam = KFACOptimizer
    try:
        return cells.reports(rank, size, items)
    finally:
        deepspeed_engine.FusedAdam = original


def test_fused_wrapper() -> None:
    """``FP16_Optimizer``: bf16, and fp16, whose loss scale the loss never sees (DeepSpeed 0.19)."""
    items = [
        cell("natural", "0", dtype="bf16"),
        cell("natural", "0", dtype="fp16", extra=static(1.0)),
        cell("natural", "0", dtype="fp16", extra=static(1024.0)),
        cell("natural", "0", dtype="fp16", extra=dynamic(16, loss_scale_window=1)),
    ]
    found = world(2).run(fused_reports, items, isolated=True, timeout=240)[0]
    assert {report.wrapper for report in found} == {"FP16_Optimizer"}
    check(found[:1], items[:1], 0.06)
    check(found[1:], items[1:], 0.02)
    cells.assert_identical(found[1], found[2])
    cells.assert_identical(found[1], found[3])


def test_fp16_engines() -> None:
    """fp16 keeps 11 bits (2^-12): all stages, wrappers and offload against the oracle.

    The unfused wrapper of stage 0 divides gradients by a scale that the loss was not
    multiplied by; training is right here in spite of it.
    """
    items = [cell("natural", host, dtype="fp16", extra=static(64.0)) for host in "0123"]
    items += [
        cell(
            "natural",
            host,
            dtype="fp16",
            accumulation=4,
            extra={**static(64.0), **ACCUMULATE_FP32},
        )
        for host in "123"
    ]
    items += [
        cell("natural", host, dtype="fp16", zero=OFFLOAD, extra=static(64.0)) for host in "123"
    ]
    found = world(2).run(cells.reports, items, isolated=True, timeout=240)[0]
    check(found, items, 0.02)
    names = {report.wrapper for report in found}
    assert names == {
        "FP16_UnfusedOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    }


FP16_PLACES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1", {}, {}),
    ("2", {}, ACCUMULATE_FP32),
    ("3", {}, {}),
    ("2", OFFLOAD, {}),
    ("3", OFFLOAD, {}),
]


def test_loss_scale_leaves_no_trace() -> None:
    """Powers of two are exact: weights and factors do not depend on the loss scale.

    Neither on its value, nor on 2^32 overflowing at first (a skipped step leaves no trace in
    weights, factors and counters), nor on its doubling in the middle of the run, where
    DeepSpeed divides a step's gradient by the scale of the next one.
    """
    items = []
    for host, zero, extra in FP16_PLACES:
        for scaling in (
            static(2.0**10),
            static(2.0**12),
            dynamic(32),
            dynamic(10, loss_scale_window=1),
        ):
            items.append(
                cell("eigen_adam", host, dtype="fp16", zero=zero, extra={**extra, **scaling})
            )
    found = world(2).run(cells.reports, items, isolated=True, timeout=240)[0]
    for index, place in enumerate(FP16_PLACES):
        plain, larger, overflowing, growing = found[4 * index : 4 * index + 4]
        cells.assert_identical(plain, larger)
        cells.assert_identical(plain, overflowing)
        cells.assert_identical(plain, growing)
        assert overflowing.scales[0] == 2.0**32, place
        assert overflowing.counters["skipped"] == len(overflowing.scales) - jobs.STEPS >= 10
        assert len(set(growing.scales)) > 2, growing.scales
        assert growing.counters["skipped"] == 0
        torch.testing.assert_close(
            torch.tensor(growing.norms), torch.tensor(plain.norms), rtol=1e-3, atol=0.0
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_autocast(dtype: str) -> None:
    """fp32 weights, half-precision products; with fp16 a gradient scaler at 2^16.

    DeepSpeed keeps autocast in a global of the process: one process per dtype.
    """
    items = [cell("natural", host, extra=autocast(dtype)) for host in "0123"]
    items += [
        cell("natural", host, accumulation=4, zero=OFFLOAD, extra=autocast(dtype)) for host in "23"
    ]
    found = world(2).run(cells.reports, items, isolated=True, timeout=240)[0]
    check(found, items, 0.06 if dtype == "bfloat16" else 0.02)
    assert {scale for report in found for scale in report.scales} == {
        1.0 if dtype == "bfloat16" else 65536.0
    }
    exact = torch.tensor(found[0].norms)
    for report in found:  # of the raw gradient, without the scale
        torch.testing.assert_close(torch.tensor(report.norms), exact, rtol=0.05, atol=0.0)


def bad_statistics(rank: int, size: int, items: list[Cell]) -> list[tuple[bool, dict[str, int]]]:
    """Whether a step moved weights whose inputs on the last rank square to infinity."""
    results = []
    for item in items:
        engine = jobs.make_engine(item, size)
        before = jobs.full_weights(engine)
        for bad in (True, False):
            for x, y, factor in jobs.micro_batches(rank, size, item, 0):
                x = (x * 1e25 if bad and rank == size - 1 else x).to(jobs.DTYPES[item.dtype])
                engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
                engine.step()
            weights = jobs.full_weights(engine)
            moved = any(not torch.equal(weights[n], w) for n, w in before.items())
            assert all(bool(w.isfinite().all()) for w in weights.values())
            assert moved is not bad, (item, bad)
        results.append((moved, dict(vars(engine.kfac.counters))))
        engine.destroy()
    return results


def test_bad_statistics_with_good_gradients_drop_the_step() -> None:
    """Saturated units have finite gradients, which no DeepSpeed optimizer would skip."""
    items = [cell("natural", host) for host in "0123"]
    items += [cell("natural", host, zero=OFFLOAD) for host in "123"]
    items += [cell("natural", host, dtype="bf16") for host in "023"]
    items += [
        cell("natural", "1", dtype="bf16", extra=ACCUMULATE_FP32),
        cell("natural", "2", dtype="bf16", extra={"bf16": {"check_grad_overflow": False}}),
        cell("natural", "2", clipping=0.0, zero={"compute_grad_norm": False}),
    ]
    for moved, counters in world(2).run(bad_statistics, items)[0]:
        assert moved
        assert (counters["skipped"], counters["steps"]) == (1, 1)


def detached(rank: int, size: int) -> tuple[set[str], set[str], list[bool]]:
    """Attributes of the engine and its optimizer with ds_kfac, after it, and who was wrapped."""
    engine = jobs.make_engine(cell("natural", "0", dtype="fp16", extra=static(64.0)), size)
    with_kfac = set(engine.__dict__)
    engine.kfac.detach()
    wrapped = [name in engine.__dict__ for name in ("backward", "_take_model_step", "destroy")]
    return with_kfac, set(engine.optimizer.__dict__), wrapped


def test_detach_leaves_the_engine_as_it_was() -> None:
    """Nothing that was put on the instances stays there."""
    attributes, optimizer, wrapped = world(1).run(detached, isolated=True)[0]
    assert {"backward", "_take_model_step", "destroy"} <= attributes
    assert wrapped == [False, False, False]
    assert "unscale_and_clip_grads" not in optimizer


def overflowing_autocast(rank: int, size: int, items: list[Cell]) -> list[dict[str, Any]]:
    """One step with a loss that overflows fp16 at scale 2^16 on the last rank, then good ones."""
    results = []
    for item in items:
        engine = jobs.make_engine(item, size)
        before = jobs.full_weights(engine)
        scales, moved = [], []
        for attempt in range(4):
            for x, y, factor in jobs.micro_batches(rank, size, item, attempt):
                large = 1e6 if attempt == 0 and rank == size - 1 else 1.0
                loss = jobs.loss_sum(engine(x), y, integers=False) * factor * large
                scales.append(engine.kfac._host.stored_scale())
                engine.backward(loss)
                engine.step()
            weights = jobs.full_weights(engine)
            moved.append(any(not torch.equal(weights[n], w) for n, w in before.items()))
            before = weights
        counters = dict(vars(engine.kfac.counters))
        factors = [engine.kfac.factors(name) for name in engine.kfac.owners]
        finite = all(bool(t.isfinite().all()) for pair in factors for t in pair)
        results.append({"scales": scales, "moved": moved, "counters": counters, "finite": finite})
        engine.destroy()
    return results


def test_autocast_recovers_from_an_overflow() -> None:
    """The step is dropped on all ranks and the scale halves, also where ZeRO would keep it."""
    items = [cell("natural", host, extra=autocast("float16")) for host in "0123"]
    for found in world(2).run(overflowing_autocast, items, isolated=True):
        for item, result in zip(items, found, strict=True):
            assert result["moved"] == [False, True, True, True], (item.host, result)
            assert result["scales"][:2] == [65536.0, 32768.0], (item.host, result)
            assert result["counters"]["skipped"] == 1, item.host
            assert result["counters"]["steps"] == 3, item.host
            assert result["finite"], item.host


def overflow_at_a_fixed_scale(rank: int, size: int, item: Cell) -> None:
    """A NaN under a static loss scale."""
    engine = jobs.make_engine(item, size)
    for x, y, factor in jobs.micro_batches(rank, size, item, 0):
        loss = jobs.loss_sum(engine(x.half()).float(), y, integers=False) * factor
        engine.backward(loss * float("nan"))
        engine.step()


def test_raise_on_nonfinite_counts_under_a_static_scale() -> None:
    """A fixed scale finds nothing by overflowing: ``on_nonfinite: raise`` was ignored there."""
    for host in "02":
        item = cell("natural", host, dtype="fp16", extra=static(64.0))
        item.kfac["on_nonfinite"] = "raise"
        errors = world(2).run_expecting_errors(overflow_at_a_fixed_scale, item)
        assert all(error is not None and "KFAC-E102" in error.text for error in errors), host
