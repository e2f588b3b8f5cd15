"""`serve` as a process of its own: summary, port, signals, exit codes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.server.run import bind

PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.server.run import serve
pair = sys.argv[1]
engine = load_pair(f"{pair}/target", f"{pair}/drafter", max_batch=2)
sys.exit(serve(engine, Tokenizer.load(f"{pair}/target"), model_name="micro", port=0, drain_s=20))
"""


@contextmanager
def process(pair: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start `serve`; yield the process, the summary and the URL of its API."""
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(pair)], stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    try:
        lines = []
        while not lines or "listening" not in lines[-1]:
            lines.append(running.stderr.readline())
            assert lines[-1], f"serve ended early: {lines}"
        found = re.search(r"http://127\.0\.0\.1:\d+/v1", lines[-1])
        assert found
        yield running, "".join(lines), found[0]
    finally:
        running.kill()
        running.wait()
        running.stderr.close()


@contextmanager
def open_stream(url: str, *, max_tokens: int) -> Iterator[Iterator[str]]:
    body = {
        "model": "micro", "prompt": "x", "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "hybridspec": {"off": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_summary_requests_and_second_interrupt(pair: Path) -> None:
    with process(pair) as (running, summary, url):
        assert "model     micro" in summary
        assert "policy    active: no (every round verifies 16 rows)" in summary
        assert "2 slots of 4096 tokens" in summary
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "micro"
        with open_stream(url, max_tokens=4000):
            running.send_signal(signal.SIGINT)
            assert running.stderr is not None
            assert "Ctrl-C again" in running.stderr.readline()
            started = time.monotonic()
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=10) == 130
            assert time.monotonic() - started < 5
        assert "Traceback" not in running.stderr.read()


def test_requests_that_are_given_up_get_an_error_of_the_api(pair: Path) -> None:
    with process(pair) as (running, _, url), ThreadPoolExecutor(1) as pool:
        body = {
            "model": "micro", "prompt": "x", "max_tokens": 4000, "temperature": 0,
            "hybridspec": {"off": True},
        }  # fmt: skip
        with open_stream(url, max_tokens=4000) as lines:
            whole = pool.submit(httpx.post, f"{url}/completions", json=body, timeout=60)
            while httpx.get(f"{url.removesuffix('/v1')}/health").json()["active"] < 2:
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            assert running.stderr is not None
            assert "Ctrl-C again" in running.stderr.readline()
            running.send_signal(signal.SIGINT)
            *_, last = [line for line in lines if line]
        assert '"code":"shutting_down"' in last
        answer = whole.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert running.wait(timeout=10) == 130
        assert "Traceback" not in running.stderr.read()


def test_first_signal_finishes_the_open_stream(pair: Path) -> None:
    with process(pair) as (running, _, url):
        with open_stream(url, max_tokens=500) as lines:
            running.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert running.wait(timeout=10) == 0
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()


def test_taken_port_is_refused() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentMissing, match=rf"port {port} .* in use.*--port 0"):
            bind("127.0.0.1", port)


def test_ports_and_hosts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="65536"):
        bind("127.0.0.1", 65536)
    with pytest.raises(EnvironmentMissing, match="no address of this machine"):
        bind("192.0.2.1", 0)
    with pytest.raises(EnvironmentMissing, match="no address of this machine"):
        bind("no-such-host.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6() -> None:
    try:
        listener = bind("::1", 0)
    except EnvironmentMissing as error:
        pytest.skip(f"needs an IPv6 loopback: {error}")
    listener.close()
