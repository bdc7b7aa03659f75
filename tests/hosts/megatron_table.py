"""Every layout of megatron-core against the fp64 oracle: python -m tests.hosts.megatron_table."""

from __future__ import annotations

import argparse
import time

from tests._harness import World
from tests.hosts import megatron_cells as cells
from tests.hosts import megatron_jobs as jobs

HEADER = f"{'layout':30} ranks   weights   allowed      norm        KL  applied"


def line(name: str, ranks: int, cell: jobs.Cell, pool: World) -> tuple[str, bool]:
    """Train one cell.

    Returns:
        Its line of the table, and whether it is as close as it has to be.
    """
    reports = pool.run(
        jobs.train, cell, timeout=120, compare_collectives=False, isolated=cell.wrappers
    )
    want, report = cells.expected(cell), reports[0]
    gap = jobs.difference(jobs.all_whole(reports), want.weights)
    norms = [norm for norm, ok in zip(report.norms, report.applied, strict=True) if ok]
    norm = max(abs((a or 0.0) - b) for a, b in zip(norms, want.norms, strict=True))
    kl = abs(report.kl_scales[-1] - want.kl_scale)
    limit = cells.tolerance(cell)
    applied = f"{report.applied.count(True)} of {len(report.applied)}"
    text = f"{name:30} {ranks:5}  {gap:8.1e}  {limit:8.0e}  {norm:8.1e}  {kl:8.1e}  {applied}"
    return text + ("" if gap <= limit else "  TOO FAR"), gap <= limit


def main() -> int:
    """Print the table; 1 if a cell is too far from the oracle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    chosen = parser.parse_args().only
    pools: dict[int, World] = {}
    print("Largest difference to a single-process fp64 oracle, relative to the largest element:")
    print(HEADER)
    started, failed = time.monotonic(), 0
    for name, (ranks, cell) in sorted(cells.TABLE.items(), key=lambda item: item[1][0]):
        if chosen in name:
            pool = pools.setdefault(ranks, World(ranks))
            text, close = line(name, ranks, cell, pool)
            failed += not close
            print(text, flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{failed} too far, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
