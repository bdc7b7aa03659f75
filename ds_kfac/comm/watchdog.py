"""Ends a job that would wait for ever, and says where it waits and for whom.

Two threads per rank. One looks at this rank's own position; the other answers roll calls that
any rank makes through the job's key-value store. As long as nothing takes too long, nothing is
written there. A rank that does not answer a roll call is stopped, gone or cut off; one that
answers says what it does instead.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.progress import Progress, Wait

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Of ranks that the watchdog ends; EX_TEMPFAIL of sysexits.h: the job may be tried again."""
SHARE = 0.8
"""Of the process group's own timeout: names have to be said before the backend kills."""
_SLOWEST_TICK = 1.0
_FASTEST_TICK = 0.05
_T = TypeVar("_T")


@dataclass(frozen=True)
class Timing:
    """How long the watchdog waits.

    Attributes:
        timeout: Seconds in one collective after which the job ends.
    """

    timeout: float

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(_SLOWEST_TICK, max(_FASTEST_TICK, self.timeout / 20))

    @property
    def patience(self) -> float:
        """Seconds that other ranks have to answer a roll call."""
        return max(0.5, 4 * self.tick)


def watch(communicator: Communicator, timeout: float | None) -> Watchdog | None:
    """Start a watchdog. A collective over all ranks of the model.

    Args:
        communicator: All ranks of the model; its progress is watched.
        timeout: Seconds; 0 is off, None is :data:`SHARE` of the group's own timeout.

    Returns:
        None where there is nobody to wait for, or the watchdog is off.
    """
    if communicator.size == 1 or timeout == 0:
        return None
    token = communicator.gather_objects(secrets.token_hex(8))[0]
    if timeout is None:
        timeout = SHARE * communicator.timeout
    store = dist.distributed_c10d._get_default_store()
    # A connection of its own: a thread that waits for the store must not block others.
    own = store.clone() if hasattr(store, "clone") else store
    prefixed = dist.distributed_c10d.PrefixStore(f"ds_kfac/{token}", own)
    return Watchdog(communicator.progress, prefixed, Timing(float(timeout)))


