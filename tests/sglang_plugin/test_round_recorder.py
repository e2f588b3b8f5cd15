"""Rounds on their way from the device to trace files: what is kept, left out, and how it reads."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridspec.artifacts.schemas import TRACE_SCHEMA
from hybridspec.calibrate.rounds import TraceIdentity, trace_identity
from hybridspec.calibrate.trace import read_trace
from hybridspec.errors import UsageError
from hybridspec.kernels.draft_features.split import Tiling
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import LengthRequest, RecordTag, Row, record_tag
from hybridspec.sglang_plugin.policy import fixed_policy
from hybridspec.sglang_plugin.recorded_requests import Ending, RecordedRequests
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.round_recorder import Member, RoundRecorder
from hybridspec.sglang_plugin.rounds import Rounds

pytest.importorskip("triton", reason="kernels need triton")

VOCAB, LAYERS, TOP_K, EXPERTS = 64, 3, 2, 8
SLOTS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Asked:
    """A request and its story, as this test's engine keeps it."""

    name: str
    prompt_tokens: int
    tokens: list[int]
    temperature: float = 0.0
    ended: bool = False
    aborted: bool = False
    end: int | None = None
    rounds: list[dict] = field(default_factory=list)

    def ending(self) -> Ending | None:
        if not self.ended:
            return None
        return Ending(self.prompt_tokens, self.tokens[: self.end], self.aborted)


def identity(temperature: float, top_p: float) -> TraceIdentity:
    return TraceIdentity(
        "target", "drafter", LAYERS, TOP_K, EXPERTS, VOCAB, temperature, 0, "unrecorded",
        top_p=top_p,
    )  # fmt: skip


class Engine:
    """Rounds with a target of our own, from the tail of the draft to the recorder."""

    def __init__(self, folder: Path, *, routes: bool, ring: int = 8) -> None:
        self.rounds = Rounds(
            PluginConfig(),
            fixed_policy(16, "test"),
            max_requests=SLOTS,
            history_slots=10,
            device=DEVICE,
            counters=RoundCounters(DEVICE, max_requests=SLOTS),
        )
        drafts = self.rounds.make_drafts(
            vocab=VOCAB,
            vocab_start=0,
            dtype=torch.float32,
            tp_group=None,
            tiling=Tiling(vectors=1, num_warps=1),
        )
        self.drafts = drafts
        self.kept = torch.zeros(LAYERS, SLOTS * 16, TOP_K, dtype=torch.int32, device=DEVICE)
        self.requests = RecordedRequests(
            folder,
            ending=lambda request: request.ending(),
            sampling=lambda request: (request.temperature, 1.0),
            identity=identity,
        )
        self.recorder = RoundRecorder(
            self.rounds.state,
            drafts.features,
            self.requests,
            kept_XRK=self.kept if routes else None,
            num_experts=EXPERTS,
            ring=ring,
        )
        self.random = random.Random(5)
        self.generator = torch.Generator().manual_seed(5)

    def round(self, batch: list[Asked], *, forced: int = 16) -> None:
        """One round of a batch: everything is recorded, whatever it is."""
        count = len(batch)
        rows = [Row((a.name,), i, LengthRequest(forced=forced)) for i, a in enumerate(batch)]
        key = (*(a.name for a in batch), forced)
        self.rounds.begin(key, lambda: rows, lambda: None)
        logits = torch.randn(count * 15, VOCAB, generator=self.generator).mul(3)
        starts = torch.tensor([a.prompt_tokens + len(a.tokens) - 1 for a in batch])
        positions = (starts[:, None] + torch.arange(16)).view(-1).to(DEVICE)
        self.drafts(logits.to(DEVICE), positions)
        drafts = logits.argmax(-1).view(count, 15).tolist()
        self.kept.copy_(torch.randint(0, EXPERTS, self.kept.shape, generator=self.generator).int())
        anchors, committed, target = [], [], torch.zeros(count, 16, dtype=torch.long)
        for b, asked in enumerate(batch):
            accepted = self.random.randrange(min(8, forced))
            said = [self.random.randrange(VOCAB) for _ in range(16)]
            said[:accepted] = drafts[b][:accepted]
            said[accepted] = (drafts[b][accepted] + 1) % VOCAB
            target[b] = torch.tensor(said)
            anchors.append(asked.tokens[-1])
            committed.append(accepted + 1)
            asked.rounds.append(
                {
                    "context_tokens": int(starts[b]),
                    "generated_tokens": len(asked.tokens),
                    "accepted": accepted,
                    "draft_tokens": drafts[b],
                    "target_tokens": said,
                    "routes": self.kept[:, b * 16 : b * 16 + 16].cpu().numpy().astype(np.uint8),
                    "p1": logits.softmax(-1).amax(-1).view(count, 15)[b].tolist(),
                }
            )
            asked.tokens += said[: accepted + 1]
        verified = torch.nn.functional.one_hot(target.view(-1), VOCAB) * 9.0
        members = [
            Member(b, a.name, a, RecordTag(a.name, "test", "calibration"))
            for b, a in enumerate(batch)
        ]
        self.recorder.add(
            members,
            torch.tensor(anchors, device=DEVICE),
            verified.bfloat16().to(DEVICE),
            torch.tensor(committed, dtype=torch.int32, device=DEVICE),
        )
        # As an engine does that waits for tokens: the recorder's thread gets its turn.
        time.sleep(0.002)


