"""Several gradient workers per layer: the grid, placement, bytes, memory, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.plan.cost import Work
from ds_kfac.plan.derive import derive, workers
from ds_kfac.plan.estimate import estimate
from ds_kfac.plan.memory import layer_state
from ds_kfac.plan.placement import place_in_columns, place_sides
from ds_kfac.plan.program import basis_numel
from ds_kfac.plan.topology import WorkerGrid
from ds_kfac.plan.traffic import Wire, refresh_bytes
from tests.unit.plan.cases import REPLICATED, make_spec, sharded

WIRE = Wire(4, 4, 1)
SPECS = [make_spec(f"fc{i}", 4 + i, 3 + i) for i in range(5)]
WHOLE = {slot.name: REPLICATED for spec in SPECS for slot in spec.slots}


@st.composite
def grids(draw: st.DrawFn) -> WorkerGrid:
    workers, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return WorkerGrid(workers * columns, workers)


@given(grids())
def test_rows_and_columns_cut_the_ranks_twice(grid: WorkerGrid) -> None:
    for rank in range(grid.size):
        row, column = grid.row(rank), grid.column(rank)
        assert set(row) & set(column) == {rank}
        assert (len(row), len(column)) == (grid.columns, grid.workers)
        assert all(grid.row(other) == row for other in row)
        assert all(grid.column(other) == column for other in column)
        # Every row has a worker of every layer.
        assert {grid.column_of(other) for other in row} == set(range(grid.columns))


@given(grids(), st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=30))
def test_placement_balances_both_kinds_of_work(
    grid: WorkerGrid, costs: list[tuple[float, float]]
) -> None:
    work = [Work(*cost) for cost in costs]
    owners = place_in_columns(work, grid)
    assert owners == place_in_columns(work, grid)
    columns = [0.0] * grid.columns
    refresh = [0.0] * grid.size
    for owner, item in zip(owners, work, strict=True):
        columns[grid.column_of(owner)] += item.direction + item.refresh / grid.workers
        refresh[owner] += item.refresh
    largest = max((item.direction + item.refresh / grid.workers for item in work), default=0.0)
    assert max(columns) - min(columns) <= largest + 1e-9
    for column in range(grid.columns):
        shares = [refresh[rank] for rank in grid.column(column)]
        assert max(shares) - min(shares) <= max((item.refresh for item in work), default=0) + 1e-9


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20),
    st.data(),
)
def test_sides_are_balanced_over_all_ranks(
    size: int, costs: list[tuple[float, float]], data: st.DataObject
) -> None:
    owners = [data.draw(st.integers(0, size - 1)) for _ in costs]
    solvers = place_sides(costs, owners, size=size)
    loads = [0.0] * size
    for pair, ranks in zip(costs, solvers, strict=True):
        for cost, rank in zip(pair, ranks, strict=True):
            loads[rank] += cost
    largest = max((cost for pair in costs for cost in pair), default=0.0)
    assert max(loads) - min(loads) <= largest + 1e-9


def test_a_lent_side_by_hand() -> None:
    """The owner of the only layer keeps the larger side and lends the other one."""
    spec = make_spec(d_out=4, d_in=6, bias=False)
    layouts = {"fc.weight": REPLICATED}
    config = KFACConfig(distribute="factor", solver="cholesky")
    program = derive([spec], layouts, config, size=2)
    assert program.solvers == ((0, 1),)
    (loan,) = program.solving
    assert (loan.side, loan.owner, loan.solver) == ("g", 0, 1)
    assert (loan.factor_numel, loan.basis_numel) == (10 + 1, 16 + 2)
    assert refresh_bytes(program, WIRE) == [
        {"bases": 0, "solving": 44},
        {"bases": 0, "solving": 72},
    ]


@pytest.mark.parametrize(
    ("strategy", "fraction", "size", "count"),
    [
        ("memory", None, 8, 1),
        ("zero_aligned", None, 8, 1),
        ("communication", None, 8, 8),
        ("communication", None, 1, 1),
        ("hybrid", None, 8, 4),
        ("hybrid", 0.25, 8, 2),
        ("hybrid", 1, 6, 6),
        ("hybrid", 1 / 3, 6, 2),
        ("hybrid", 0.01, 8, 1),
        ("hybrid", 0.3, 1, 1),
    ],
)
def test_workers(strategy: str, fraction: float | None, size: int, count: int) -> None:
    config = KFACConfig(strategy=strategy, grad_worker_fraction=fraction)
    assert workers(config, size) == count


@pytest.mark.parametrize(("fraction", "size"), [(0.3, 4), (0.5, 3), (0.75, 4), (0.6, 5)])
def test_fractions_that_do_not_divide_the_ranks(fraction: float, size: int) -> None:
    config = KFACConfig(strategy="hybrid", grad_worker_fraction=fraction)
    with pytest.raises(ConfigError, match=f"E214 .*{fraction:g} of {size} ranks .*{size}/{size}"):
        workers(config, size)


def test_cut_gradients_are_refused_with_the_alternative() -> None:
    layouts = {**WHOLE, "fc1.weight": sharded(SPECS[1].weight.numel, [5], [0, 1])}
    config = KFACConfig(strategy="communication")
    with pytest.raises(UnsupportedError, match=r"E156 .*1 layers .*\(fc1\).*'zero_aligned'"):
        derive(SPECS, layouts, config, size=2)
    alone = {slot.name: sharded(slot.numel, [], [0]) for spec in SPECS for slot in spec.slots}
    assert derive(SPECS, alone, config, size=1).exchange.workers == 1


def test_between_memory_and_communication() -> None:
    """Fewer directions and more bases, replicas and work with every worker more."""
    found = {}
    for count in (1, 2, 4, 8):
        config = KFACConfig(
            strategy="hybrid", grad_worker_fraction=count / 8, direction="eigen_adam"
        )
        found[count] = estimate(SPECS, WHOLE, config, WIRE, size=8, momentum=0.9)
    total = sum(spec.numel for spec in SPECS)
    one = [layer_state(spec, solver="eigen", moments=2, item=4) for spec in SPECS]
    for count, result in found.items():
        moved = sum(entry["directions"] for entry in result.ordinary)
        if count > 1:
            assert moved == 4 * total * 8 * (8 // count - 1) // (8 // count)
        bases = sum(basis_numel(spec, "eigen") for spec in SPECS) if count > 1 else 0
        assert sum(r["bases"] for r in result.refresh) == 4 * bases * (count - 1)
        replicas = sum(memory.replicas for memory in result.memory)
        assert replicas == (count - 1) * sum(part[1] + part[2] + 24 for part in one)
        assert sum(memory.factors for memory in result.memory) == sum(part[0] for part in one)
    assert max(found[8].loads) > max(found[2].loads)
