"""Serves one engine over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.request import LengthRule
from hybridspec.server.app import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_DRAIN_S,
    DEFAULT_QUEUE_LIMIT,
    create_app,
)
from hybridspec.server.state import ServerState

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine
    from hybridspec.reference.tokenizer import Tokenizer

INTERRUPTED = 130
_TICK_S = 0.1
_GIVE_UP_S = 2.0  # for a step of the engine, and errors on their way
_GRACE_S = 3  # after the drain: time for the last answers to leave


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    listener: socket.socket | None = None,
    default_rule: LengthRule | None = None,
    queue_limit: int = DEFAULT_QUEUE_LIMIT,
    chat_tokens: int = DEFAULT_CHAT_TOKENS,
    drain_s: float = DEFAULT_DRAIN_S,
    policy_note: str | None = None,
    engine_note: str | None = None,
    access_log: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code.

    The first signal refuses new requests and finishes the accepted ones (exit 0); a second Ctrl-C
    gives them up at once (exit 130).

    Args:
        host, port: where to listen; port 0 takes any free one.
        listener: a socket of `bind`, instead of `host` and `port`: lets a caller find out that a
            port is taken before it loads a model.
        policy_note: why the policy is active or not, for the summary.
        engine_note: what decodes, where and with how many threads, for the summary.
        say: takes the lines of the summary; standard error by default.

    The remaining arguments are those of `create_app`.

    Raises:
        EnvironmentMissing: the address cannot be listened on.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    listener = listener or bind(host, port)
    app = create_app(
        engine,
        tokenizer,
        model_name=model_name,
        default_rule=default_rule,
        queue_limit=queue_limit,
        chat_tokens=chat_tokens,
        drain_s=drain_s,
    )
    server = HttpServer(app, listener, access_log=access_log)
    for line in summary(app.state.server, policy_note=policy_note, engine_note=engine_note):
        say(line)
    server.on_ready = lambda: say(f"listening {server.url}/v1  (Ctrl-C stops)")
    server.on_drain = lambda: say("stopping: accepted requests finish; Ctrl-C again gives them up")
    server.run(sockets=[listener])
    # A thread inside torch must not outlive the interpreter.
    app.state.server.scheduler.stop(0.0)
    return INTERRUPTED if server.interrupted else 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; port 0 takes any free one.

    Raises:
        UsageError: no port number.
        EnvironmentMissing: the port is taken or forbidden, or the host is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is no port; ports are 0..65535: choose another")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Listening at once, because with SO_REUSEADDR two programs may bind a port but not listen.
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise EnvironmentMissing(_bind_failure(host, port, error)) from None
    return listener


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"host {host!r} is no address of this machine ({error.strerror}); one is needed to "
            "listen on: use 127.0.0.1 (this machine only) or 0.0.0.0 (every network)"
        )
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; one program at a time can listen on it: stop the "
            "other one, choose another --port, or --port 0 for any free one"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"port {port} on {host} is forbidden to this user; ports below 1024 usually are: "
            "choose a --port of 1024 or above"
        )
    return f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another"


def summary(
    state: ServerState, *, policy_note: str | None = None, engine_note: str | None = None
) -> list[str]:
    """Return the lines that tell what is about to be served."""
    engine = state.engine
    if policy_note is None:
        rule = state.default_rule
        policy_note = {
            "none": "plain decoding, nothing is drafted",
            "fixed": f"every round verifies {rule.length} rows",
            "policy": f"the bundle's tables choose 1..{rule.length} rows a round",
        }[rule.kind]
    active = "yes" if state.policy_active else "no"
    return [
        f"model     {state.model_name}",
        *([] if engine_note is None else [f"engine    {engine_note}"]),
        f"policy    active: {active} ({policy_note})",
        f"capacity  {engine.max_batch} slots of {engine.max_context} tokens",
    ]


class HttpServer(uvicorn.Server):
    """Uvicorn around one application and one listening socket; drains on the first signal.

    Attributes:
        on_ready: called once connections are taken.
        on_drain: called when the shutdown begins.
        interrupted: a second Ctrl-C came: what is left is given up.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, access_log: bool = False) -> None:
        self._state: ServerState = app.state.server
        address = listener.getsockname()
        self.url = f"http://{_in_url(address[0])}:{address[1]}"
        self.on_ready: Callable[[], None] = lambda: None
        self.on_drain: Callable[[], None] = lambda: None
        self.interrupted = False
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                access_log=access_log,
                log_config=LOGGING_CONFIG if access_log else None,
                log_level="info" if access_log else "warning",
                timeout_graceful_shutdown=int(self._state.drain_s) + _GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets=sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests first; uvicorn then waits for the open connections."""
        self._state.scheduler.begin_drain(self._state.drain_s)
        self.on_drain()
        ending = asyncio.ensure_future(super().shutdown(sockets=sockets))
        while not ending.done():
            await asyncio.wait([ending], timeout=_TICK_S)
            if self.interrupted:
                # Requests end with the step that runs, as errors of the API.
                self._state.scheduler.begin_drain(0.0)
                await asyncio.wait([ending], timeout=_GIVE_UP_S)
                # Those that did not would each be logged with a traceback.
                logging.getLogger("uvicorn.error").disabled = True
                ending.cancel()
                return
        await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: stop in order. Second Ctrl-C: stop now."""
        # No KeyboardInterrupt: raised inside a request, uvicorn would log and swallow it.
        if self.should_exit and sig == signal.SIGINT:
            self.interrupted = True
        self.should_exit = True


def _in_url(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
