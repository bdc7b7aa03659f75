"""Persistent pools of gloo worker processes, one pool per world size.

Starting a fresh interpreter with torch takes seconds per rank; a forkserver that has torch loaded
forks a worker in milliseconds, and keeping workers between tests saves even that. A pool is thrown
away as soon as its state is in doubt: a rank died, hung, or failed differently from its peers.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests._harness import collectives, worker
from tests._harness.errors import (
    JOB_TIMEOUT,
    PROCESS_DIED,
    STRAGGLER,
    CollectiveMismatchError,
    ErrorInfo,
    WorldError,
)

MAX_WORLD = 4
DEFAULT_TIMEOUT = 60.0
DEFAULT_PG_TIMEOUT = 30.0
DEFAULT_GRACE = 15.0
_START_TIMEOUT = 120.0
# Engines leave process groups behind, also destroyed ones, and each has three threads of gloo that
# wake up a hundred times a second for ever: with 600 in every worker, idle pools took half of the
# machine.
_MAX_THREADS = 150
# torch._dynamo is imported by the first optimizer step and pytest by the workers' __main__.
_preloaded = ["torch", "torch.distributed", "torch._dynamo", "pytest"]
_worlds: dict[int, World] = {}


def preload(*modules: str) -> None:
    """Have the forkserver import `modules` too; without effect once the first pool has started.

    A module that is not installed is skipped.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


def world(size: int) -> World:
    """The shared pool of `size` ranks; its processes start with the first job.

    Args:
        size: Number of ranks, 1 to 4.

    Returns:
        The pool, the same object at every call.
    """
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size]


def close_all() -> None:
    """Stop every worker process."""
    while _worlds:
        _worlds.popitem()[1].close()


atexit.register(close_all)


class World:
    """Runs functions on all ranks of a gloo group.

    Args:
        size: Number of ranks, 1 to 4.

    Raises:
        ValueError: If `size` is out of range.
    """

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_WORLD:
            raise ValueError(f"world size {size} is not between 1 and {MAX_WORLD}")
        self.size = size
        self._group: _WorkerGroup | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        compare_collectives: bool = True,
        isolated: bool = False,
        pg_timeout: float = DEFAULT_PG_TIMEOUT,
        grace: float = DEFAULT_GRACE,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank.

        Args:
            fn: Module-level callable (or a ``functools.partial`` of one).
            *args: Picklable arguments, the same for all ranks.
            timeout: Wall-clock seconds; then all stacks are dumped and the pool is killed.
            compare_collectives: Fail if the ranks' collective calls differ.
            isolated: Use fresh processes, stopped afterwards: for code with process-global state.
            pg_timeout: Seconds until a collective gives up; other than 30 implies `isolated`.
            grace: Seconds the other ranks get to finish once one rank has failed.

        Returns:
            The results, index = rank.

        Raises:
            WorldError: If any rank failed.
            CollectiveMismatchError: If the collective calls differ.
        """
        replies = self._dispatch(fn, args, timeout, isolated, pg_timeout, grace)
        errors = [reply.error for reply in replies]
        if any(error is not None for error in errors):
            raise WorldError(_name(fn), errors)
        if compare_collectives:
            self._check_collectives(fn, replies)
        return [pickle.loads(reply.payload) for reply in replies]

    def run_expecting_errors(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        compare_collectives: bool = True,
        isolated: bool = False,
        pg_timeout: float = DEFAULT_PG_TIMEOUT,
        grace: float = DEFAULT_GRACE,
    ) -> list[ErrorInfo | None]:
        """Like `run`, but failures are the result: per rank an `ErrorInfo`, or None.

        Collective calls are compared only if all ranks failed alike: after a one-sided failure
        they must differ.

        Raises:
            CollectiveMismatchError: If all ranks failed alike but their collective calls differ.
        """
        replies = self._dispatch(fn, args, timeout, isolated, pg_timeout, grace)
        if compare_collectives and _failed_alike(replies):
            self._check_collectives(fn, replies)
        return [reply.error for reply in replies]

    def pids(self) -> list[int]:
        """Process ids of the live workers; empty before the first job and after a kill."""
        return [] if self._group is None else self._group.pids()

    def close(self) -> None:
        """Stop the workers; the next job starts new ones."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _dispatch(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        isolated: bool,
        pg_timeout: float,
        grace: float,
    ) -> list[worker.Reply]:
        request = pickle.dumps((fn, args))
        if isolated or pg_timeout != DEFAULT_PG_TIMEOUT:
            group = _WorkerGroup(self.size, pg_timeout)
            try:
                return group.run(request, timeout, grace)
            finally:
                group.close()
        if self._group is None:
            self._group = _WorkerGroup(self.size, pg_timeout)
        try:
            replies = self._group.run(request, timeout, grace)
        except BaseException:  # KeyboardInterrupt above all: the ranks are still working
            self.close()
            raise
        clean = all(reply.error is None for reply in replies) or _failed_alike(replies)
        in_step = collectives.compare([reply.records for reply in replies]) is None
        usable = all(reply.usable and reply.threads <= _MAX_THREADS for reply in replies)
        if not (clean and in_step and usable):
            self.close()
        return replies

    def _check_collectives(self, fn: Callable[..., Any], replies: Sequence[worker.Reply]) -> None:
        difference = collectives.compare([reply.records for reply in replies])
        if difference is not None:
            raise CollectiveMismatchError(f"{_name(fn)}: {difference}")


