"""``factor_micro_batches: "last"``: statistics of one micro-batch that stand for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_kfac
from ds_kfac.errors import UnsupportedError
from tests._harness import world
from tests.hosts import topology_jobs
from tests.hosts.test_plain import SETTINGS, net, sgd
from tests.hosts.topology_jobs import Cell

NATURAL: dict[str, Any] = {"direction": "natural", **SETTINGS}
ACCUMULATION = 3


def factors(rank: int, size: int, host: str, which: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Factors after one step. With ``all``, every micro-batch is a copy of the last one."""
    cell = Cell(host, {**NATURAL, "factor_micro_batches": which}, accumulation=ACCUMULATION)
    parts = topology_jobs.micro_batches(rank, size, cell, 0)
    if which == "all":
        parts = [parts[-1]] * ACCUMULATION
    kfac = (_ddp if host == "ddp" else _engine)(cell, size, parts)
    result = {spec.name: kfac.factors(spec.name) for spec in kfac.layers.layers}
    kfac.detach()
    return result


def _ddp(cell: Cell, size: int, parts: list[tuple[Tensor, Tensor, float]]) -> Any:
    model = DistributedDataParallel(topology_jobs.make_net(cell))
    optimizer = sgd(model.module)
    kfac = ds_kfac.attach(model, optimizer, cell.kfac)
    for index, (x, y, factor) in enumerate(parts):
        model.require_backward_grad_sync = index == len(parts) - 1
        loss = topology_jobs.loss_sum(model(x), y, integers=False)
        (loss * factor / len(parts)).backward()
    optimizer.step()
    return kfac


def _engine(cell: Cell, size: int, parts: list[tuple[Tensor, Tensor, float]]) -> Any:
    engine = topology_jobs.make_engine(cell, size)
    for x, y, factor in parts:
        engine.backward(topology_jobs.loss_sum(engine(x), y, integers=False) * factor)
        engine.step()
    return engine.kfac


@pytest.mark.parametrize("host", ["ddp", "0", "2"])
def test_the_last_micro_batch_stands_for_all(host: str) -> None:
    """Its rows alone are summed; G has the scale of the whole step's objective."""
    last = world(2).run(factors, host, "last")[0]
    copies = world(2).run(factors, host, "all")[0]
    assert last.keys() == copies.keys() == set(topology_jobs.LAYERS)
    for name, expected in copies.items():
        for found, wanted in zip(last[name], expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


def test_loops_that_tell_nobody_are_refused() -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=r"E155.*no_sync\(\).*factor_token_fraction"):
        ds_kfac.attach(model, sgd(model), {**SETTINGS, "factor_micro_batches": "last"})


class Images(nn.Sequential):
    """Convolutions with stride and without batch dimension, and a layer on sequences."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Linear(4, 5))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shape", [(6, 2, 9, 9), (2, 9, 9)])
def test_counts_come_from_shapes_alone(sharing: str, shape: tuple[int, ...]) -> None:
    """Rows and terms of a micro-batch that is counted only are those of one that is summed."""
    from tests.unit.capture.twin import attach

    model = Images().double()
    session, _ = attach(model, weight_sharing=sharing)
    model(torch.randn(shape, dtype=torch.float64)).sum().backward()
    expected = {name: sums.counts() for name, sums in session.drain().items()}
    session.skips_rows = lambda: True
    model(torch.randn(shape, dtype=torch.float64)).sum().backward()
    assert session.pending == {}
    assert session.unused == {name: counts[1:] for name, counts in expected.items()}
    assert session.drain() == {}