class Watchdog:
    """Threads of one rank.

    Args:
        progress: This rank's position.
        store: Shared by all ranks, for this watchdog alone.
        timing: How long it waits.
    """

    def __init__(self, progress: Progress, store: Any, timing: Timing) -> None:
        self._progress, self._store, self._timing = progress, store, timing
        self._rank = dist.get_rank()
        self._answered = 0
        self._stop = threading.Event()
        self._ending = threading.Lock()
        progress.explain = self.explain
        for work in (self._answer, self._look):
            threading.Thread(target=work, name="ds_kfac watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the threads."""
        self._progress.explain = None
        self._stop.set()

    def explain(self, wait: Wait) -> str:
        """Call the roll, and say who is missing in a collective."""
        answers = self._within(lambda: self._roll_call(wait.ranks))
        return absent(wait, self._rank, answers)

    # ------------------------------------------------------------------ own position

    def _look(self) -> None:
        seen: Wait | None = None
        waited, before = 0.0, time.monotonic()
        while not self._stop.wait(self._timing.tick):
            now = time.monotonic()
            wait = self._progress.waits
            # A job that was suspended as a whole has not waited meanwhile.
            passed = min(now - before, 2 * self._timing.tick)
            waited = waited + passed if wait is not None and wait is seen else 0.0
            seen, before = wait, now
            if wait is not None and waited > self._timing.timeout:
                self._end_job(wait, waited)

    def _end_job(self, wait: Wait, waited: float) -> None:
        missing = self.explain(wait)
        if self._progress.waits is not wait:
            return  # they have come after all
        text = (
            f"KFAC-E122 {wait}: rank {self._rank} has waited {waited:.3g} s; {missing}. All ranks "
            f"end with exit code {EXIT_CODE}; start again from the last checkpoint. "
            f"kfac.watchdog_timeout is {self._timing.timeout:.3g} s"
        )
        first = self._within(lambda: self._alarm(text))
        self._abort(first or text)

    def _alarm(self, text: str) -> str:
        """Tell all ranks; of several texts the first one counts."""
        return bytes(self._store.compare_set("alarm", "", text)).decode() or text

    # ------------------------------------------------------------------ other ranks

    def _answer(self) -> None:
        while not self._stop.wait(self._timing.tick):
            try:
                self._publish()
                if self._answered and self._store.check(["alarm"]):
                    self._abort(bytes(self._store.get("alarm")).decode())
            except Exception:  # the process that hosts the store has ended
                logger.debug("the watchdog answers no more", exc_info=True)
                return

    def _publish(self) -> None:
        number = self._answered + 1
        if not self._store.check([f"roll/{number}"]):
            return
        wait = self._progress.waits
        answer = {
            "place": self._progress.place if wait is None else wait.place,
            "seconds": self._progress.seconds if wait is None else time.monotonic() - wait.begun,
            "waits": None if wait is None else [list(wait.ranks), wait.number, wait.kind],
            "counts": [[list(ranks), n] for ranks, n in list(self._progress.counts.items())],
        }
        self._store.set(f"at/{number}/{self._rank}", json.dumps(answer))
        self._answered = number

    def _roll_call(self, ranks: Sequence[int]) -> dict[int, Any]:
        number = self._answered + 1
        self._store.set(f"roll/{number}", "")
        deadline = time.monotonic() + self._timing.patience
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            time.sleep(self._timing.tick / 2)
            for rank in ranks:
                key = f"at/{number}/{rank}"
                if rank not in answers and self._store.check([key]):
                    answers[rank] = json.loads(bytes(self._store.get(key)))
        return answers

    def _within(self, work: Callable[[], _T]) -> _T | None:
        """Use the store, whose host may be the very process that is stopped; None if it is."""
        results: list[_T] = []

        def run() -> None:
            with suppress(Exception):
                results.append(work())

        thread = threading.Thread(target=run, name="ds_kfac roll call", daemon=True)
        thread.start()
        thread.join(2 * self._timing.patience)
        return results[0] if results else None

    def _abort(self, text: str) -> None:
        """End this process; nothing less gets a rank out of a collective."""
        if not self._ending.acquire(blocking=False):
            return  # the other thread is at it
        with suppress(Exception):
            faulthandler.dump_traceback(all_threads=True)
        self._within(lambda: logger.critical("%s", text))  # the last words, below the stacks
        time.sleep(self._timing.patience)  # others read the alarm, maybe from a store in here
        os._exit(EXIT_CODE)


def absent(wait: Wait, rank: int, answers: dict[int, Any] | None) -> str:
    """Who is missing in a collective, in words.

    Args:
        wait: The collective.
        rank: This rank.
        answers: Position of every rank that answered; None if the store did not.
    """
    if answers is None:
        return (
            "the job's key-value store does not answer: the process that hosts it (rank 0, or the "
            "launcher) is stopped, gone or cut off"
        )
    silent = [r for r in wait.ranks if r not in answers and r != rank]
    late = [r for r in wait.ranks if r in answers and r != rank and not _came(answers[r], wait)]
    if not silent and not late:
        return "all ranks have come: the network or a device hangs"
    texts = [f"absent ranks: {', '.join(map(str, sorted([*silent, *late])))}"]
    if silent:
        names = ", ".join(map(str, silent))
        texts.append(f"no sign of life from rank {names} (stopped, gone or cut off)")
    for r in late[:8]:
        does = "is in" if answers[r]["waits"] is None else "waits in another collective,"
        texts.append(f"rank {r} {does} {answers[r]['place']} for {answers[r]['seconds']:.3g} s")
    return "; ".join(texts)


def _came(answer: Any, wait: Wait) -> bool:
    """Whether a rank has entered a collective."""
    counts: dict[tuple[int, ...], int] = {
        tuple(ranks): number for ranks, number in answer["counts"]
    }
    return counts.get(wait.ranks, 0) >= wait.number
