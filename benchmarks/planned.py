r"""What moves, and what is kept, against AdamW and an all-reduce of full factors.

    python benchmarks/planned.py communication
    python benchmarks/planned.py memory

Bytes come from ``ds-kfac plan``: the program that attach executes, which tests compare with the
ledgers and the memory of real engines byte for byte (``tests/hosts/test_plan.py``). So any number
of ranks takes seconds. The model is the linear layers of a GPT's blocks, in their order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import tables  # noqa: E402
from ds_kfac.cli import plan as planner  # noqa: E402
from ds_kfac.cli.plan_source import Settings  # noqa: E402
from ds_kfac.config import OPTIMIZER_DEFAULTS, KFACConfig  # noqa: E402
from ds_kfac.owner import resolve_momentum  # noqa: E402
from ds_kfac.plan.estimate import Estimate  # noqa: E402

MODELS = {"125m": (768, 12), "1.3b": (2048, 24)}
"""Width and blocks."""
STAGES = (0, 1, 2, 3)
GOAL = 0.25
"""Bytes of factors per capture, of an fp32 all-reduce of full factors."""
Values = dict[str, dict[str, float]]


def blocks(width: int, count: int) -> nn.Module:
    """The linear layers of a GPT's blocks on the meta device."""
    dims = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return nn.Sequential(
        *(nn.Linear(a, b, bias=False, device="meta") for _ in range(count) for a, b in dims)
    )


def plan(
    model: nn.Module, *, ranks: int, stage: int, own: bool, dtype: torch.dtype = torch.float32
) -> Estimate:
    """Plan a run with the defaults.

    Args:
        model: On the meta device.
        ranks: Data-parallel ranks.
        stage: ZeRO stage.
        own: Optimizer type KFAC (``orthogonal``) instead of ``natural`` beside AdamW.
        dtype: Of stored gradients.
    """
    config = KFACConfig(**(OPTIMIZER_DEFAULTS if own else {}))
    settings = Settings(
        kfac=config,
        momentum=resolve_momentum(config, own_optimizer=own),
        own_optimizer=own,
        stage=stage,
        gradients=dtype,
    )
    options = argparse.Namespace(ranks=ranks, tokens_per_rank=None, flops=None, bandwidth=None)
    return planner.run(model, settings, options)[1]


def full_factors(estimate: Estimate) -> float:
    """Bytes that a rank sends in a ring all-reduce of full fp32 factors, not cut into blocks."""
    numel = sum(spec.d_out**2 + spec.columns**2 for spec in estimate.specs)
    return 2 * (estimate.size - 1) / estimate.size * numel * 4


def communication(model: nn.Module, ranks: Sequence[int]) -> tuple[list[list[str]], Values]:
    """Bytes that a rank sends at most, as shares of what others send.

    Args:
        model: On the meta device.
        ranks: Numbers of data-parallel ranks.
    """
    rows = [["ZeRO, ranks", "factors", "gradients", "directions", "aligned layers", "their bytes"]]
    values: Values = {}
    for size in ranks:
        for stage in STAGES:
            found = plan(model, ranks=size, stage=stage, own=False)
            gradient = 4 * sum(spec.numel for spec in found.specs)
            most = {
                kind: max(rank[kind] for rank in found.ordinary) / gradient
                for kind in ("gradients", "directions")
            }
            factors = found.capture / full_factors(found)
            aligned, moved = aligned_layers(found)
            label = f"ZeRO {stage}, {size} ranks"
            cells = [f"{factors:.3f}", *(f"{share:.3f}" for share in most.values())]
            rows.append([label, *cells, f"{aligned} of {len(found.specs)}", str(moved)])
            values[label] = {"factors per capture": factors, **most}
    return rows, values


def aligned_layers(estimate: Estimate) -> tuple[int, int]:
    """Layers whose owner holds their whole gradient alone, and the elements of theirs that move."""
    exchange = estimate.program.exchange
    holders: dict[int, set[int]] = {}
    for segment in exchange.segments:
        holders.setdefault(segment.layer, set()).add(segment.holder)
    aligned = {n for n, ranks in holders.items() if ranks == {exchange.owners[n]}}
    moved = sum(
        segment.numel
        for rank in range(estimate.size)
        for part in (*exchange.outgoing(rank), *exchange.incoming(rank))
        for segment in part
        if segment.layer in aligned
    )
    return len(aligned), moved


def adamw_bytes(numel: int, *, stage: int, ranks: int) -> float:
    """Weights, gradients and Adam's moments of a rank in fp32."""
    weights, gradients, moments = 4.0 * numel, 4.0 * numel, 8.0 * numel
    return (
        weights / (ranks if stage == 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + moments / (ranks if stage >= 1 else 1)
    )


def memory(model: nn.Module, ranks: Sequence[int]) -> tuple[list[list[str]], Values]:
    """State and peak of the fullest rank over AdamW's training state; arguments as above.

    Type KFAC has no moments of Adam for its layers: they are subtracted.
    """
    rows = [["ZeRO, ranks", "AdamW MiB"]]
    rows[0] += [
        f"{name} {what}" for name in ("natural", "orthogonal") for what in ("state", "peak")
    ]
    values: Values = {}
    numel = sum(param.numel() for param in model.parameters())
    for size in ranks:
        for stage in STAGES:
            base = adamw_bytes(numel, stage=stage, ranks=size)
            spared = 8.0 * numel / (size if stage >= 1 else 1)
            row, group = [f"ZeRO {stage}, {size} ranks", f"{base / 2**20:,.0f}"], {}
            for name, own in (("natural", False), ("orthogonal", True)):
                found = plan(model, ranks=size, stage=stage, own=own).memory
                for what in ("state", "peak"):
                    total = base + max(getattr(rank, what) for rank in found)
                    share = (total - (spared if own else 0.0)) / base
                    group[f"{name}, {what}"] = share
                    row.append(f"{share:.2f}")
            rows.append(row)
            values[row[0]] = group
    return rows, values


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("what", choices=("communication", "memory"))
    cli.add_argument("--model", choices=sorted(MODELS), default="125m", help="sizes (125m)")
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64], help="2 8 64")
    cli.add_argument("--out", type=Path, default=Path("runs/planned"), help="output folder")
    cli.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(arguments)
    if min(args.ranks) < 2:
        print("error: --ranks has to be 2 or more", file=sys.stderr)
        return 2
    model = blocks(*MODELS[args.model])
    compare = communication if args.what == "communication" else memory
    rows, values = compare(model, args.ranks)
    title, label = {
        "communication": (
            "bytes that a rank sends: factors per capture over an fp32 all-reduce of full "
            "factors, the others per step over all gradients of the layers",
            "share",
        ),
        "memory": (
            "the fullest rank over AdamW's weights, gradients and moments (fp32)",
            "of AdamW's",
        ),
    }[args.what]
    tables.publish(
        args.out,
        f"{args.what}-{args.model}",
        rows,
        values,
        markdown=args.markdown,
        title=f"GPT-{args.model}; {title}",
        label=label,
        goal=GOAL if args.what == "communication" else None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
