"""Times of rounds from streams: what counts, what is refused, and how it becomes step samples."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from sglang_server_kit import SglangLike

from hybridspec.costmodels.step import fit_step_costs
from hybridspec.costmodels.sweep import StepCase
from hybridspec.errors import EngineRefusal, EnvironmentMissing, QualityGate, UsageError
from hybridspec.sglang_plugin.launch import plain_arguments
from hybridspec.sglang_plugin.server_api import Chunk, ServerApi, generate_body
from hybridspec.sglang_plugin.server_rounds import (
    FEWEST_ROUNDS,
    MOST_TOKENS,
    TIMED_ROUNDS,
    WARMUP_ROUNDS,
    Grid,
    Reading,
    Readings,
    StreamReader,
    measure_server,
    step_samples,
    tokens_of,
)


def chunk(at: float, index: int, rounds: int, *, last: bool = False, length: int = 4) -> Chunk:
    """The chunk behind so many rounds of three tokens; only the last one counts rounds."""
    meta: dict[str, Any] = {"completion_tokens": 1 + 3 * rounds, "finish_reason": None}
    if last:
        meta |= {
            "finish_reason": {"type": "length"},
            "spec_verify_ct": rounds,
            "spec_cap_lens_histogram": [0] * length + [rounds],
        }
    return Chunk(at, index, meta)


def test_round_time_is_of_the_stretch_in_which_all_decode() -> None:
    reader = StreamReader(2, drafted=True)
    # The first request decodes alone, at 1 ms a round, while the prompt of the second is read,
    # and the second one alone at the end.
    for n in range(10):
        assert not reader.add(chunk(0.001 * n, 0, n))
    for n in range(30):
        at = 0.010 + 0.005 * n
        assert not reader.add(chunk(at, 0, 10 + n, last=n == 29))
        assert not reader.add(chunk(at + 0.0001, 1, n))
    for n in range(30, 40):
        assert reader.add(chunk(0.156 + 0.001 * (n - 30), 1, n, last=n == 39)) == (n == 39)
    reading = reader.reading()
    assert reading.total_us == pytest.approx(5000.0, rel=1e-6)
    assert reading.rows_run == 2 * 4
    assert 30 - WARMUP_ROUNDS - 2 <= reading.rounds <= 30 - WARMUP_ROUNDS


def test_chunks_without_tokens_change_nothing() -> None:
    reader = StreamReader(1, drafted=True)
    for n in range(60):
        reader.add(chunk(0.002 * n, 0, n))
        reader.add(chunk(0.002 * n + 0.001, 0, n, last=n == 59))
    assert reader.reading().total_us == pytest.approx(2000.0, rel=1e-6)


@pytest.mark.parametrize("merged", [1, 3])
def test_a_few_merged_chunks_are_made_good_and_many_are_refused(merged: int) -> None:
    reader = StreamReader(1, drafted=True)
    gaps = set(range(30, 30 + 2 * merged, 2))
    for n in range(41):
        if n not in gaps:
            reader.add(chunk(0.002 * n, 0, n, last=n == 40))
    if merged == 1:
        assert reader.reading().total_us == pytest.approx(2000.0, rel=0.03)
    else:
        with pytest.raises(QualityGate, match="40 rounds arrived in 37 chunks"):
            reader.reading()


def test_an_answer_that_breaks_off_has_no_time() -> None:
    reader = StreamReader(2, drafted=True)
    for n in range(60):
        reader.add(chunk(0.002 * n, 0, n, last=n == 59))
        reader.add(chunk(0.002 * n, 1, n))
    with pytest.raises(QualityGate, match="broke off"):
        reader.reading()


def test_plain_rounds_are_tokens() -> None:
    reader = StreamReader(1, drafted=False)
    for n in range(1, 40):
        reader.add(Chunk(0.004 * n, 0, {"completion_tokens": n}))
    reading = reader.reading()
    assert reading.total_us == pytest.approx(4000.0, rel=1e-6)
    assert reading.rows_run == 1


def test_too_few_rounds_are_refused() -> None:
    reader = StreamReader(2, drafted=True)
    rounds = WARMUP_ROUNDS + FEWEST_ROUNDS - 1
    for n in range(rounds + 1):
        reader.add(chunk(0.001 * n, 0, n, last=n == rounds))
        reader.add(chunk(0.001 * n, 1, n, last=n == rounds))
    with pytest.raises(QualityGate, match=f"at least {FEWEST_ROUNDS} are needed"):
        reader.reading()


def test_server_that_does_not_tell_its_lengths_is_refused() -> None:
    told = {"completion_tokens": 4, "spec_verify_ct": 1, "finish_reason": {"type": "stop"}}
    with pytest.raises(EngineRefusal, match="does not run HYBRIDSPEC"):
        StreamReader(1, drafted=True).add(Chunk(0.0, 0, told))


def test_rounds_of_mixed_lengths_are_refused() -> None:
    told = {
        "completion_tokens": 9,
        "finish_reason": {"type": "length"},
        "spec_verify_ct": 3,
        "spec_cap_lens_histogram": [0, 1, 2],
    }
    with pytest.raises(QualityGate, match=r"verified \[1, 2\] rows"):
        StreamReader(1, drafted=True).add(Chunk(0.0, 0, told))


@pytest.mark.parametrize("length", range(17))
def test_answers_are_long_enough_for_a_reading(length: int) -> None:
    """Even if every round emitted all its rows."""
    rounds = (tokens_of(length) - 1) // max(length, 1)
    assert rounds >= WARMUP_ROUNDS + FEWEST_ROUNDS
    assert tokens_of(length) <= MOST_TOKENS


def readings(plain_us: float) -> tuple[Readings, Readings]:
    def five(us: float, rows: int) -> tuple[Reading, ...]:
        return tuple(Reading(us * (1 + 0.001 * n), TIMED_ROUNDS, rows) for n in range(5))

    drafted = {
        StepCase(batch, 512, length): five(4000.0 + 60.0 * length * batch, batch * length)
        for batch in (1, 4)
        for length in range(1, 17)
    }
    plain = {StepCase(batch, 512, 0): five(plain_us, batch) for batch in (1, 4)}
    return drafted, plain


def test_samples_carry_a_cost_table() -> None:
    fit = fit_step_costs(step_samples(*readings(plain_us=3500.0)))
    table = fit.table
    assert table.latency_us.shape == (2, 1, 17)
    np.testing.assert_allclose(table.latency_us[0, 0, 1:], 1.002 * (4000 + 60 * np.arange(1, 17)))
    np.testing.assert_allclose(table.latency_us[:, 0, 0], 1.002 * 3500)
    np.testing.assert_allclose(table.draft_us[:, 0], [1.002 * 560, 1.002 * 740])
    assert table.expert_slope_us == 0


def test_plain_rounds_slower_than_drafted_ones_are_refused() -> None:
    with pytest.raises(QualityGate, match="do not compare"):
        step_samples(*readings(plain_us=5000.0))


def test_prompts_have_the_context_and_differ() -> None:
    grid = Grid((2,), (7,), 5, 0, texts=[[1, 2, 3], [4, 5], [6]])
    assert grid.prompts(2, 7) == [[1, 2, 3, 4, 5, 6, 1], [4, 5, 6, 1, 2, 3, 4]]


def test_plain_server_has_the_same_flags_without_a_drafter() -> None:
    flags = (
        "--tp-size",
        "2",
        "--speculative-draft-attention-backend",
        "fa3",
        "--disable-radix-cache",
    )
    made = plain_arguments("t", "127.0.0.1", 5, flags)
    assert made[made.index("5") + 1 :] == ["--tp-size", "2", "--disable-radix-cache"]
    assert "--speculative-algorithm" not in made


LINES = [
    {"index": 0, "text": "a", "meta_info": {"completion_tokens": 1}},
    {"index": 1, "text": "b", "meta_info": {"completion_tokens": 1}},
    {"index": 0, "text": "ac", "meta_info": {"completion_tokens": 2}},
]


class Handler(BaseHTTPRequestHandler):
    """Lines of an event stream, one every few milliseconds."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path == "/generate" else 400)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in [*map(json.dumps, LINES), '{"error": {"message": "no room"}}']:
            data = f"data: {line}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            time.sleep(0.01)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_stream_gives_chunks_as_they_arrive_and_errors_as_refusals(url: str) -> None:
    api = ServerApi(url)
    found = []
    with pytest.raises(EnvironmentMissing, match="no room"):
        found.extend(api.stream(generate_body([[1], [2]], new_tokens=4, verify_length=3)))
    body = api.stream({})
    found = [next(body) for _ in LINES]
    body.close()  # type: ignore[attr-defined]
    assert [one.index for one in found] == [0, 1, 0]
    assert found[2].arrived_s - found[0].arrived_s > 0.015


