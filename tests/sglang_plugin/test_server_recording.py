"""`calibrate --engine sglang` against a server of this test that records what our engine decodes.

The server speaks SGLang's `/generate` and `/server_info` and writes files as the plugin does; its
rounds are the reference engine's, so the trace must be the one that the reference path records.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridspec.artifacts.atomic import write_parquet
from hybridspec.artifacts.bundle import load_bundle
from hybridspec.calibrate.prompts import Prompt
from hybridspec.calibrate.rounds import TraceIdentity, rows_to_table, sealed
from hybridspec.calibrate.trace import read_trace
from hybridspec.cli.main import run
from hybridspec.collect import TokenPrompt, record_group
from hybridspec.demo import assets
from hybridspec.pair import PairFolders, calibration_identity
from hybridspec.reference.config import load_target_config
from hybridspec.reference.loading import load_pair
from hybridspec.sglang_plugin import server_recording

PROMPTS, TOKENS, GROUP = 28, 16, 14


class _Bar:
    def advance(self, amount: float = 1.0) -> None:
        del amount


class Recording(ThreadingHTTPServer):
    """A server that answers with the reference engine and records its rounds into a folder."""

    def __init__(self, folder: Path, **identity: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[dict[str, Any]] = []
        self.lose: set[int] = set()  # requests, by their number, whose rounds are not written
        self.info: dict[str, Any] = {
            "version": "0.5.16",
            "speculative_algorithm": "HYBRIDSPEC",
            "model_path": str(assets.TARGET),
            "speculative_draft_model_path": str(assets.DRAFTER),
            "max_running_requests": GROUP,
        }
        self.identity = dataclasses.replace(server_identity(), **identity)
        self.engine = load_pair(
            assets.TARGET, assets.DRAFTER, dtype="float32", device="cpu", max_batch=GROUP,
            max_context=512,
        )  # fmt: skip
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks of a batch."""
        batch = []
        for ids, sampling in zip(body["input_ids"], body["sampling_params"], strict=True):
            asked = sampling["custom_params"]["hybridspec"]
            assert asked["verify_length"] == 16
            batch.append(TokenPrompt(Prompt(**asked["record"], text=""), tuple(ids)))
        identity = dataclasses.replace(self.identity, max_new_tokens=TOKENS)
        rows, _ = record_group(self.engine, batch, identity, record_routes=True, progress=_Bar())
        chunks = []
        for index, member in enumerate(batch):
            mine = [row for row in rows if row.prompt_id == member.prompt.prompt_id]
            end = min(TOKENS, 1 + sum(row.accepted + 1 for row in mine))
            for tokens in (1, end):
                chunks.append({"index": index, "meta_info": {"completion_tokens": tokens}})
            number = len(self.asked)
            self.asked.append({"prompt_id": member.prompt.prompt_id, "end": end})
            if mine and number not in self.lose:
                table = sealed(rows_to_table(mine, self.identity))
                write_parquet(self.folder / f"rounds-1-1-{number:06d}.parquet", table)
        return chunks


