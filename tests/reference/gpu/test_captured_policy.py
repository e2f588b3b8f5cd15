"""Lengths that a captured round chooses from tables or trees, and what it says where it cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import hazard_trees_kit as kit
import numpy as np
import pytest
import torch
from captured_kit import DEVICE, PROMPT, SHAPE, Pair, drafts_with_error, make_pair, plain_text

from hybridspec.errors import UsageError
from hybridspec.hazards import RequestHistory, TreeHazards
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.selection import STATIC_POLICY
from hybridspec.kernels.select.tables import DeviceTables, pack_tables
from hybridspec.reference.gpu import capture as capturing
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import GpuRound, RoundRules

BEST_FIXED = 9


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def tables(*, row_us: float = 60.0) -> DeviceTables:
    """A row costs about a third of a token: lengths between the ends are chosen."""
    grid = np.ones(1, dtype=np.int64)
    return pack_tables(
        weights_F=np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
        position_bias_D=np.zeros(15),
        knots_x=np.linspace(0.0, 1.0, 9),
        knots_y=np.linspace(0.02, 0.98, 9),
        batch_sizes=grid,
        context_tokens=grid * 64,
        latency_us=np.linspace(1000.0, 1000.0 + 16 * row_us, 17).reshape(1, 1, 17),
        tokens_per_us=np.full(1, 5e-3),
        best_fixed_length=grid * BEST_FIXED,
        device=DEVICE,
    )


class Scripted:
    """In place of a drafter: logits whose best tokens are given, more or less certain."""

    def __init__(self, engine: GpuEngine) -> None:
        assert engine.drafter is not None
        self._real, self._engine = engine.drafter, engine
        self._random = torch.Generator().manual_seed(2)
        self.drafts: list[int] = []

    def draft(self) -> torch.Tensor:
        logits = torch.randn(15, SHAPE.vocab_size, generator=self._random)
        certain = 4.0 + 6.0 * torch.rand(15, generator=self._random)
        logits[torch.arange(15), torch.tensor(self.drafts)] = certain
        return logits.to(DEVICE)

    def inject(self, rows: int) -> None:
        self._real.inject(rows)


@torch.inference_mode()
@pytest.mark.slow
def test_trees_choose_as_the_eager_policy_does(pair: Pair) -> None:
    text = plain_text(pair.eager(), PROMPT, 46)
    engine = pair.captured(torch.float32)
    table = kit.random_trees(5, trees=20)
    device_tables = tables()
    round = engine.round(RoundRules("policy", device_tables, trees=kit.packed(table, DEVICE)))
    scripted = Scripted(engine)
    round.drafter = scripted  # type: ignore[assignment]
    eager = TreeHazards(table)
    engine.prefill([PROMPT])
    saved = engine.snapshot()
    seen = []
    # A second text starts from nothing again.
    for _ in range(2):
        engine.restore(saved)
        emitted, history, lengths = text[:1], RequestHistory(text[:1]), []
        for right in (5, 0, 9, 14):
            scripted.drafts = drafts_with_error(text, len(emitted), right, SHAPE.vocab_size)
            context = engine.target.starts_B.clone()
            round.run()
            buffers, report = engine.buffers, engine.buffers.report
            p1, p2, entropy = (
                buffers.drafts(getattr(buffers.signals, name)).clone()
                for name in ("p1_R", "p2_R", "entropy_R")
            )
            drafts = torch.tensor([scripted.drafts])
            expected = eager.hazards(p1, p2, entropy, context.tolist(), drafts, [history])
            wanted, *_, fallback = naive.select(
                p1,
                p2,
                entropy,
                context,
                buffers.limits_B,
                buffers.batch_size,
                device_tables,
                hazards_BD=torch.tensor(expected, dtype=torch.float64, device=DEVICE),
            )
            assert report.lengths_B.tolist() == wanted.tolist()
            assert report.fallback_B.tolist() == fallback.tolist() == [0]
            length, accepted = int(report.lengths_B), int(report.accepted_B)
            new = report.emitted_BT[0, : accepted + 1].tolist()
            history.observe(new, accepted=accepted, verify_length=length)
            emitted = emitted + new
            lengths.append(length)
        assert emitted == text[: len(emitted)]
        seen.append(lengths)
        scripted._random.manual_seed(2)
    assert len(set(seen[0])) > 1
    assert seen[0] == seen[1]


@torch.inference_mode()
@pytest.mark.slow
def test_a_fallback_is_reported_with_its_round(pair: Pair) -> None:
    """Tables whose first entries became token ids make every length the best fixed one, silently
    but for the report."""
    engine = pair.captured(torch.float32)
    intact, broken = tables(), tables()
    # What a block of a prefill puts where the tables were: 64 bytes of int32.
    broken.values_TP.view(torch.int32)[0, :16] = torch.arange(31, 47, dtype=torch.int32)
    decoder = Decoder(engine)
    found = {}
    first = engine.prefill([PROMPT])
    saved = engine.snapshot()
    for name, held in (("intact", intact), ("broken", broken)):
        round = engine.round(RoundRules("policy", held))
        engine.restore(saved)
        found[name] = decoder.decode(round.run, first, max_new_tokens=2)[0].lines
    assert {line.fallback for line in found["intact"]} == {0}
    assert {line.fallback for line in found["broken"]} == {STATIC_POLICY}
    assert {line.length for line in found["broken"]} == {BEST_FIXED}
    # A fixed round behind them does not inherit it.
    engine.restore(saved)
    engine.buffers.fixed_B.fill_(2)
    fixed = decoder.decode(engine.round(RoundRules("fixed")).run, first, max_new_tokens=2)[0]
    assert {line.fallback for line in fixed.lines} == {0}


class Recorder:
    """Stands in for a CUDA graph on a host without CUDA: as that one, it keeps no Python object."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.replayed = 0

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.replayed += 1


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(capturing, "capture_stream", lambda _: None)


def test_tables_live_as_long_as_a_replay_of_their_graph(pair: Pair, without_cuda: None) -> None:
    """A graph reads the tables by address; nobody else holds them once the round is captured."""
    engine = pair.captured(torch.float32)

    def captured() -> tuple[Callable[[], None], list[weakref.ref[Any]]]:
        held = tables()
        round: GpuRound = engine.round(RoundRules("policy", held))
        watched = [weakref.ref(held.values_TP), weakref.ref(round)]
        return capturing.capture(round.run, pool=None).replay, watched

    with torch.inference_mode():
        replay, watched = captured()
    gc.collect()
    assert all(watch() is not None for watch in watched)
    replay()
    del replay
    gc.collect()
    assert all(watch() is None for watch in watched)


def test_trees_belong_to_a_policy() -> None:
    trees = kit.packed(kit.random_trees(0))
    with pytest.raises(UsageError, match="belong to mode 'policy'"):
        replace(RoundRules("fixed"), trees=trees)
