"""The progress bar of the training scripts."""

import sys
from typing import Any

from tqdm import tqdm

FORMAT = (
    "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]"
)


def bar(name: str, total: int, *, initial: int = 0, shown: bool) -> Any:
    """A bar over optimizer steps; for a log file it is printed seldom.

    Args:
        name: In front of it.
        total: Steps of the whole run.
        initial: Steps that were taken before.
        shown: On one rank of all.
    """
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        bar_format=FORMAT,
        disable=not shown,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no animation
    )


def show(progress: Any, *, loss: float, tokens_per_second: float) -> None:
    """Count one step."""
    postfix = {"loss": f"{loss:.3f}", "tokens/s": f"{tokens_per_second:,.0f}"}
    progress.set_postfix(postfix, refresh=False)
    progress.update()
