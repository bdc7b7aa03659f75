"""P1: the same global batch gives the same weights however it is cut."""

from __future__ import annotations

import pytest
import torch

from tests._harness import world
from tests.hosts import topology_jobs as jobs
from tests.hosts import topology_table as table
from tests.hosts.topology_jobs import Cell


@pytest.mark.dist
@pytest.mark.parametrize("host", table.HOSTS)
@pytest.mark.parametrize("size", table.SIZES)
def test_weights_match_the_oracle(size: int, host: str) -> None:
    """{1, 2, 4} ranks x {DDP, ZeRO 0, 1, 2} x accumulation x uneven rows x all directions."""
    rows = table.measure(size, host)
    print("\n" + table.format_table(rows))
    assert all(row.passed for row in rows), "\n" + table.format_table(rows)


@pytest.mark.dist
@pytest.mark.parametrize("host", table.HOSTS)
@pytest.mark.parametrize("size", table.SIZES)
def test_exact_sums_give_identical_weights(size: int, host: str) -> None:
    """A basis is not unique where eigenvalues meet, but one owner computes it once.

    With integer data every factor and gradient sum is exact in fp32, whatever its order, so
    that all topologies have to agree to the last bit, degenerate eigenvalues or not.
    """
    baseline = table.measure_exact(1, "ddp")
    for direction, found in table.measure_exact(size, host).items():
        start = dict(jobs.make_net(Cell("ddp", {}, integers=True)).named_parameters())
        for weights in found:
            for name, value in baseline[direction][0].items():
                assert torch.equal(weights[name], value), (direction, name)
                assert not torch.equal(weights[name], start[name]), (direction, name)


@pytest.mark.dist
@pytest.mark.parametrize("host", ["0", "1", "2"])
def test_bf16_engines_move_weights_as_fp32_does(host: str) -> None:
    """bf16 rounds gradients (2^-9) before they are summed, so cuts cannot agree to fp32.

    Whitening amplifies that rounding by up to the damped condition number (about 10 here), so
    that what is comparable is where the weights went: the same way as in fp32.
    """
    cells = [
        Cell(host, {"direction": direction, **table.INTERVALS}, dtype=dtype)
        for direction in ("natural", "orthogonal")
        for dtype in ("fp32", "bf16")
    ]
    start = torch.cat([p.detach().flatten() for p in jobs.make_net(cells[0]).parameters()])
    for size in (1, 2):
        weights = [
            torch.cat([value.flatten() for value in found.values()]) - start
            for found in world(size).run(jobs.train, cells)[0]
        ]
        for exact, rounded in (weights[:2], weights[2:]):
            assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99
            assert 0.9 < rounded.norm() / exact.norm() < 1.1