class _WorkerGroup:
    """The processes behind a pool."""

    def __init__(self, size: int, pg_timeout: float) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kfac-world-"))
        self._specs = [
            worker.WorkerSpec(rank, size, self._directory, pg_timeout) for rank in range(size)
        ]
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[connection.Connection] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_preloaded))
        # Inherited by the forkserver, so they hold before any worker imports torch.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for spec in self._specs:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker.main, args=(spec, theirs), daemon=True)
            self._pipes.append(ours)
            process.start()
            self._processes.append(process)
            theirs.close()
        errors = [reply.error for reply in self._collect(_START_TIMEOUT, _START_TIMEOUT)]
        if any(error is not None for error in errors):
            raise WorldError("start of the workers", errors)

    def run(self, request: bytes, timeout: float, grace: float) -> list[worker.Reply]:
        for pipe in self._pipes:
            with suppress(BrokenPipeError, ConnectionResetError):  # dead rank: _collect reports it
                pipe.send_bytes(request)
        return self._collect(timeout, grace)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid and process.is_alive()]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle worker leaves its loop
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes.clear()
        self._processes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, timeout: float, grace: float) -> list[worker.Reply]:
        """One reply per rank; ranks that give none are described and killed."""
        replies: dict[int, worker.Reply] = {}
        deadline = time.monotonic() + timeout
        missing = JOB_TIMEOUT, f"no result after {timeout:g} s"
        while len(replies) < len(self._specs):
            waiting = [spec.rank for spec in self._specs if spec.rank not in replies]
            watched: list[Any] = [self._pipes[rank] for rank in waiting]
            watched += [self._processes[rank].sentinel for rank in waiting]
            if not connection.wait(watched, max(0.0, deadline - time.monotonic())):
                replies |= self._kill(waiting, *missing)
                break
            for rank in waiting:
                reply = self._poll(rank)
                if reply is not None:
                    replies[rank] = reply
            failed = [rank for rank, reply in replies.items() if reply.error is not None]
            if failed and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                missing = STRAGGLER, f"no result {grace:g} s after rank {failed[0]} had failed"
        return [replies[spec.rank] for spec in self._specs]

    def _poll(self, rank: int) -> worker.Reply | None:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            # The pipe first: a worker that answered and then died has answered.
            if pipe.poll():
                reply = pickle.loads(pipe.recv_bytes())
                assert isinstance(reply, worker.Reply)
                return reply
        except (EOFError, OSError):
            process.join(5.0)
        if process.is_alive():
            return None
        text = f"exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            text = f"killed by {signal.Signals(-process.exitcode).name}"
        return self._lost(rank, PROCESS_DIED, text)

    def _kill(self, ranks: Sequence[int], type_name: str, text: str) -> dict[int, worker.Reply]:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if all(self._specs[rank].stacks.stat().st_size for rank in ranks):
                time.sleep(0.1)  # let the writers finish
                break
            time.sleep(0.02)
        for rank in ranks:
            self._processes[rank].kill()
            self._processes[rank].join()
        return {rank: self._lost(rank, type_name, text) for rank in ranks}

    def _lost(self, rank: int, type_name: str, text: str) -> worker.Reply:
        spec = self._specs[rank]
        stacks = spec.stacks.read_text(errors="replace") if spec.stacks.exists() else ""
        output = spec.output.read_text(errors="replace")[-4000:] if spec.output.exists() else ""
        note = stacks or "no stack dump: the process was dead or stopped"
        error = ErrorInfo(rank, type_name, text, note, (type_name,), output)
        return worker.Reply(error=error, usable=False)


def _failed_alike(replies: Sequence[worker.Reply]) -> bool:
    errors = {reply.error and reply.error.same_error for reply in replies}
    return len(errors) == 1 and None not in errors and all(reply.usable for reply in replies)


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", repr(fn))