def tables(folder: Path) -> list:
    return [read_trace(path) for path in sorted(folder.glob("*.parquet"))]


@pytest.mark.parametrize("routes", [True, False])
def test_rounds_of_a_batch_are_traces(tmp_path: Path, routes: bool) -> None:
    engine = Engine(tmp_path, routes=routes)
    one, two = Asked("one", 30, [7]), Asked("two", 11, [9])
    for _ in range(3):
        engine.round([one])
    for _ in range(3):
        engine.round([two, one])
    one.ended, one.end = True, one.rounds[4]["generated_tokens"] + 1
    engine.round([two])
    two.ended = True
    engine.recorder.close()
    # On a slow machine the first request's rounds are due before the second ends: two files then.
    written = tables(tmp_path)
    assert 1 <= len(written) <= 2
    for table in written:
        assert table.schema.names == TRACE_SCHEMA.names
        assert trace_identity(table, path=tmp_path) == identity(0.0, 1.0)
    rows = [row for table in written for row in table.to_pylist()]
    for asked, count in ((one, 5), (two, 4)):
        mine = [row for row in rows if row["prompt_id"] == asked.name]
        assert [row["round"] for row in mine] == list(range(count)), "and none after the end"
        for row, told in zip(mine, asked.rounds, strict=False):
            for name in ("context_tokens", "generated_tokens", "accepted"):
                assert row[name] == told[name]
            assert row["draft_tokens"] == told["draft_tokens"]
            assert row["target_tokens"] == told["target_tokens"]
            assert row["p1"] == pytest.approx(told["p1"], rel=1e-5)
            assert row["target_p1"] == pytest.approx([np.exp(9) / (np.exp(9) + VOCAB - 1)] * 16)
            assert row["routes"] == (told["routes"].tobytes() if routes else b"")
    assert (engine.requests.written, engine.requests.left_out) == (2, 0)


def test_only_rounds_of_all_rows_are_kept(tmp_path: Path) -> None:
    engine = Engine(tmp_path, routes=False)
    asked = Asked("one", 30, [7])
    for forced in (16, 4, 16):
        engine.round([asked], forced=forced)
    asked.ended = True
    engine.recorder.close()
    (table,) = tables(tmp_path)
    assert table.column("round").to_pylist() == [0, 2]


def test_requests_that_tell_no_whole_story_are_left_out(tmp_path: Path) -> None:
    engine = Engine(tmp_path, routes=False)
    aborted, retracted, sampled = Asked("a", 5, [1]), Asked("r", 6, [2]), Asked("s", 7, [3], 0.7)
    batch = [aborted, retracted, sampled]
    engine.round(batch)
    retracted.tokens.append((retracted.tokens[-1] + 1) % VOCAB)  # a token of another prefill
    engine.round(batch)
    aborted.aborted = True
    for asked in batch:
        asked.ended = True
    engine.recorder.close()
    (table,) = tables(tmp_path)
    assert set(table.column("prompt_id").to_pylist()) == {"s"}
    assert trace_identity(table, path=tmp_path).temperature == 0.7
    assert (engine.requests.written, engine.requests.left_out) == (1, 2)


def test_a_recorder_that_falls_behind_loses_requests_and_blocks_nobody(tmp_path: Path) -> None:
    engine = Engine(tmp_path, routes=False, ring=2)
    go_on = threading.Event()
    taken = engine.requests.add
    engine.requests.add = lambda *row: (go_on.wait(20.0), taken(*row))  # type: ignore[method-assign]
    slow, later = Asked("slow", 5, [1]), Asked("later", 6, [2])
    for _ in range(5):
        engine.round([slow])
    assert engine.recorder.lost >= 2
    go_on.set()
    until = time.monotonic() + 10.0
    while engine.recorder._free.qsize() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    engine.round([later])
    slow.ended = later.ended = True
    engine.recorder.close()
    (table,) = tables(tmp_path)
    assert table.column("prompt_id").to_pylist() == ["later"]
    assert engine.requests.left_out == 1


def test_what_has_ended_is_written_without_a_stop(tmp_path: Path) -> None:
    engine = Engine(tmp_path, routes=False)
    asked = Asked("one", 30, [7])
    engine.round([asked])
    asked.ended = True
    until = time.monotonic() + 15.0
    while not tables(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(tables(tmp_path)) == 1
    engine.recorder.close()
    assert len(tables(tmp_path)) == 1


@pytest.mark.parametrize(
    "tag",
    ["x", {}, {"prompt_id": "a"}, {"prompt_id": "a", "category": "b", "split": "train"},
     {"prompt_id": 3, "category": "b", "split": "test"}],
)  # fmt: skip
def test_wrong_tags_are_refused(tag: object) -> None:
    with pytest.raises(UsageError, match="prompt_id, category, split"):
        record_tag({"hybridspec": {"record": tag}})


def test_tags() -> None:
    tag = {"prompt_id": "a", "category": "b", "split": "test"}
    assert record_tag({"hybridspec": {"record": tag}}) == RecordTag("a", "b", "test")
    assert record_tag({"hybridspec": {"verify_length": 3}}) is None
    assert record_tag(None) is None
