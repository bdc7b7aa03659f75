r"""Time and accuracy of the solvers, against a matrix product and against float64.

    python benchmarks/solvers.py

Factors have eigenvalues from 1 down to 1 over the condition number, evenly in the logarithm, in a
random basis. The error is that of ``(F + damping * mean(F) I)^-1 w`` for random rows ``w``,
relative to the same in float64. All solvers work in turn on the same matrices; times are medians,
in products of two matrices of that size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import tables  # noqa: E402
from ds_kfac.math.solvers import damped_inverses, eigen_bases  # noqa: E402

Solve = Callable[[Tensor, Tensor], Tensor]
"""Inverse of ``F + shift I``, ``[n, n]``, from ``F`` in fp32 and a 0-d shift."""


def factor(n: int, condition: float, seed: int = 0) -> Tensor:
    """A symmetric ``[n, n]`` float64 matrix with that condition number."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, n, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(normal)[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    matrix: Tensor = (basis * values) @ basis.mT
    return (matrix + matrix.mT) / 2


def _eigen(matrix: Tensor, shift: Tensor) -> Tensor:
    basis = eigen_bases(matrix[None])[0]
    vectors, values = basis.vectors[0], basis.values[0]
    return (vectors / (values + shift)) @ vectors.mT


def _cholesky(matrix: Tensor, shift: Tensor) -> Tensor:
    return damped_inverses(matrix[None], shift[None])[0].inverse[0]


def _inv(matrix: Tensor, shift: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.inv(matrix + shift * torch.eye(len(matrix)))
    return inverse


SOLVERS: dict[str, Solve] = {
    "eigen": _eigen,
    "cholesky": _cholesky,
    "torch.linalg.inv": _inv,  # kfac-pytorch's inverse method
}


def measure(
    n: int, conditions: Sequence[float], damping: float, repeats: int
) -> dict[str, dict[str, float]]:
    """Time and largest errors of every solver.

    Args:
        n: Size of the factors.
        conditions: Their condition numbers; a factor of each.
        damping: In units of the mean eigenvalue.
        repeats: Times that everything is timed.

    Returns:
        By solver: ``time`` in products, and the error by condition number.
    """
    matrices = [factor(n, condition) for condition in conditions]
    rows = torch.randn(16, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result: dict[str, dict[str, float]] = {name: {} for name in SOLVERS}
    for condition, matrix in zip(conditions, matrices, strict=True):
        shift = damping * matrix.diagonal().mean()
        exact = torch.linalg.solve(matrix + shift * torch.eye(n, dtype=torch.float64), rows.mT).mT
        for name, solve in SOLVERS.items():
            found = rows.float() @ solve(matrix.float(), shift.float())
            error = (found.double() - exact).norm() / exact.norm()
            result[name][f"{condition:.0e}"] = float(error)
    matrix = matrices[0].float()
    shift = damping * matrix.diagonal().mean()
    times: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for _ in range(repeats):
        product = _seconds(torch.matmul, matrix, matrix)
        for name, solve in SOLVERS.items():
            times[name].append(_seconds(solve, matrix, shift) / product)
    for name, found_times in times.items():
        result[name]["time"] = statistics.median(found_times)
    return result


def _seconds(work: Callable[..., Tensor], *arguments: Tensor) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024], help="of factors")
    cli.add_argument(
        "--conditions", type=float, nargs="+", default=[1e2, 1e4, 1e6, 1e8], help="numbers"
    )
    cli.add_argument("--damping", type=float, nargs="+", default=[0.1, 1e-3], help="relative")
    cli.add_argument("--repeats", type=int, default=7, help="of the timing (7)")
    cli.add_argument("--threads", type=int, default=1, help="of torch (1)")
    cli.add_argument("--out", type=Path, default=Path("runs/solvers"), help="output folder")
    cli.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    names = [f"{condition:.0e}" for condition in args.conditions]
    rows = [["solver", "n", "damping", "products", *(f"error at {name}" for name in names)]]
    values: dict[str, dict[str, float]] = {}
    for n in args.sizes:
        for damping in args.damping:
            found = measure(n, args.conditions, damping, args.repeats)
            for name, entry in found.items():
                errors = [f"{entry[condition]:.1e}" for condition in names]
                rows.append([name, str(n), f"{damping:g}", f"{entry['time']:.1f}", *errors])
            group = f"n {n}, damping {damping:g}"
            values[group] = {name: max(entry[c] for c in names) for name, entry in found.items()}
    tables.publish(
        args.out,
        "solvers",
        rows,
        values,
        markdown=args.markdown,
        title="time in matrix products of the size, and relative error in fp32",
        label="largest relative error",
        logarithmic=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
