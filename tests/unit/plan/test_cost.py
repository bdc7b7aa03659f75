"""The cost model: numbers by hand, and that more work costs more."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_kfac.plan.cost import direction_flops, factor_numel, refresh_flops, step_flops
from tests.unit.plan.cases import make_spec

DIRECTIONS = ("natural", "ekfac", "eigen_adam", "orthogonal")
SIDE = st.integers(1, 300)


def test_packed_sizes_by_hand() -> None:
    assert factor_numel(make_spec(d_out=4, d_in=3)) == 10 + 10
    assert factor_numel(make_spec(d_out=4, d_in=3, bias=False)) == 10 + 6
    assert factor_numel(make_spec(d_out=4, d_in=3, max_dim=2)) == 2 * 3 + 2 * 3


def test_refresh_by_hand() -> None:
    spec = make_spec(d_out=4, d_in=3, bias=False)
    assert refresh_flops(spec, "eigen") == 10 * (64 + 27)
    assert refresh_flops(spec, "cholesky") == 2 * (64 + 27)


def test_directions_by_hand() -> None:
    spec = make_spec(d_out=4, d_in=3, bias=False)
    two_sided = 2 * 4 * 3 * (4 + 3)
    assert direction_flops(spec, "natural", "cholesky") == two_sided
    assert direction_flops(spec, "natural", "eigen") == 2 * two_sided
    assert direction_flops(spec, "ekfac", "eigen") == 2 * two_sided
    newton_schulz = 5 * (4 * 3 * 3 * 4 + 2 * 27)
    assert direction_flops(spec, "orthogonal", "cholesky") == two_sided + newton_schulz
    wide = make_spec(d_out=2, d_in=5, bias=False)  # one step, then two pairs
    newton_schulz = 3 * (4 * 2 * 2 * 5) + 2 * 8 + 2 * 10 * 8
    assert direction_flops(wide, "orthogonal", "cholesky") == 2 * 2 * 5 * 7 + newton_schulz
    fused = make_spec(d_out=6, d_in=3, bias=False, parts=3)
    parts = 3 * 5 * (4 * 2 * 2 * 3 + 2 * 8)
    assert direction_flops(fused, "orthogonal", "cholesky") == 2 * 18 * 9 + parts


@given(SIDE, SIDE, st.sampled_from(DIRECTIONS), st.sampled_from(["eigen", "cholesky"]))
def test_larger_layers_cost_more(rows: int, columns: int, direction: str, solver: str) -> None:
    cost = [
        step_flops(
            make_spec(d_out=d_out, d_in=d_in),
            direction=direction,
            solver=solver,
            refresh_interval=10,
        )
        for d_out, d_in in ((rows, columns), (rows + 1, columns), (rows, columns + 1))
    ]
    assert 0 < cost[0] < cost[1] and cost[0] < cost[2]


@given(SIDE, SIDE, st.integers(1, 1000))
def test_rarer_refreshes_cost_less(rows: int, columns: int, interval: int) -> None:
    spec = make_spec(d_out=rows, d_in=columns)
    often, seldom = (
        step_flops(spec, direction="natural", solver="eigen", refresh_interval=k)
        for k in (interval, interval + 1)
    )
    assert seldom < often
    assert seldom > direction_flops(spec, "natural", "eigen")


@pytest.mark.parametrize(("rows", "columns"), [*itertools.pairwise((8, 64, 100, 257))])
def test_smaller_blocks_cost_less(rows: int, columns: int) -> None:
    costs = [
        refresh_flops(make_spec(d_out=rows, d_in=columns, max_dim=limit), "eigen")
        for limit in (512, 64, 16, 4)
    ]
    sizes = [
        factor_numel(make_spec(d_out=rows, d_in=columns, max_dim=limit))
        for limit in (512, 64, 16, 4)
    ]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_eigenbases_cost_more_than_cholesky() -> None:
    spec = make_spec(d_out=64, d_in=64)
    assert refresh_flops(spec, "eigen") > refresh_flops(spec, "cholesky")
