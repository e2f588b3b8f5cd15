"""A SGLang server of our own for the time of a measurement."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridspec.errors import EnvironmentMissing
from hybridspec.sglang_plugin.server_api import ServerApi

_TAIL_LINES = 15
_POLL_SECONDS = 0.5
_STOP_SECONDS = 30.0


@contextmanager
def running(
    arguments: Sequence[str], *, port: int, variables: Mapping[str, str], log: Path, boot_s: float
) -> Iterator[ServerApi]:
    """Start a server, wait until it is ready, and end it with all its processes.

    Args:
        arguments: behind the Python interpreter, with `port` among them.
        variables: added to the environment.
        log: file for what the server writes.
        boot_s: longest time until it is ready, s.

    Raises:
        EnvironmentMissing: it ended or was not ready in time; with the end of its log.
    """
    api = ServerApi(f"http://127.0.0.1:{port}")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        until = time.monotonic() + boot_s
        while not api.healthy():
            if process.poll() is not None:
                raise EnvironmentMissing(_failed(f"ended with {process.returncode}", log))
            if time.monotonic() > until:
                raise EnvironmentMissing(_failed(f"was not ready within {boot_s:g} s", log))
            time.sleep(_POLL_SECONDS)
        yield api
    finally:
        _stop(process)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _failed(what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"SGLang {what}; the end of {log}: " + " | ".join(line.strip() for line in lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group: ranks outlive a server that is killed alone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
