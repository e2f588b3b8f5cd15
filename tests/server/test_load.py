"""Many requests, clients that leave, full queues and engines that fail."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest

from hybridspec.artifacts.tables import HazardTable, StepCostTable, ThroughputTable
from hybridspec.policy import Policy
from hybridspec.telemetry import DriftMonitor

if TYPE_CHECKING:
    from conftest import Served, Serving

LONG = {"model": "micro", "prompt": "def f(x):\n", "temperature": 0, "max_tokens": 4000,
        "hybridspec": {"off": True}}  # fmt: skip


def eventually(condition: Callable[[], bool], *, within_s: float = 5.0) -> float:
    """Wait for a condition and return how long it took, seconds."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < within_s, "the condition did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - start


@contextlib.contextmanager
def raw_request(served: Served, **changes: Any) -> Iterator[socket.socket]:
    """Send a request on a socket of its own, so that the test decides when it closes."""
    body = json.dumps({**LONG, **changes}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def active(served: Served) -> float:
    return served.metric("hybridspec_active_slots")


def waiting(served: Served) -> float:
    return served.metric("hybridspec_queue_depth")


def test_closed_stream_frees_its_slot(served: Served, client: openai.OpenAI) -> None:
    stream: Any = client.completions.create(
        model="micro", prompt="x", temperature=0, max_tokens=4000, stream=True
    )
    next(iter(stream))
    assert active(served) == 1
    stream.close()
    eventually(lambda: active(served) == 0, within_s=2.0)
    assert served.engine.free_slots == served.engine.max_batch


@pytest.mark.parametrize("stream", [False, True])
def test_hang_up_frees_its_slot(served: Served, stream: bool) -> None:
    labels = {"status": "499", "finish_reason": "cancelled"}
    before = served.metric("hybridspec_requests_total", **labels)
    with raw_request(served, stream=stream):
        eventually(lambda: active(served) == 1)
    eventually(lambda: active(served) == 0, within_s=2.0)
    assert served.engine.free_slots == served.engine.max_batch
    eventually(lambda: served.metric("hybridspec_requests_total", **labels) == before + 1)


def test_full_server_waits_refuses_and_recovers(serving: Serving) -> None:
    with serving(max_batch=1, queue_limit=1) as served, served.client() as client:

        def ask() -> Any:
            return client.completions.create(model="micro", prompt="x", max_tokens=3)

        with raw_request(served) as first:
            eventually(lambda: active(served) == 1)
            with raw_request(served, stream=True):
                eventually(lambda: waiting(served) == 1)
                with pytest.raises(openai.RateLimitError) as caught:
                    ask()
                assert caught.value.code == "queue_full"
                assert caught.value.response.headers["retry-after"] == "1"
                assert "at most 1 may wait" in str(caught.value)
            # The waiting client left: its place in the queue is free at once.
            eventually(lambda: waiting(served) == 0, within_s=2.0)
            with ThreadPoolExecutor(1) as pool:
                later = pool.submit(ask)
                eventually(lambda: waiting(served) == 1)
                first.close()
                assert later.result(timeout=20).usage.completion_tokens == 3
        assert served.metric("hybridspec_requests_total", status="429") == 1


def test_long_request_does_not_starve_a_new_one(served: Served, client: openai.OpenAI) -> None:
    with raw_request(served):
        eventually(lambda: active(served) == 1)
        answer = client.completions.create(model="micro", prompt="x", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert active(served) == 1
    eventually(lambda: active(served) == 0)


def test_rounds_run_on_while_prompts_are_prefilled(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one prefill lies between two steps, however many requests arrive together."""
    calls: list[str] = []
    for name in ("add", "step"):
        real = getattr(served.engine, name)

        def spy(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(served.engine, name, spy)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                client.completions.create, model="micro", prompt=[7] * 300, max_tokens=30, seed=seed
            )
            for seed in range(8)
        ]
        assert all(answer.result(timeout=60).choices for answer in asked)
    assert calls.count("add") == 8
    assert "add add" not in " ".join(calls)


@pytest.mark.parametrize("broken", ["step", "add"])
def test_failing_engine_fails_requests_and_health(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with serving(max_batch=1) as served, served.client() as client, ThreadPoolExecutor(1) as pool:
        stream: Any = client.completions.create(
            model="micro", prompt="x", temperature=0, max_tokens=4000, stream=True
        )
        next(iter(stream))
        queued = pool.submit(client.completions.create, model="micro", prompt="x")
        eventually(lambda: waiting(served) == 1)

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory, say")

        monkeypatch.setattr(served.engine, broken, fail)
        if broken == "step":
            with pytest.raises(openai.APIError, match="out of memory, say"):
                list(stream)
        else:
            stream.close()
        with pytest.raises(openai.InternalServerError, match="out of memory, say") as caught:
            queued.result(timeout=20)
        assert caught.value.status_code == 500
        assert caught.value.code == "engine_failed"
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        assert "out of memory, say" in health.json()["reason"]
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(model="micro", prompt="x")
        assert late.value.status_code == 503
        assert served.metric("hybridspec_healthy") == 0
        assert active(served) == waiting(served) == 0


def test_shutdown_finishes_what_was_accepted(serving: Serving) -> None:
    with serving() as served, served.client() as client, ThreadPoolExecutor(1) as pool:
        asked: Any = pool.submit(
            client.completions.create, model="micro", prompt="x", max_tokens=400, temperature=0
        )
        eventually(lambda: active(served) == 1)
        served.http.should_exit = True
        assert asked.result(timeout=20).usage.completion_tokens == 400


def test_shutdown_gives_up_after_its_time(serving: Serving) -> None:
    with serving(drain_s=0.2) as served, raw_request(served) as connection:
        eventually(lambda: active(served) == 1)
        served.http.should_exit = True
        answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 503")
    assert served.engine.free_slots == served.engine.max_batch


def test_draining_server_refuses(serving: Serving) -> None:
    with serving() as served, served.client() as client:
        served.state.scheduler.begin_drain(5.0)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="micro", prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert httpx.get(f"{served.url}/health").status_code == 503


def policy_predicting(latency_us: float) -> Policy:
    """A policy whose cost table says that every round takes `latency_us`."""
    times = np.full((1, 1, 17), latency_us)
    return Policy(
        HazardTable("raw", np.zeros(5), np.zeros(15), np.array([0.0, 1.0]), np.array([0.0, 1.0])),
        StepCostTable(
            np.array([1]), np.array([512]), times, times, times, np.array([[latency_us]]), 0.0, 1.0
        ),
        ThroughputTable(np.array([1]), np.array([1.5 / latency_us]), np.array([3])),
    )


def test_drift_from_the_cost_table_makes_lengths_static(serving: Serving) -> None:
    with serving(drift=DriftMonitor(steps=20), policy=policy_predicting(1.0)) as served:
        assert httpx.get(f"{served.url}/health").json()["policy_active"] is True
        assert served.metric("hybridspec_policy_active") == 1
        with served.client() as client:
            answer: Any = client.completions.create(
                model="micro", prompt="x", max_tokens=240, temperature=0
            )
        # The table's best fixed length, with its reason, from the declaration on.
        assert answer.hybridspec["lengths"][3] > 0
        (reason,) = answer.hybridspec["fallbacks"]
        assert "cost table" in reason
        assert served.metric("hybridspec_bundle_drift_total") == 1
        assert served.metric("hybridspec_fallback_total", reason=reason) > 0
        assert served.metric("hybridspec_round_time_drift_ratio") > 1.15
        assert served.metric("hybridspec_policy_active") == 0
        assert served.metric("hybridspec_rounds_total", mode="policy") > 0
        assert served.metric("hybridspec_predicted_round_seconds_total") > 0
        assert httpx.get(f"{served.url}/health").json()["policy_active"] is False


def test_request_caps_the_policy(serving: Serving) -> None:
    with serving(policy=policy_predicting(1e9)) as served, served.client() as client:
        for cap in (2, 16):
            answer: Any = client.completions.create(
                model="micro", prompt="x", max_tokens=40, temperature=0,
                extra_body={"hybridspec": {"max_length": cap}},
            )  # fmt: skip
            # All lengths have the same price, so the longest allowed one is worth it.
            assert answer.hybridspec["lengths"][cap] == answer.hybridspec["rounds"]
