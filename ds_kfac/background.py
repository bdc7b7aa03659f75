"""Work on a thread of its own while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pause = Callable[[], None]


class _CancelledError(Exception):
    """The result is not wanted any more."""


class Background(Generic[T]):
    """One piece of work at a time, beside the training thread.

    Torch releases Python's lock inside its operations, so that a thread is enough. It works with
    as many threads of its own as the training thread has, so that a result does not depend on
    where it was computed. On an accelerator it works in a stream of its own.

    The thread is not a daemon: the interpreter waits for it, as torch cannot be torn down
    under a running operation, but it ends at the next pause.

    Args:
        device: Device of the tensors that are worked on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None  # one for all: the allocator keeps a pool for every stream
        self._task: _Task[T] | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is work that nobody has asked the result of."""
        return self._task is not None

    def start(self, work: Callable[[Pause], T]) -> None:
        """Begin.

        Args:
            work: Touches nothing that others change; calls its argument now and then. It is kept
                until its kernels are done, and so is all that it refers to.

        Raises:
            RuntimeError: The earlier work has not been asked for, or there is no thread to be had.
        """
        if self._task is not None:
            raise RuntimeError("the earlier work has not been finished")
        if self._device.type != "cpu" and self._stream is None:
            self._stream = _module(self._device).Stream(device=self._device)
        task = _Task(work, self._stream, self._device)
        task.start()
        self._task = task

    def finish(self) -> T:
        """Wait for the result.

        Raises:
            Exception: What the work raised; it counts as asked for.
        """
        task, self._task = self._task, None
        assert task is not None, "nothing was started"
        return task.finish()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Say that this thread's stream uses what the work has allocated.

        When such a tensor is freed, the work's stream must not write there before this one is
        done reading.
        """
        if self._stream is not None:
            current = _module(self._device).current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(current)

    def cancel(self) -> None:
        """Forget the work; returns once its thread has ended."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()


class _Task(Generic[T]):
    def __init__(self, work: Callable[[Pause], T], stream: Any, device: torch.device) -> None:
        self._work: Callable[[Pause], T] | None = work
        self._stream, self._device = stream, device
        self._threads = torch.get_num_threads()
        self._stop = threading.Event()
        self._results: list[T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ds_kfac-background", daemon=False)

    def start(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(_module(self._device).current_stream(self._device))
        self._thread.start()

    def finish(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results.pop()

    def cancel(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        assert self._work is not None
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            with torch.no_grad(), self._in_stream():
                try:
                    self._results.append(self._work(self._pause))
                finally:  # what the work refers to is freed below, and may be overwritten then
                    if self._stream is not None:
                        self._stream.synchronize()
        except Exception as error:
            self._error = error
        self._work = None

    def _in_stream(self) -> AbstractContextManager[None]:
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[None] = _module(self._device).stream(self._stream)
        return context

    def _pause(self) -> None:
        if self._stop.is_set() or not threading.main_thread().is_alive():
            raise _CancelledError("the process ends, or the result is not wanted any more")


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
