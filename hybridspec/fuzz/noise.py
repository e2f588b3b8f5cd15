"""How far rounding moves what an engine remembers, measured; and whether a fault would show in it.

An engine that computes in bfloat16 is not plain decoding bit by bit. The control is plain decoding
against plain decoding: every slot of the engine decodes without drafts, its neighbours joining one
after the other, beside the same texts alone. Both arms of a later comparison are rounded at the
same places as both arms of the control, so the control has their scale. Allowed is the larger of

    8 x control           8 = 1.3 x 2 x 3: extremes of n normal values grow as sqrt(2 ln n), by 1.3
                          from the 1e5 values of a control to the 1e9 of a long run; 2, as both arms
                          of the control run one row and only one arm of a comparison does, so all
                          its sums are taken in another order; 3 for texts longer than the control's
    5 sqrt(6 layers) u max
                          a value passes 6 stores a layer, each off by an error that is uniform
                          within the unit roundoff u of the dtype, so of deviation u / sqrt(3); both
                          arms have it, and 1e9 normal values reach 6.1 deviations: 6.1 sqrt(2 / 3)
                          = 5. max is the part's largest magnitude. This holds where the control is
                          bitwise equal, as it may be.

and the engine is refused for fuzzing where the change that one token makes to a part, in the median
over places, is not at least twice what is allowed: a commit off by one could then hide in rounding.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hybridspec.errors import EngineRefusal
from hybridspec.fuzz.adapter import LOGITS, EngineAdapter, EngineFacts, Memory
from hybridspec.fuzz.operations import History, Join, Leave, Plan, Step
from hybridspec.fuzz.plain import CONV, KEYS, RECURRENT, VALUES
from hybridspec.fuzz.play import Tally, play

CONTROL_FACTOR = 8.0
STORES_PER_LAYER, EXTREME = 6, 5.0
SIGNAL_OVER_TOLERANCE = 2.0
PARTS: tuple[str, ...] = (KEYS, VALUES, CONV, RECURRENT, LOGITS)
# Parts that every token changes as a whole; of KV it adds a row.
MOVING: tuple[str, ...] = (CONV, RECURRENT, LOGITS)


@dataclass(frozen=True)
class Noise:
    """What the control showed, by part.

    Attributes:
        control: largest absolute difference between the two arms of plain decoding.
        largest: largest magnitude.
        signal: median over places of the largest change that one token makes; of moving parts.
        tolerance: see the module.
        rounds: of the control.
    """

    control: Mapping[str, float]
    largest: Mapping[str, float]
    signal: Mapping[str, float]
    tolerance: Mapping[str, float]
    rounds: int


def control_history(facts: EngineFacts, *, tokens: int, seed: int) -> History:
    """Requests join one after the other and all decode without drafts, about `tokens` rounds.

    Prompts have up to `tokens` tokens as well.
    """
    rng = random.Random(f"control/{seed}")
    operations: list[Join | Step | Leave] = []
    for key in range(facts.max_requests):
        length = rng.randint(1, max(1, min(tokens, facts.max_context - tokens - 1)))
        prompt = tuple(rng.randrange(facts.vocab_size) for _ in range(length))
        # Sampled, as greedy text of a small model runs into loops, where tokens change little.
        operations.append(Join(key, prompt, temperature=1.0, seed=rng.randrange(2**31)))
        share = max(1, tokens // facts.max_requests)
        operations += [Step({k: Plan(0) for k in range(key + 1)})] * share
    return tuple(operations)


class _Watched:
    """An adapter without limits that keeps largest magnitudes and the changes of each token."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        unlimited = dict.fromkeys(PARTS, math.inf)
        self.facts = replace(adapter.facts, tolerance=unlimited, tie_logits=math.inf)
        self.largest = dict.fromkeys(PARTS, 0.0)
        self.changes: dict[str, list[float]] = {part: [] for part in MOVING}
        self._last: dict[tuple[int, str], torch.Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._adapter, name)

    def memory(self, key: int) -> Memory:
        """As the adapter's."""
        memory = self._adapter.memory(key)
        for part, values in memory.parts.items():
            self._see(key, memory.context_tokens, part, values)
        return memory

    def step(self, plans: Mapping[int, Plan], continuations: Mapping[int, list[int]]) -> object:
        """As the adapter's."""
        outcomes = self._adapter.step(plans, continuations)
        for key, outcome in outcomes.items():
            if outcome.logits_EV is not None:
                self._see(key, -1, LOGITS, outcome.logits_EV[-1])
        return outcomes

    def _see(self, key: int, context: int, part: str, values: torch.Tensor) -> None:
        self.largest[part] = max(self.largest[part], float(values.abs().max()))
        if part not in MOVING:
            return
        # Who took no part did not move; its neighbours' rounds say nothing about one token.
        last = self._last.get((key, part))
        if last is not None:
            change = float((values - last).abs().max())
            if change > 0.0:
                self.changes[part].append(change)
        self._last[key, part] = values.clone()


def measure_noise(
    adapter: EngineAdapter, *, layers: int, unit_roundoff: float, tokens: int, seed: int = 0
) -> Noise:
    """Play the control and derive what is rounding.

    Args:
        layers: of the target. unit_roundoff: of the dtype that the engine stores in.
        tokens: rounds of the control.

    Raises:
        EngineRefusal: the control itself breaks, or one token changes a part by no more than
            twice its tolerance.
    """
    watched, tally = _Watched(adapter), Tally()
    history = control_history(adapter.facts, tokens=tokens, seed=seed)
    broken = play(watched, history, tally)  # type: ignore[arg-type]
    if broken is not None:
        raise EngineRefusal(
            f"plain decoding in {adapter.facts.name} is not plain decoding: {broken.message}; "
            "mend that first: nothing can be compared with it"
        )
    relative = EXTREME * math.sqrt(STORES_PER_LAYER * layers) * unit_roundoff
    signal = {part: statistics.median(found or [0.0]) for part, found in watched.changes.items()}
    tolerance = {
        part: max(CONTROL_FACTOR * tally.worst.get(part, 0.0), relative * watched.largest[part])
        for part in PARTS
    }
    for part in (CONV, RECURRENT):
        if not signal[part] >= SIGNAL_OVER_TOLERANCE * tolerance[part]:
            raise EngineRefusal(
                f"{part}: one token changes it by {signal[part]:.2g}, rounding is "
                f"allowed {tolerance[part]:.2g}; a commit off by one could hide: fuzz a pair that "
                "routes every token to all its experts, or a dtype with more digits"
            )
    return Noise(dict(tally.worst), watched.largest, signal, tolerance, tally.counts["rounds"])
