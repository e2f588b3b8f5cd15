"""Arms of the decode benchmark: what each captures, and texts decoded by all of them in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from decoding.costs import launcher
from decoding.pair import Prompt

from hybridspec.calibrate.loops import round_loop_periods
from hybridspec.reference.gpu.decode import Decoded, Decoder
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import RoundRules

AR, STOCK, FULL, OURS = "ar", "dflash16-sglang-gdn", "dflash16", "ours"
EVICT, PAPER = "evict", "paper"


@dataclass
class Arm:
    """One way to decode.

    Attributes:
        length: of fixed arms, else 0. rows: rows a request of the graph.
    """

    name: str
    engine: GpuEngine
    decoder: Decoder
    replay: Callable[[], None]
    length: int = 0
    rows: int = 16


@dataclass
class Text:
    """What one arm made of one prompt."""

    arm: str
    category: str
    prompt: int
    tokens: list[int]
    lengths: list[int]
    accepted: list[int]
    emitted: list[int]
    us: list[float]
    margins: list[float]
    loops: list[int]
    fallbacks: list[int]
    wall_us: float


@dataclass
class Totals:
    """Sums over rounds outside repetition loops."""

    tokens: int = 0
    us: float = 0.0
    rounds: int = 0
    rows: int = 0
    loop_rounds: int = 0
    fallback_rounds: int = 0
    all_rounds: int = 0
    texts: int = 0

    def add(self, text: Text) -> None:
        """Count a text."""
        self.texts += 1
        self.all_rounds += len(text.us)
        # Inside loops as well: a fallback says something about the arm, not about the text.
        self.fallback_rounds += sum(reason != 0 for reason in text.fallbacks)
        for loop, emitted, us, length in zip(
            text.loops, text.emitted, text.us, text.lengths, strict=True
        ):
            if loop:
                self.loop_rounds += 1
                continue
            self.tokens += emitted
            self.us += us
            self.rounds += 1
            self.rows += length

    def row(self) -> dict[str, Any]:
        """Rates, with units in the names."""
        rounds = max(self.rounds, 1)
        return {
            "tokens_per_s": round(self.tokens / max(self.us, 1e-9) * 1e6, 2),
            "tokens_a_round": round(self.tokens / rounds, 4),
            "ms_a_round": round(self.us / rounds / 1e3, 4),
            "mean_length": round(self.rows / rounds, 3),
            "rounds": self.rounds,
            "tokens": self.tokens,
            "loop_rounds_left_out": self.loop_rounds,
            "fallback_rounds": self.fallback_rounds,
            "texts": self.texts,
        }


def first_difference(text: Text, plain: Text) -> int | None:
    """Token at which two answers part, as far as the shorter goes."""
    pairs = enumerate(zip(text.tokens, plain.tokens, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), None)


@dataclass
class Comparison:
    """Texts of an arm against plain decoding's."""

    equal: int = 0
    differing: int = 0
    margins: list[float] = field(default_factory=list)

    def add(self, text: Text, plain: Text) -> None:
        """Compare one text; where they part, how near a tie plain decoding was."""
        parted = first_difference(text, plain)
        if parted is None:
            self.equal += 1
            return
        self.differing += 1
        # The first token is the prefill's and has no margin among the rounds.
        if parted >= 1:
            self.margins.append(plain.margins[parted - 1])

    def row(self) -> dict[str, Any]:
        """Counts, and ln(p1 / p2) of plain decoding at the first difference."""
        return {
            "texts_equal_to_ar": self.equal,
            "texts_differing": self.differing,
            "margin_at_difference_median": round(float(np.median(self.margins)), 4)
            if self.margins
            else None,
            "margin_at_difference_max": round(max(self.margins), 4) if self.margins else None,
        }


def make_arm(
    name: str, engine: GpuEngine, decoder: Decoder, rules: RoundRules, *, length: int = 0
) -> Arm:
    """Capture an arm."""
    plain = rules.mode == "plain"
    replay = launcher(engine, engine.round(rules))
    return Arm(name, engine, decoder, replay, length, 1 if plain else 16)


def decode_text(
    arm: Arm, first: int, snapshot: Any, prompt: Prompt, index: int, *, tokens: int
) -> Text:
    """One prompt through one arm, from its prefill."""
    arm.engine.restore(snapshot)
    if arm.length:
        arm.engine.buffers.fixed_B.fill_(arm.length)
    began = time.perf_counter()
    found = arm.decoder.decode(arm.replay, [first], max_new_tokens=tokens, rows=arm.rows)[0]
    wall = time.perf_counter() - began
    return text_of(arm.name, found, prompt, index, wall)


def text_of(arm: str, found: Decoded, prompt: Prompt, index: int, wall_s: float) -> Text:
    """Rounds of a text with the loops that they lie in."""
    stops, place = [], 1
    for line in found.lines:
        place += len(line.emitted)
        stops.append(place)
    starts = [1, *stops[:-1]] if stops else []
    loops = round_loop_periods(found.tokens, starts=starts, stops=stops).tolist()
    return Text(
        arm,
        prompt.category,
        index,
        found.tokens,
        [line.length for line in found.lines],
        [line.accepted for line in found.lines],
        [len(line.emitted) for line in found.lines],
        [line.us for line in found.lines],
        [margin for line in found.lines for margin in line.margins],
        loops,
        [line.fallback for line in found.lines],
        wall_s * 1e6,
    )


def totals_of(texts: Sequence[Text]) -> dict[tuple[str, str], Totals]:
    """Sums by arm and category, `all` among the categories."""
    sums: dict[tuple[str, str], Totals] = {}
    for text in texts:
        for category in ("all", text.category):
            sums.setdefault((text.arm, category), Totals()).add(text)
    return sums
