"""Price of an expert from streams with forced routes, and what the command makes of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hybridspec.cli import _profile_sglang_experts
from hybridspec.cli._output import Output
from hybridspec.cli._profile_sglang_experts import NO_EXPERTS, Experts, measure_experts
from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.demo import assets
from hybridspec.errors import EnvironmentMissing
from hybridspec.pair import pair_folders
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_experts import FORCED_TOKENS, measure_server_experts
from hybridspec.sglang_plugin.server_rounds import (
    FEWEST_ROUNDS,
    TIMED_ROUNDS,
    WARMUP_ROUNDS,
    Grid,
)

PAIRS = ((2, 2), (2, 12), (2, 20), (4, 4), (4, 20))
US_AN_EXPERT, LAYERS = 100.0, 10


class ForcedServer(BaseHTTPRequestHandler):
    """One request at a time, 2 ms a round and 0.1 ms a distinct expert; a round emits one token."""

    priced = True

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if self.path != "/generate":
            return
        (params,) = body["sampling_params"]
        asked = params["custom_params"]["hybridspec"]
        length, distinct = asked["verify_length"], asked["distinct_experts"]
        most = params["max_new_tokens"]
        round_s = 0.002 + (1e-6 * US_AN_EXPERT * distinct if self.priced else 0.0)
        began = time.monotonic()
        for rounds in range(most):
            time.sleep(max(0.0, began + rounds * round_s - time.monotonic()))
            meta: dict[str, object] = {"completion_tokens": 1 + rounds, "finish_reason": None}
            if rounds == most - 1:
                meta |= {
                    "finish_reason": {"type": "length"},
                    "spec_verify_ct": rounds,
                    "spec_cap_lens_histogram": [0] * length + [rounds],
                }
            line = json.dumps({"index": 0, "meta_info": meta})
            self.wfile.write(f"data: {line}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


class UnpricedServer(ForcedServer):
    """One whose graphs do not take the table."""

    priced = False


class RefusingServer(ForcedServer):
    """One whose routers choose."""

    def do_POST(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"routers choose experts here")


def served(handler: type[ForcedServer]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    yield from served(ForcedServer)


@pytest.fixture
def refusing() -> Iterator[str]:
    yield from served(RefusingServer)


def grid() -> Grid:
    return Grid((1, 2), (7, 9), 5, 0, texts=[[1, 2, 3], [4, 5]])


def test_an_expert_is_priced_by_rounds_of_one_length(url: str) -> None:
    samples = measure_server_experts(ServerApi(url), grid(), PAIRS, budget_s=120.0)
    assert samples.num_rows == len(PAIRS) * 5
    assert set(samples.column("context_tokens").to_pylist()) == {7}
    assert set(samples.column("batch").to_pylist()) == {1}
    slope = fit_expert_slope(samples, num_layers=LAYERS)
    assert slope.usable
    assert slope.slope_us == pytest.approx(US_AN_EXPERT / LAYERS, rel=0.1)


def test_answers_are_long_enough_while_rounds_emit_seven_tokens() -> None:
    rounds = (FORCED_TOKENS - 1) // 7
    assert rounds >= WARMUP_ROUNDS + FEWEST_ROUNDS
    assert FORCED_TOKENS >= WARMUP_ROUNDS + TIMED_ROUNDS


def test_a_server_whose_routers_choose_is_refused(refusing: str) -> None:
    with pytest.raises(EnvironmentMissing, match="routers choose experts here"):
        measure_server_experts(ServerApi(refusing), grid(), PAIRS, budget_s=60.0)


def command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, *, budget_s: float = 120.0
) -> tuple[Experts, str]:
    """What the command finds with a server that `script` is, and what it says."""

    def arguments(launch: object) -> list[str]:
        return ["-c", script, str(launch.port)]  # type: ignore[attr-defined]

    monkeypatch.setattr(_profile_sglang_experts, "arguments", arguments)
    said: list[str] = []
    output = Output()
    monkeypatch.setattr(Output, "warn", lambda self, message: said.append(message))
    monkeypatch.setattr(Output, "note", lambda self, message: said.append(message))
    found = measure_experts(
        pair_folders(assets.TARGET, assets.DRAFTER),
        (),
        grid(),
        PAIRS,
        num_layers=LAYERS,
        budget_s=budget_s,
        logs=tmp_path,
        output=output,
    )
    return found, "\n".join(said)


def script_of(handler: type[ForcedServer]) -> str:
    """Python that serves `handler` at the port it is given, if its configuration forces routes."""
    return f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from http.server import ThreadingHTTPServer
from test_server_experts import {handler.__name__}
config = json.load(open(os.environ["HYBRIDSPEC_CONFIG"]))
assert config["switches"] == {{"force_routes": True}}, config
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), {handler.__name__}).serve_forever()
"""


def test_the_command_starts_a_server_that_forces_routes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, said = command(monkeypatch, tmp_path, script_of(ForcedServer))
    assert found.slope is not None
    assert found.slope.slope_us == pytest.approx(US_AN_EXPERT / LAYERS, rel=0.1)
    assert found.samples.num_rows == len(PAIRS) * 5
    assert not found.interrupted
    assert "a distinct expert of one layer costs" in said


def test_a_table_that_the_graphs_do_not_take_is_no_price(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, said = command(monkeypatch, tmp_path, script_of(UnpricedServer))
    assert found.slope is not None
    assert not found.slope.usable
    assert "not usable" in said


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("raise SystemExit('no such flag')", "no such flag"),
        (script_of(RefusingServer), "routers choose experts here"),
    ],
    ids=["does not start", "refuses"],
)
def test_the_other_costs_outlive_a_failure_here(
    script: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, said = command(monkeypatch, tmp_path, script)
    assert found is NO_EXPERTS
    assert "gets no price of an expert" in said
    assert named in said


def test_ctrl_c_ends_this_part_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_profile_sglang_experts, "measure_server_experts", interrupted)
    found, _ = command(monkeypatch, tmp_path, script_of(ForcedServer))
    assert found.interrupted
    assert found.slope is None
    assert found.samples.num_rows == 0
