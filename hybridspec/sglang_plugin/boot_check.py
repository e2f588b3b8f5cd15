"""The worker's side of the self-check: starts it, watches for other requests, applies its verdict.

The verdict comes from a process of its own (`self_check`). What follows is one fill on the device
between two rounds, in stream order: the tables go to their best fixed lengths, as with a bundle of
another machine. Nothing else of the engine is touched.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridspec.sglang_plugin.policy import DevicePolicy
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.self_check import LENGTHS, Attempt, Settings, attempts_of

logger = logging.getLogger(__name__)

MODULE = "hybridspec.sglang_plugin.self_check"
DRIFT = 0.10
LIMIT_SECONDS = 700.0
# Requests by which SGLang finds out whether it is alive; one token each.
_HEALTH = "HEALTH_CHECK"


def why_not(policy: DevicePolicy, server: Mapping[str, Any]) -> str | None:
    """Why a server is not checked, None where it is.

    Args:
        server: fields of its `ServerArgs`.
    """
    if policy.tables is None or policy.static:
        return "no costs are in use"
    if int(server.get("tp_size") or 1) > 1:
        return "ranks must change to a fixed length in the same round, and only one is told"
    if int(server.get("dp_size") or 1) > 1 or int(server.get("nnodes") or 1) > 1:
        return "requests go to several replicas"
    if server.get("ssl_certfile"):
        return "the server speaks HTTPS"
    if ":" in str(server.get("host") or ""):
        return "the server listens on IPv6"
    return None


def url_of(server: Mapping[str, Any]) -> str:
    """Address of a server from its own machine."""
    host = str(server.get("host") or "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{server['port']}"


class BootCheck:
    """One check after one start.

    Args:
        policy: whose tables go to fixed lengths where costs have drifted.
        counters: telemetry that is told.
        settings: of `self_check.Settings`, without `key`.
        command: that checks; it reads the settings and writes the result as its last line.

    Attributes:
        done: whether nothing more will come of it.
    """

    def __init__(
        self,
        policy: DevicePolicy,
        counters: RoundCounters,
        settings: Mapping[str, Any],
        *,
        command: Sequence[str] = (sys.executable, "-m", MODULE),
    ) -> None:
        self._policy = policy
        self._counters = counters
        self._key = f"hybridspec-self-check-{secrets.token_hex(4)}"
        self._settings = {**settings, "key": self._key}
        self._command = list(command)
        self._seen = False
        # When requests of others ran, of the monotonic clock.
        self._others_s: list[float] = []
        self._verdict: str | None = None
        self.done = False
        counters.tell(self_check="runs")
        self._thread = threading.Thread(target=self._run, name="self-check", daemon=True)
        self._thread.start()

    def before_batch(self, rids: Iterable[str]) -> None:
        """Before a prefill or a round: notice requests of others, apply a verdict."""
        if self.done:
            return
        if self._verdict is not None:
            assert self._policy.tables is not None
            self._policy.tables.set_static()
            self.done = True
            return
        for rid in rids:
            if rid.startswith(self._key):
                self._seen = True
            elif not rid.startswith(_HEALTH):
                self._others_s.append(time.monotonic())
                break

    def wait(self, timeout_s: float) -> None:
        """Wait until the check has ended; for tests."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            found = self._ask()
            attempts = attempts_of(found)
            problem = "" if attempts else str(found.get("problem", "no result"))
        except (OSError, ValueError, TypeError, LookupError, subprocess.SubprocessError) as error:
            attempts, problem = [], f"the check ended with {type(error).__name__}: {error}"
        counted = [attempt for attempt in attempts if self._counts(attempt)]
        if attempts and not self._seen:
            problem = "its requests went to another server"
        elif attempts and not counted:
            problem = "other requests were served meanwhile"
        if problem:
            logger.info("HYBRIDSPEC: costs are not checked: %s", problem)
            self._counters.tell(self_check="not checked")
            self.done = True
            return
        last = counted[-1]
        told = ", ".join(f"{n} rows {100 * (r - 1):+.1f} %" for n, r in sorted(last.ratios.items()))
        times = f" at attempt {attempts.index(last) + 1}" if len(attempts) > 1 else ""
        ratios = dict(last.ratios)
        if not last.drifted(DRIFT):
            logger.info("HYBRIDSPEC: rounds take what the bundle says (%s)%s", told, times)
            self._counters.tell(self_check="passed", self_check_ratios=ratios)
            self.done = True
            return
        verdict = (
            f"rounds of one request do not take what the bundle says ({told}{times}; up to "
            f"{100 * DRIFT:.0f} % is in order): from now on every round takes the bundle's best "
            "fixed length; measure again with `hybridspec profile-latency --engine sglang`, or "
            "set self_check to false"
        )
        logger.warning("HYBRIDSPEC: %s", verdict)
        self._counters.tell(self_check="drifted", self_check_ratios=ratios, lengths=verdict)
        self._verdict = verdict

    def _counts(self, attempt: Attempt) -> bool:
        """Whether an attempt says something: alone on the server, or in order beside others, who
        make rounds longer.
        """
        inside = (attempt.began_s <= at <= attempt.ended_s for at in list(self._others_s))
        return not any(inside) or not attempt.drifted(DRIFT)

    def _ask(self) -> dict[str, Any]:
        # One thread: the engine's host side needs its cores. No GPU: nothing there uses one.
        quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            self._command,
            input=json.dumps(self._settings),
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            return {"problem": said[-1] if said else f"exit code {done.returncode}"}
        found = json.loads((done.stdout.strip().splitlines() or [""])[-1])
        return found if isinstance(found, dict) else {"problem": "no result"}


def start_check(
    policy: DevicePolicy,
    counters: RoundCounters,
    server: Mapping[str, Any],
    *,
    bundle: Path,
    max_length: int,
) -> BootCheck | None:
    """Start the check of a server, or say why there is none."""
    reason = why_not(policy, server)
    if reason is not None:
        logger.info("HYBRIDSPEC: costs are not checked: %s", reason)
        counters.tell(self_check="not checked")
        return None
    settings = asdict(
        Settings(
            url=url_of(server),
            api_key=server.get("api_key"),
            bundle=str(bundle),
            target=str(server["model_path"]),
            key="",
            lengths=tuple(length for length in LENGTHS if length <= max_length),
            drift=DRIFT,
        )
    )
    return BootCheck(policy, counters, settings)
