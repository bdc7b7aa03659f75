"""P1 as a table: one global batch, cut in every way, against the float64 oracle.

Run ``python -m tests.hosts.topology_table`` to print it; ``test_topology.py`` asserts it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests._harness import close_all, world
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell
from tests.reference.dense_kfac import DenseKFAC
from tests.reference.state import AuxOptions

SIZES = (1, 2, 4)
HOSTS = ("ddp", "0", "1", "2")
CUTS = tuple((accumulation, uneven) for accumulation in (1, 4) for uneven in (False, True))

# name: (settings, optimizer type KFAC, largest relative difference allowed in fp32).
# natural and orthogonal are smooth in the factors. ekfac and eigen_adam depend on the
# eigenvectors themselves, whose error is that of the factor (1e-7) over the spectral gap
# (down to 1e-4 here), and amplify it by dividing by small second moments.
VARIANTS: dict[str, tuple[dict[str, object], bool, float]] = {
    "natural": ({"direction": "natural", "damping": 0.3, "kl_clip": 0.01}, True, 1e-5),
    "natural/sgd": ({"direction": "natural", "damping": 0.3, "kl_clip": 0.01}, False, 1e-5),
    "natural/cholesky": (
        {"direction": "natural", "solver": "cholesky", "damping": 0.3, "grafting": "rms"},
        True,
        1e-5,
    ),
    "orthogonal": ({"direction": "orthogonal", "damping": 0.1, "max_factor_dim": 6}, True, 1e-4),
    "ekfac": ({"direction": "ekfac", "damping": 0.1}, True, 1e-3),
    "eigen_adam": ({"direction": "eigen_adam"}, True, 1e-3),
}
CLIPPING = 0.5  # of the raw gradient: in force in the first steps
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}


@dataclass(frozen=True)
class Row:
    """Largest relative weight difference of each cut of one variant on one host."""

    variant: str
    size: int
    host: str
    differences: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether every cut is within the variant's tolerance."""
        return max(self.differences) <= VARIANTS[self.variant][2]


def cell_of(variant: str, host: str, accumulation: int, uneven: bool) -> Cell:
    """The cell of a variant on a host."""
    settings, own, _ = VARIANTS[variant]
    return Cell(host, {**settings, **INTERVALS}, accumulation, uneven, own, CLIPPING)


@functools.cache
def oracle(variant: str) -> dict[str, Tensor]:
    """Weights of the single-process oracle in float64."""
    settings, own, _ = VARIANTS[variant]
    net = jobs.make_net(cell_of(variant, "ddp", 1, False)).double()
    averages = own or settings["direction"] in ("orthogonal", "eigen_adam")
    optimizer = None
    if not own:
        optimizer = torch.optim.SGD(
            net.parameters(), lr=jobs.LR, momentum=0.9, weight_decay=jobs.DECAY
        )
    options = {"kl_clip": None, "damping": 0.1, **settings}
    if settings["direction"] == "ekfac":
        options["kl_clip"] = 0.001
    reference = DenseKFAC(
        net,
        jobs.LAYERS,
        momentum=0.95 if averages else 0.0,
        optimizer=optimizer,
        lr=jobs.LR,
        weight_decay=jobs.DECAY,
        gradient_clipping=CLIPPING,
        aux=AuxOptions(lr=jobs.AUX_LR, betas=(0.9, 0.95), weight_decay=jobs.DECAY),
        **INTERVALS,
        **options,
    )
    for step in range(jobs.STEPS):
        x, y = jobs.batch(step, integers=False)
        x, y = x.double(), y.double()
        reference.step(lambda x=x, y=y: 0.5 * (net(x) - y).square().sum() / len(x))
    if settings["direction"] in ("ekfac", "eigen_adam"):
        gap = min(reference.spectral_gap(name) for name in jobs.LAYERS)
        assert gap > 1e-5, f"{variant}: eigenvalues meet ({gap:.1e}), its basis is not unique"
    return {name: param.detach() for name, param in net.named_parameters()}


def measure(size: int, host: str) -> list[Row]:
    """All variants and cuts on one host."""
    cells = [cell_of(name, host, *cut) for name in VARIANTS for cut in CUTS]
    weights = world(size).run(jobs.train, cells, timeout=240)[0]
    rows = []
    for index, variant in enumerate(VARIANTS):
        found = weights[index * len(CUTS) : (index + 1) * len(CUTS)]
        differences = tuple(_difference(w, oracle(variant)) for w in found)
        rows.append(Row(variant, size, host, differences))
    return rows


def measure_exact(size: int, host: str) -> dict[str, list[dict[str, Tensor]]]:
    """Weights on integer data, whose sums are exact in fp32, by direction and cut."""
    directions = ("natural", "orthogonal", "ekfac", "eigen_adam")
    settings = {**INTERVALS, "factor_decay": 0.5}
    cells = [
        replace(
            Cell(host, {"direction": direction, **settings}, *cut),
            integers=True,
        )
        for direction in directions
        for cut in CUTS
    ]
    weights = world(size).run(jobs.train, cells, timeout=240)[0]
    count = len(CUTS)
    return {d: weights[i * count : (i + 1) * count] for i, d in enumerate(directions)}


def format_table(rows: list[Row]) -> str:
    """The table as text."""
    heads = [f"acc {a}{' uneven' if u else ''}" for a, u in CUTS]
    lines = [f"{'variant':<17}{'ranks':>6} {'host':<5}" + "".join(f"{h:>14}" for h in heads)]
    for row in rows:
        host = row.host if row.host == "ddp" else f"Z{row.host}"
        cells = "".join(f"{value:>14.1e}" for value in row.differences)
        verdict = "" if row.passed else "   FAILED"
        lines.append(f"{row.variant:<17}{row.size:>6} {host:<5}{cells}{verdict}")
    return "\n".join(lines)


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        float((found[name].double() - value).norm() / value.norm())
        for name, value in expected.items()
    )


def main() -> int:
    """Print the table; exit code 1 when a cell is out of tolerance."""
    torch.set_num_threads(1)
    rows = [row for size in SIZES for host in HOSTS for row in measure(size, host)]
    rows.sort(key=lambda row: (list(VARIANTS).index(row.variant), row.size, row.host))
    print("largest relative weight difference to the float64 oracle, fp32")
    print(format_table(rows))
    baseline = measure_exact(1, "ddp")
    worst = dict.fromkeys(baseline, 0.0)
    for size in SIZES:
        for host in HOSTS:
            for direction, found in measure_exact(size, host).items():
                for weights in found:
                    for name, value in baseline[direction][0].items():
                        gap = float((weights[name] - value).abs().max())
                        worst[direction] = max(worst[direction], gap)
    print("integer data, largest absolute difference between any two topologies:")
    print("  ".join(f"{direction} {value:.1e}" for direction, value in worst.items()))
    close_all()
    return int(not all(row.passed for row in rows) or any(worst.values()))


if __name__ == "__main__":
    sys.exit(main())