class _Handler(BaseHTTPRequestHandler):
    @property
    def recording(self) -> Recording:
        assert isinstance(self.server, Recording)
        return self.server

    def do_GET(self) -> None:
        self._send(json.dumps(self.recording.info))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chunks = self.recording.answer(body)
        self._send("".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def server_identity() -> TraceIdentity:
    """What the plugin says of its files."""
    pair = calibration_identity(
        PairFolders(assets.TARGET, assets.DRAFTER, None, "pair"),
        dtype="bfloat16",
        temperature=0.0,
        top_p=1.0,
        prompts_digest=None,
    )
    config = load_target_config(assets.TARGET)
    return TraceIdentity(
        target_digest=pair.target_digest,
        drafter_digest=pair.drafter_digest,
        layers=config.num_layers,
        topk=config.experts_per_token,
        experts=config.num_experts,
        vocab_size=config.vocab_size,
        temperature=0.0,
        max_new_tokens=0,
        prompts_digest="unrecorded",
        dtype="bfloat16",
        group_size=1,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    folder.mkdir()
    return folder


@pytest.fixture
def server(recorded: Path) -> Iterator[Recording]:
    started = Recording(recorded)
    yield started
    started.shutdown()
    started.server_close()


def calibrate(server: Recording, out: Path, *more: str) -> int:
    return run(
        ["calibrate", str(assets.TARGET), "--drafter", str(assets.DRAFTER), "--prompts",
         str(assets.require()[2]), "--max-prompts", str(PROMPTS), "--max-new-tokens", str(TOKENS),
         "--batch-size", str(GROUP), "--out", str(out), "--engine", "sglang", "--url", server.url,
         "--recorded", str(server.folder), "--quiet", *more]
    )  # fmt: skip


def test_a_bundle_from_a_server_is_the_one_of_the_same_rounds(
    server: Recording,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_recording, "NEXT_SECONDS", 0.5)
    out = tmp_path / "bundle"
    server.lose = {3}  # asked for again
    assert calibrate(server, out, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    calibration = load_bundle(out).calibration
    assert calibration is not None
    assert calibration.identity.dtype == "bfloat16"
    assert calibration.routing is not None
    trace = read_trace(tmp_path / "bundle.trace")
    assert trace.num_rows == said["rounds"]
    assert len(server.asked) == PROMPTS + 1, "the one whose rounds were lost was sent again"
    prompts = set(trace.column("prompt_id").to_pylist())
    assert len(prompts) == PROMPTS
    assert not any(":" in prompt for prompt in prompts)
    stories: dict[str, int] = dict.fromkeys(prompts, 1)
    for row in trace.to_pylist():
        assert row["generated_tokens"] == stories[row["prompt_id"]]
        stories[row["prompt_id"]] += row["accepted"] + 1
    ends = {asked["prompt_id"].split(":", 1)[1]: asked["end"] for asked in server.asked}
    for prompt, end in stories.items():
        assert end >= ends[prompt]
    # All groups are there: nothing is asked of a server any more.
    asked = len(server.asked)
    assert calibrate(server, out, "--resume") == 0
    assert len(server.asked) == asked


def test_dry_run_says_where_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, prompts = assets.require()
    pair = ["calibrate", str(target), "--drafter", str(drafter), "--prompts", str(prompts)]
    arguments = [*pair, "--engine", "sglang", "--dry-run", "--out", str(tmp_path / "bundle")]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    assert "in SGLang (bfloat16)" in said
    assert list(tmp_path.iterdir()) == []


def test_servers_that_do_not_fit_are_refused(
    server: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    server.info["max_running_requests"] = 2
    assert calibrate(server, out) == 2
    assert f"--max-running-requests {GROUP}" in capsys.readouterr().err
    server.info |= {"max_running_requests": GROUP, "speculative_algorithm": "DFLASH"}
    assert calibrate(server, out, "--resume") == 2
    assert "the server runs DFLASH" in capsys.readouterr().err
    server.info |= {"speculative_algorithm": "HYBRIDSPEC", "model_path": str(assets.DRAFTER)}
    assert calibrate(server, out, "--resume") == 3
    assert "the server runs the target" in capsys.readouterr().err


def test_rounds_of_another_pair_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Recording(recorded, target_digest="sha256:other")
    try:
        assert calibrate(server, tmp_path / "bundle") == 3
    finally:
        server.shutdown()
        server.server_close()
    assert "recorded with target_digest = 'sha256:other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs TARGET and --drafter"),
        (["t", "--drafter", "d", "--dtype", "float32"], "--dtype is an option"),
        (["t", "--drafter", "d", "--url", "http://127.0.0.1:1"], "--url and --recorded go"),
        (["t", "--drafter", "d", "--", "--port", "3"], "hybridspec: leave it out"),
        (["--", "--tp-size", "2"], "name the target in front of --"),
    ],
)  # fmt: skip
def test_command_line_refuses_in_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "bundle"), "--engine", "sglang"]
    assert run(["calibrate", *out, *arguments]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_options_of_sglang_are_refused_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "bundle")]
    assert run(["calibrate", *out, "--recorded", str(tmp_path)]) == 2
    assert "--recorded is for --engine sglang" in capsys.readouterr().err
