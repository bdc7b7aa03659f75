"""Cases of the fault catalogue (docs/guide/reliability.md) that have no other home."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._harness import world
from tests.faults import catalogue_jobs as jobs
from tests.unit.checkpoint.training import assert_identical, make

pytestmark = pytest.mark.dist


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_bad_batch_is_named_with_rank_and_layer() -> None:
    """Case 1. "Non-finite on some rank" left users to search in all of them."""
    first, second = world(2).run(jobs.bad_input)
    assert len(first) == 1 and second == []
    assert re.match(
        r"KFAC-W101 step 1: non-finite gradients or statistics \(rank 0: gradients of 0\.weight.*; "
        r"rank 1: statistics of 0, 2, gradients of .*\); the step is dropped on all ranks",
        first[0],
    ), first[0]


def test_a_rank_without_rows() -> None:
    """Case 13. pytorch#33148: an empty last batch; weight zero, no 0/0, no missing collective."""
    ((alone, factors),) = world(1).run(jobs.no_rows)
    for found, found_factors in world(2).run(jobs.no_rows):
        assert_close(found, alone)
        for name, pair in factors.items():
            for value, expected in zip(found_factors[name], pair, strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_a_layer_that_one_rank_leaves_out() -> None:
    """Case 21. optimizers#149: ranks without a gradient skipped the step and its collectives."""
    ((alone, _),) = world(1).run(jobs.dropped_layer, 5)
    both = world(2).run(jobs.dropped_layer, 5)
    for found, metrics in both:
        assert_close(found, alone)
        assert metrics["steps"] == 5


def test_layers_in_another_order_are_refused() -> None:
    """Case 39. Same-sized exchanges in another order are summed crosswise without a word."""
    errors = world(2).run_expecting_errors(jobs.other_order)
    assert errors[0] is not None and errors[1] is not None
    assert errors[0].same_error == errors[1].same_error
    assert errors[0].text.startswith("KFAC-E203 the set of layers differs between ranks")


@pytest.mark.parametrize(
    ("what", "change"),
    [("module", "Linear -> Linear"), ("weight", "another parameter in weight")],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_replaced_after_attach(size: int, what: str, change: str) -> None:
    """Case 28. Hooks of the old module never fire again: it was no longer preconditioned."""
    errors = world(size).run_expecting_errors(jobs.replaced, what)
    for error in errors:
        assert error is not None
        assert error.text.startswith("KFAC-E133 layer 2 was replaced after K-FAC was attached")
        assert f"({change})" in error.text
    assert len({error.same_error for error in errors if error}) == 1


def test_changed_settings_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case 47. optimizers#278: a resumed run used other settings, and nobody saw it."""
    run = make({**jobs.EVERY_STEP, "damping": 0.5})
    run.step(0)
    run.kfac.save(tmp_path / "kfac")
    run.kfac.detach()
    run = make({**jobs.EVERY_STEP, "damping": 0.25})
    with caplog.at_level(logging.WARNING, "ds_kfac"):
        assert run.kfac.load(tmp_path / "kfac")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("KFAC-W305 kfac settings have changed since the state was saved")
    assert message.endswith(": damping: 0.5 -> 0.25")


@pytest.mark.parametrize("parts", [(4, 1), (1, 4)])
def test_accumulation_changed_at_resume(parts: tuple[int, int], tmp_path: Path) -> None:
    """Case 18. DeepSpeed#8443: weights depended on how a batch was cut."""
    straight = world(2).run(jobs.other_accumulation, str(tmp_path / "same"), (1, 1))[0]
    found = world(2).run(jobs.other_accumulation, str(tmp_path / "other"), parts)[0]
    assert_close(found, straight)


def test_a_save_is_of_the_moment_of_its_call(tmp_path: Path) -> None:
    """Case 57. pytorch#144657: a save in the background wrote values of later steps."""
    run = make(jobs.EVERY_STEP)
    run.step(0)
    before = run.fingerprint()
    run.kfac.save(tmp_path / "kfac")
    state = run.host_state()
    run.step(1)
    run.load_host_state(state)
    assert run.kfac.load(tmp_path / "kfac")
    assert_identical(run.fingerprint(), before)


def test_nothing_keeps_a_detached_preconditioner() -> None:
    """Case 60. Its threads, groups and buffers go with it."""
    assert world(2).run(jobs.forgotten) == [(True, 0)] * 2
