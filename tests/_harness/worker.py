"""What runs inside a worker process: join the group, then serve jobs until the pipe closes."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests._harness import collectives, faults
from tests._harness.errors import ErrorInfo

_TAIL = 4000  # characters of a rank's output shown with its error


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs to join its group.

    Attributes:
        rank: Global rank.
        world_size: Number of workers.
        directory: Private folder of the group: rendezvous file, outputs, stack dumps.
        pg_timeout: Seconds after which a collective gives up.
    """

    rank: int
    world_size: int
    directory: Path
    pg_timeout: float

    @property
    def output(self) -> Path:
        """File that receives stdout and stderr."""
        return self.directory / f"rank{self.rank}.out"

    @property
    def stacks(self) -> Path:
        """File that receives Python stacks on SIGUSR1."""
        return self.directory / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Reply:
    """Answer of one rank to one job.

    Attributes:
        payload: Pickled result; empty if the job failed.
        error: The failure, if any.
        records: Collective calls of the job.
        usable: Whether the worker can serve another job.
        threads: Threads of the process, as far as the system tells.
    """

    payload: bytes = b""
    error: ErrorInfo | None = None
    records: list[collectives.CollectiveRecord] = field(default_factory=list)
    usable: bool = True
    threads: int = 0


def main(spec: WorkerSpec, pipe: connection.Connection) -> None:
    """Entry point of a worker process."""
    _redirect_output(spec.output)
    stacks = spec.stacks.open("w")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _set_environment(spec)
    torch.set_num_threads(1)
    collectives.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.directory / 'rendezvous'}",
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=spec.pg_timeout),
    )
    gc.freeze()  # keeps the collection after every job cheap
    pipe.send_bytes(pickle.dumps(Reply()))
    _serve(spec, pipe)
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(spec: WorkerSpec, pipe: connection.Connection) -> None:
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        environment = dict(os.environ)
        _reset_process_state()
        offset = spec.output.stat().st_size
        reply = _run(spec, request, offset)
        _reset_process_state()
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
        try:
            pipe.send_bytes(pickle.dumps(reply))
        except (BrokenPipeError, OSError):
            return


def _run(spec: WorkerSpec, request: bytes, offset: int) -> Reply:
    error: ErrorInfo | None = None
    payload = b""
    with collectives.recording() as records:
        try:
            job: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(request)
            function, args = job
            payload = pickle.dumps(function(spec.rank, spec.world_size, *args))
        # SystemExit and pytest's outcome exceptions included: the worker has to survive them.
        except BaseException as caught:
            error = ErrorInfo.from_exception(spec.rank, caught)
    if error is not None:
        error = ErrorInfo(**{**vars(error), "output": _read_tail(spec.output, offset)})
    return Reply(payload, error, records, usable=dist.is_initialized(), threads=_threads())


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _read_tail(path: Path, offset: int) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")[-_TAIL:]


def _reset_process_state() -> None:
    """Give every job the same start, whatever the previous one left behind."""
    faults.disarm()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    random.seed(0)
    torch.manual_seed(0)


def _set_environment(spec: WorkerSpec) -> None:
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.world_size),
        # Read by frameworks that insist on them; the rendezvous is a file, nobody connects here.
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _die_with_parent() -> None:
    """A killed pytest must not leave workers behind that wait in a collective."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
