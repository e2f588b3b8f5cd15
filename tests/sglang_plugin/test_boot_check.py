"""The check after a start: what is measured, when it counts, and what its verdict does."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import policy_kit
import pytest
import select_kit
import torch
from sglang_server_kit import SglangLike

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.kernels.draft_features.split import Tiling
from hybridspec.sglang_plugin.boot_check import BootCheck, start_check, url_of, why_not
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import LengthRequest, Row
from hybridspec.sglang_plugin.policy import DevicePolicy, fixed_policy
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.round_state import STATIC_POLICY
from hybridspec.sglang_plugin.rounds import Rounds
from hybridspec.sglang_plugin.self_check import (
    PAUSES_SECONDS,
    READINGS,
    Anchor,
    anchors_of,
    check,
    measure,
    measure_until_known,
    settings_of,
)
from hybridspec.sglang_plugin.server_api import ServerApi

pytest.importorskip("triton", reason="kernels need triton")

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "benchmarks" / "results" / "cpu_demo_bundle"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 64


def policy_of_tables() -> DevicePolicy:
    policy = policy_kit.random_policy(3)
    return DevicePolicy(
        tables=select_kit.packed(policy, DEVICE),
        trees=None,
        batch_sizes=tuple(int(n) for n in policy.throughput.batch_sizes),
        tokens_per_us=tuple(float(lam) for lam in policy.throughput.tokens_per_us),
        fixed_length=6,
        correction="off",
        lookahead=0,
        note="random",
    )


class Checked:
    """A check whose measuring process says what it is told to, and the rounds beside it."""

    def __init__(self, says: str) -> None:
        self.policy = policy_of_tables()
        counters = RoundCounters(DEVICE, max_requests=4)
        self.rounds = Rounds(
            PluginConfig(), self.policy, max_requests=4, history_slots=10, device=DEVICE,
            counters=counters,
        )  # fmt: skip
        self.drafts = self.rounds.make_drafts(
            vocab=VOCAB, vocab_start=0, dtype=torch.float32, tp_group=None,
            tiling=Tiling(vectors=1, num_warps=1),
        )  # fmt: skip
        # It answers once this test has closed its input, so that requests can come before.
        script = f"import sys, time; sys.stdin.read(); time.sleep(0.3); {says}"
        settings = {"url": "http://127.0.0.1:9", "lengths": [1, 4]}
        self.check = BootCheck(
            self.policy, counters, settings, command=(sys.executable, "-c", script)
        )
        self.rid = f"{self.check._key}-0-1"

    def round(self) -> int:
        """Reason of the length of one round."""
        rows = [Row(("r",), 2, LengthRequest())]
        self.check.before_batch(["r"])
        self.rounds.begin(("r",), lambda: rows, lambda: None)
        logits = torch.randn(15, VOCAB, generator=torch.Generator().manual_seed(1)).mul(4)
        self.drafts(logits.to(DEVICE), torch.full((16,), 100, dtype=torch.int64, device=DEVICE))
        return int(self.rounds.state.fallback_B[0])

    @property
    def told(self) -> dict[str, Any]:
        return self.rounds.counters.snapshot()


BEGAN_S = 1e9


def saying(*attempts: dict[int, float]) -> str:
    """A process whose attempts find these ratios, half a second each and one apart."""
    found = [
        {"began_s": BEGAN_S + n - 0.5, "ended_s": BEGAN_S + n, "ratios": ratios}
        for n, ratios in enumerate(attempts)
    ]
    return f"print('log'); print({json.dumps(json.dumps({'attempts': found}))})"


def test_drift_makes_every_round_take_the_fixed_length(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked(saying({1: 2.0}, {1: 1.5}, {1: 1.02, 4: 1.13}))
    assert checked.told["self_check"] == "runs"
    checked.check.before_batch([checked.rid])
    checked.check.wait(20.0)
    with caplog.at_level(logging.WARNING):
        assert checked.round() == STATIC_POLICY
    assert checked.check.done
    assert checked.told["self_check"] == "drifted"
    assert checked.told["self_check_ratios"] == {1: 1.02, 4: 1.13}
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "1 rows +2.0 %, 4 rows +13.0 % at attempt 3" in warning


def test_rounds_as_the_bundle_says_change_nothing() -> None:
    checked = Checked(saying({1: 0.95, 4: 1.09}))
    checked.check.before_batch([checked.rid, "HEALTH_CHECK_1"])
    checked.check.wait(20.0)
    assert checked.told["self_check"] == "passed"
    assert checked.round() != STATIC_POLICY


@pytest.mark.parametrize(
    ("says", "rids"),
    [
        (saying({1: 2.0}), []),
        ("sys.exit(3)", ["own"]),
        ("print('no json')", ["own"]),
        ("print()", ["own"]),
        ("print('{}')", ["own"]),
        ("print('{\"attempts\": [7]}')", ["own"]),
    ],
    ids=["another server", "failed", "no result", "silent", "empty", "no attempts"],
)
def test_a_check_that_says_nothing_changes_nothing(says: str, rids: list[str]) -> None:
    checked = Checked(says)
    for rid in rids:
        checked.check.before_batch([checked.rid if rid == "own" else rid])
    checked.check.wait(20.0)
    assert checked.check.done
    assert checked.told["self_check"] == "not checked"
    assert checked.round() != STATIC_POLICY


DRIFTED, IN_ORDER = {1: 1.3, 4: 1.2}, {1: 1.02, 4: 0.99}


@pytest.mark.parametrize(
    ("attempts", "others_s", "verdict"),
    [
        ([DRIFTED], [-0.2], "not checked"),
        ([DRIFTED, DRIFTED, DRIFTED], [-0.2], "drifted"),
        ([DRIFTED, DRIFTED, DRIFTED], [0.2, 0.4], "drifted"),
        ([DRIFTED, DRIFTED, DRIFTED], [-0.2, 0.8, 1.7], "not checked"),
        ([DRIFTED, DRIFTED, DRIFTED], [0.7, 1.9], "drifted"),
        ([DRIFTED, IN_ORDER], [-0.2, 0.8], "passed"),
        ([DRIFTED, IN_ORDER], [], "passed"),
    ],
    ids=[
        "beside the only one", "beside one", "in a pause", "beside all", "beside the later ones",
        "in order beside others", "alone",
    ],
)  # fmt: skip
def test_requests_of_others_take_away_the_attempts_beside_them(
    attempts: list[dict[int, float]], others_s: list[float], verdict: str
) -> None:
    checked = Checked(saying(*attempts))
    checked.check.before_batch([checked.rid, "HEALTH_CHECK_1"])
    assert not checked.check._others_s
    checked.check.before_batch(["another"])
    assert checked.check._others_s == pytest.approx([time.monotonic()], abs=5.0)
    checked.check._others_s[:] = [BEGAN_S + at for at in others_s]
    checked.check.wait(20.0)
    assert checked.told["self_check"] == verdict


def test_servers_that_cannot_be_checked() -> None:
    policy = policy_of_tables()
    assert why_not(policy, {"tp_size": 1, "host": "0.0.0.0", "ssl_certfile": None}) is None
    for server in (
        {"tp_size": 2}, {"dp_size": 2}, {"nnodes": 2}, {"ssl_certfile": "x"}, {"host": "::"},
    ):  # fmt: skip
        assert why_not(policy, server) is not None, server
    assert why_not(fixed_policy(8, "none"), {}) is not None
    assert why_not(dataclasses.replace(policy, static=True), {}) is not None
    counters = RoundCounters("cpu", max_requests=1)
    assert start_check(policy, counters, {"tp_size": 2}, bundle=BUNDLE, max_length=16) is None
    assert counters.snapshot()["self_check"] == "not checked"
    assert url_of({"host": "0.0.0.0", "port": 7}) == "http://127.0.0.1:7"
    assert url_of({"host": "10.1.2.3", "port": 7}) == "http://10.1.2.3:7"


class Handler(SglangLike):
    """Another model's server, which notes what it is asked."""

    base_us, us_a_row = 4000.0, 400.0
    pair = ("another", "")

    def do_POST(self) -> None:
        assert self.path == "/generate", "nothing of others is stopped"
        super().do_POST()

    def generate(self, body: dict[str, Any]) -> None:
        """Notes request ids and the length of the prompt."""
        (prompt,) = body["input_ids"]
        rids.append((body["rid"], len(prompt)))
        super().generate(body)


