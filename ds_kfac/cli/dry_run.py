"""Start the two processes of a dry run and wait for them, but not for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ds_kfac

RANKS = 2
MODULE = "ds_kfac.hosts.dry_run"
_POLL = 0.05
_GRACE = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a dry run ended.

    Attributes:
        ok: Both ranks trained and agree.
        text: What happened.
        fix: What to do about it.
    """

    ok: bool
    text: str
    fix: str = ""


def run(seconds: float, module: str = MODULE) -> Outcome:
    """Train a tiny model on two processes.

    Args:
        seconds: Both are killed after that time.
        module: What they run, with rank, number of ranks and a shared folder as arguments.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ds-kfac-doctor-") as name:
        folder = Path(name)
        processes = [_start(module, rank, folder) for rank in range(RANKS)]
        try:
            late = not _wait(processes, begun + seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        took = time.monotonic() - begun
        return _outcome(folder, [process.returncode for process in processes], took, late=late)


def _start(module: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    package = str(Path(ds_kfac.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(RANKS), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended, or one has failed; False if none has by the deadline."""
    failed_at = time.monotonic()
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True
        if any(codes):  # the other one has a moment to say what it knows, then it goes too
            deadline = min(deadline, failed_at + _GRACE)
        else:
            failed_at = time.monotonic()
        time.sleep(_POLL)
    return any(process.poll() for process in processes)


def _outcome(folder: Path, codes: Sequence[int], took: float, *, late: bool) -> Outcome:
    if late:
        return Outcome(
            False,
            f"not done after {took:.0f} s: {_last_words(folder)}",
            "give it more time with --timeout; if that does not help, two processes of this "
            "machine cannot reach each other: set GLOO_SOCKET_IFNAME to an interface that works",
        )
    if any(codes):
        ended = ", ".join(str(code) for code in codes)
        return Outcome(
            False,
            f"the ranks ended with codes {ended}: {_last_words(folder)}",
            "if it is about connections, set GLOO_SOCKET_IFNAME to an interface that works "
            "(lo for one machine); otherwise reinstall torch and ds_kfac",
        )
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if result["problem"]:
        return Outcome(False, result["problem"], "report it, with the output of --json")
    losses = result["losses"]
    return Outcome(
        True,
        f"{RANKS} processes, {len(losses)} steps with K-FAC over gloo in {took:.1f} s, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, same weights",
    )


def _last_words(folder: Path) -> str:
    """The last line that each rank wrote."""
    words = []
    for rank in range(RANKS):
        with suppress(OSError):
            lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()
            words += [f"rank {rank}: {line[:300]}" for line in lines[-1:]]
    return "; ".join(words) or "no output"
