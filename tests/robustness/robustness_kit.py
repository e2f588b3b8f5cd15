"""A server of the embedded pair in a process of its own, and what that process holds."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
MODEL = "embedded"
SLOTS = 4


def bundle_kit() -> Any:
    """The small bundles of the tests of the readers."""
    if str(ARTIFACTS) not in sys.path:
        sys.path.insert(0, str(ARTIFACTS))
    return importlib.import_module("bundle_kit")


@dataclass(frozen=True)
class Server:
    """A running `hybridspec serve`."""

    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One call on a connection of its own: status and bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a request; the caller reads or hangs up."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(head.encode() + data)
        return connection

    def metric(self, name: str) -> float:
        """A metric without labels."""
        _, text = self.ask("GET", "/metrics")
        for line in text.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def memory_mib(self) -> float:
        """Resident memory of the process, MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


@contextmanager
def serving(*words: object, port: int = 0) -> Iterator[Server]:
    """Start a server and stop it."""
    words = ("--max-context", 512, "--served-model-name", MODEL, *words)
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "serve", "--port", str(port)]
        + [str(word) for word in ("--threads", 1, "--max-batch", SLOTS, *words)],
        # One arena: glibc's others keep freed memory, up to some 100 MiB, which hides a leak.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("listening "):
                break
        assert process.poll() is None, lines
        yield Server(int(lines[-1].split(":")[2].split("/")[0]), process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