def test_a_server_is_measured_from_its_streams() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SglangLike)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        grid = Grid((1, 2), (7,), 5, 0, texts=[[1, 2, 3], [4, 5]])
        api = ServerApi(f"http://127.0.0.1:{server.server_address[1]}")
        found = measure_server(api, grid, (1, 4), budget_s=60.0)
    finally:
        server.shutdown()
        server.server_close()
    assert {(key.batch, key.verify_length) for key in found} == {(1, 1), (1, 4), (2, 1), (2, 4)}
    for key, readings_of in found.items():
        median = float(np.median([one.total_us for one in readings_of]))
        known_us = SglangLike.base_us + SglangLike.us_a_row * key.verify_length
        assert median == pytest.approx(known_us, rel=0.1)
        assert {one.rows_run for one in readings_of} == {key.batch * key.verify_length}
        assert min(one.rounds for one in readings_of) >= FEWEST_ROUNDS


def test_answers_and_addresses_that_are_wrong_are_refused(url: str) -> None:
    with pytest.raises(EnvironmentMissing, match="answered 400"):
        ServerApi(url).wait_until_idle()
    with pytest.raises(EnvironmentMissing, match="does not answer"):
        ServerApi("http://127.0.0.1:9").info()
    assert not ServerApi("http://127.0.0.1:9").healthy()
    with pytest.raises(UsageError, match="no address"):
        ServerApi("localhost:8000")
