"""Start scripts as users do, and end all that hangs."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(*command: str, environment: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Run Python with arguments; returns its exit code and output. Kills all of it if it hangs."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s:\n{output}")
    return process.returncode, output
