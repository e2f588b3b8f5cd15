"""What the decode benchmark predicts is what an arm does; an arm that falls back has no rate."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hazard_trees_kit as kit
import numpy as np
import pytest
import torch
from captured_kit import DEVICE, PROMPT, SHAPE, drafts_with_error, make_pair, plain_text

from hybridspec.artifacts.tables import HazardTable, RoutingTable, ThroughputTable
from hybridspec.costmodels.policies import Dinkelbach, FixedLength
from hybridspec.hazards import TreeHazards
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import RoundRules

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
TOKENS = 8


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not BENCHMARKS.is_dir():
        pytest.skip("benchmarks are not in this tree (an sdist has none)")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from decoding import anchors, arms, differences, findings, pair, prepared, walk  # pyright: ignore[reportMissingImports]

    yield SimpleNamespace(
        anchors=anchors, arms=arms, differences=differences, findings=findings, pair=pair,
        prepared=prepared, walk=walk,
    )  # fmt: skip
    for name in [n for n in sys.modules if n.split(".")[0] == "decoding"]:
        del sys.modules[name]


class Scripted:
    """In place of a drafter: at every place of a text the same drafts, some of them right."""

    def __init__(self, engine: GpuEngine, text: list[int]) -> None:
        assert engine.drafter is not None
        self._real, self._engine, self._text = engine.drafter, engine, text
        # Of snapshots.
        self.keys_LBCGD, self.values_LBCGD = self._real.keys_LBCGD, self._real.values_LBCGD

    def draft(self) -> torch.Tensor:
        place = int(self._engine.target.starts_B[0]) - len(PROMPT)
        random = torch.Generator().manual_seed(place)
        logits = torch.randn(15, SHAPE.vocab_size, generator=random)
        drafts = drafts_with_error(self._text, place + 1, (5 * place + 2) % 7, SHAPE.vocab_size)
        certain = 4.0 + 6.0 * torch.rand(15, generator=random)
        logits[torch.arange(15), torch.tensor(drafts)] = certain
        return logits.to(DEVICE)

    def inject(self, rows: int) -> None:
        self._real.inject(rows)


@torch.inference_mode()
@pytest.mark.slow
def test_a_walk_takes_the_rounds_that_the_engine_takes(tmp_path: Path, decoding: Any) -> None:
    pair = make_pair(tmp_path)
    text = plain_text(pair.eager(), PROMPT, TOKENS + 40)
    engine = pair.captured(torch.float32)
    engine.drafter = Scripted(engine, text)  # type: ignore[assignment]
    decoder = Decoder(engine)
    prompt = decoding.pair.Prompt("code", "test", PROMPT)
    table = decoding.anchors.record_texts(engine, decoder, [prompt], tokens=TOKENS)
    assert table.num_rows == TOKENS - 1

    cost = decoding.prepared.step_table(
        np.linspace(900.0, 1900.0, 17), np.full((2, 17), 1e3), 300.0, 0.0, 64
    )
    trees = kit.random_trees(5, trees=20)
    nothing: Any = None
    prepared = decoding.prepared.Prepared(
        HazardTable("raw", np.zeros(5), np.zeros(15), np.array([0.0, 1.0]), np.array([0.5, 0.9])),
        RoutingTable(3, np.ones(16), np.ones(16), np.zeros(16)),
        nothing,
        nothing,
        trees,
    )
    texts = decoding.walk.AnchorTexts.of(table, prepared, cost, cost, mean_distinct_L=None)
    price = ThroughputTable(np.array([1]), np.array([3e-3]), np.array([3]))
    tables = decoding.prepared.device_tables(prepared, cost, price, DEVICE)
    on_device = decoding.prepared.device_trees(trees, DEVICE)
    arms = {
        "fixed": (RoundRules("fixed"), FixedLength(4), None),
        "trees": (RoundRules("policy", tables, on_device), Dinkelbach(3e-3), TreeHazards(trees)),
    }
    met = set()
    for name, (rules, policy, by_trees) in arms.items():
        round = engine.round(rules)
        engine.buffers.fixed_B.fill_(4)
        # The history is made with the round: a prefill starts it.
        first = engine.prefill([PROMPT])
        lines = decoder.decode(round.run, first, max_new_tokens=TOKENS)[0].lines
        walked = texts.walk_text(texts.texts()[0], policy, by_trees)
        assert [step.length for step in walked] == [line.length for line in lines], name
        assert [step.stop - step.start for step in walked] == [len(x.emitted) for x in lines], name
        met |= {(len(line.emitted), line.length) for line in lines}
    assert len({length for _, length in met}) > 1
    assert len({emitted for emitted, _ in met}) > 1


def test_an_arm_that_falls_back_has_no_rate(decoding: Any) -> None:
    def text(arm: str, fallbacks: list[int]) -> Any:
        rounds = len(fallbacks)
        return decoding.arms.Text(
            arm=arm,
            category="code",
            prompt=0,
            tokens=list(range(rounds + 1)),
            lengths=[4] * rounds,
            accepted=[0] * rounds,
            emitted=[1] * rounds,
            us=[1000.0] * rounds,
            margins=[1.0] * rounds,
            loops=[0] * rounds,
            fallbacks=fallbacks,
            wall_us=1000.0 * rounds,
        )

    def summary(fallbacks: list[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        texts = [text("ar", [0] * 200), text("ours", fallbacks)]
        return decoding.findings.rows_and_summary(texts, {}, {})

    rows, found = summary([0] * 198 + [1, 1])
    assert found["over_ar"] == 1.0
    assert [row["fallback_rounds"] for row in rows if row["arm"] == "ours"] == [2, 2]
    rows, found = summary([0] * 197 + [1, 1, 2])
    assert "tokens_per_s" not in found
    assert "3 of 200 rounds" in found["failed_arms"]["ours"]
    failed = [row for row in rows if row["arm"] == "ours"]
    assert {row["kind"] for row in failed} == {"failed_arm"}
    assert not any("tokens_per_s" in row for row in failed)


def test_differences_are_judged_once_a_place(decoding: Any) -> None:
    def text(arm: str, prompt: int, tokens: list[int]) -> Any:
        margins = [0.5, 0.25, 0.125]
        return decoding.arms.Text(arm, "code", prompt, tokens, [], [], [], [], margins, [], [], 1.0)

    texts = [
        text("ar", 0, [5, 6, 7, 8]),
        text("ar", 1, [1, 2, 3, 4]),
        text("ours", 0, [5, 6, 9, 8]),
        text("fixed-4", 0, [5, 6, 9, 1]),
        text("paper", 0, [5, 6, 4, 1]),
        text("ours", 1, [1, 2, 3, 4]),
        text("fixed-4", 1, [2, 2, 3, 4]),
    ]
    asked = []

    def exact(prefix: list[int], pair: tuple[int, int]) -> tuple[float, float]:
        asked.append((prefix, pair))
        return 1.0, 1.5 if pair[1] == 9 else 0.5

    turns = iter([True, True, False])
    rows, facts = decoding.differences.judged_places(
        texts, [[40], [50, 51]], exact, allows=lambda: next(turns)
    )
    assert asked == [([40, 5, 6], (7, 9)), ([40, 5, 6], (7, 4))]
    assert [row["arms"] for row in rows] == [["ours", "fixed-4"], ["paper"], ["fixed-4"]]
    assert [row["margin_nats"] for row in rows] == [0.25, 0.25, None]
    assert [row.get("float64_gap_of_found") for row in rows] == [0.5, -0.5, None]
    assert facts == {
        "difference_places": 3,
        "differences_judged_in_float64": 2,
        "differences_that_float64_prefers": 1,
    }
