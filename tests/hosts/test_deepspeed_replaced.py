"""Backward passes whose gradients DeepSpeed replaces by those of a later one."""

from __future__ import annotations

import pytest

from tests._harness import world
from tests.hosts import deepspeed_cells, replaced_jobs
from tests.hosts import topology_table as table

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist


def test_statistics_are_replaced_together_with_gradients() -> None:
    """Rows of a batch that was given up went into the factors although its gradient did not.

    ZeRO 1 and 2 keep the gradient of the last pass alone (offloaded: of two), ZeRO 3 after
    ``optimizer.zero_grad()``.
    """
    ways = [("1", "again"), ("1", "zero_grad"), ("2", "again"), ("3", "zero_grad")]
    cells = [(deepspeed_cells.cell("natural", host), how) for host, how in ways]
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    cells.append((deepspeed_cells.cell("natural", "2", zero=offload), "again"))
    cells.append((deepspeed_cells.cell("natural", "2", accumulation=4, zero=offload), ""))
    cells.append((deepspeed_cells.cell("natural", "2", accumulation=4), ""))
    for found in world(2).run(replaced_jobs.train, cells, timeout=240):
        for (cell, how), weights in zip(cells, found, strict=True):
            error = deepspeed_cells.difference(weights, table.oracle("natural"))
            assert error < 1e-5, (cell.host, how, error)


def test_a_new_engine_does_not_inherit_gradients() -> None:
    """One let go of in the middle of accumulation left its gradient to the next one's first step.

    DeepSpeed adds to ``param.grad`` under ZeRO 0 and 1. Statistics began anew, so that K-FAC
    preconditioned rows it had not seen; weights were off by 0.03 after five steps.
    """
    cells = [deepspeed_cells.cell("natural", host, accumulation=4) for host in "01"]
    for found in world(2).run(replaced_jobs.follow, cells):
        for cell, (weights, texts) in zip(cells, found, strict=True):
            error = deepspeed_cells.difference(weights, table.oracle("natural"))
            assert error < 1e-5, (cell.host, error)
            assert {text.split()[0] for text in texts} >= {"KFAC-W117", "KFAC-W119"}