rids: list[tuple[list[str], int]] = []


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_measured_over_expected(url: str) -> None:
    anchors = [Anchor(1, 7, 4400.0), Anchor(4, 7, 2800.0)]
    rids.clear()
    ratios = measure(ServerApi(url), anchors, [[1, 2], [3]], key="k")
    assert ratios[1] == pytest.approx(1.0, abs=0.3)
    assert ratios[4] == pytest.approx(2.0, abs=0.5)
    assert len(rids) == 2 * (1 + READINGS)
    assert all(rid.startswith("k-") and length == 7 for (rid,), length in rids)


@pytest.mark.parametrize("slow", range(4))
def test_drift_is_what_every_attempt_finds(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{1: 1.0, 4: 0.8}] * slow + [{1: 1.05, 4: 0.95}] * (3 - slow))
    keys, pauses = [], []

    def readings(*_: object, key: str) -> dict[int, float]:
        keys.append(key)
        return next(found)

    monkeypatch.setattr("hybridspec.sglang_plugin.self_check.measure", readings)
    raw = {
        "url": "",
        "api_key": None,
        "bundle": "",
        "target": "",
        "key": "k",
        "lengths": [1, 4],
        "drift": 0.1,
    }
    attempts = measure_until_known(
        ServerApi("http://127.0.0.1:9"), [], [], settings_of(raw), pause=pauses.append
    )
    assert len(attempts) == min(slow + 1, 3)
    assert attempts[-1].ratios == ({1: 1.0, 4: 0.8} if slow == 3 else {1: 1.05, 4: 0.95})
    assert all(one.began_s <= one.ended_s for one in attempts)
    assert [one.began_s for one in attempts] == sorted(one.began_s for one in attempts)
    assert pauses == [0.0, *PAUSES_SECONDS][: len(attempts)]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("k-") for key in keys)


@pytest.mark.skipif(not BUNDLE.is_dir(), reason="no demonstration bundle (an sdist)")
def test_anchors_are_cells_of_the_bundle_and_another_server_is_not_measured(url: str) -> None:
    bundle = load_bundle(BUNDLE)
    anchors = anchors_of(bundle, (1, 8))
    assert bundle.cost is not None
    step = bundle.cost.step
    assert [a.expected_us for a in anchors] == [step.latency_us[0, 0, 1], step.latency_us[0, 0, 8]]
    assert {a.context_tokens for a in anchors} == {int(step.context_tokens[0])}
    from hybridspec.demo import assets

    raw = {"url": url, "api_key": None, "bundle": str(BUNDLE), "target": str(assets.TARGET),
           "key": "k", "lengths": [1], "drift": 0.1}  # fmt: skip
    found = check(settings_of(raw))
    assert "another server" in found["problem"]
