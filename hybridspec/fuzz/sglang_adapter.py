"""SGLang with the plugin under the fuzzer: an engine of this process, asked from outside.

Its scheduler forms the rounds. What can be compared is text, with plain decoding's by the margin
rule, and the digests that `sglang_plugin/state_probe.py` writes inside the scheduler's process,
with those of a run that verifies one row a round. Decoding of SGLang is no measure for states: it
rounds beta to bfloat16 where verification does not. Rounds of one row run the same kernels over the
same number of rows as any other round and commit one, so that a state differs by rounding alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridspec.fuzz.noise import CONTROL_FACTOR, SIGNAL_OVER_TOLERANCE, STORES_PER_LAYER
from hybridspec.fuzz.sessions import Fault, Heard, Visit

UNIT_ROUNDOFF_BF16 = 2.0**-8
LEAST_CONTROL_FACTOR = 4.0
Digests = dict[tuple[str, int], dict[str, tuple[np.ndarray, np.ndarray]]]


class SglangLive:
    """A `sglang.Engine` with the plugin as a `sessions.LiveEngine`.

    Args:
        engine: started without a tokenizer.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def stream(self, visit: Visit) -> AsyncIterator[Heard]:
        """See `LiveEngine`."""
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": visit.max_new_tokens,
            "ignore_eos": True,
        }
        if visit.verify_length is not None:
            asked = {"verify_length": visit.verify_length}
            sampling["custom_params"] = {"hybridspec": asked}
        chunks = await self.engine.async_generate(
            input_ids=list(visit.prompt), sampling_params=sampling, rid=visit.name, stream=True
        )
        said = Heard()
        async for chunk in chunks:
            said = heard_of(chunk, said)
            yield said

    def abort(self, name: str) -> None:
        """See `LiveEngine`."""
        self.engine.tokenizer_manager.abort_request(rid=name)


def heard_of(chunk: Mapping[str, Any], before: Heard) -> Heard:
    """One chunk of a stream: output so far, and at the end why it ended.

    Args:
        before: of the chunk before; a torn request's last chunk may hold no output.
    """
    meta = chunk.get("meta_info") or {}
    reason = meta.get("finish_reason")
    histogram = meta.get("spec_cap_lens_histogram") or []
    return Heard(
        list(chunk.get("output_ids") or before.tokens),
        None if reason is None else str(reason["type"] if isinstance(reason, dict) else reason),
        int(meta.get("spec_verify_ct") or before.rounds),
        {rows: int(count) for rows, count in enumerate(histogram) if count},
        int(meta.get("cached_tokens") or before.cached),
    )


def read_digests(path: Path) -> Digests:
    """Norms and sums by request, tokens in the caches and part. Half a last line is left out."""
    found: Digests = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        parts = {name: value for name, value in row.items() if isinstance(value, dict)}
        found[row["name"], row["context_tokens"]] = {
            name: (np.asarray(value["norm"]), np.asarray(value["sums"]))
            for name, value in parts.items()
        }
    return found


def distance(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    """Estimated distance of two states over the norm of the second, largest over layers."""
    apart = np.sqrt(((one[1] - other[1]) ** 2).sum(axis=1))
    norms = np.maximum(other[0], 1e-30)
    # A digest with a value that is not finite is apart from everything.
    return float(np.nan_to_num(apart / norms, nan=math.inf, posinf=math.inf).max())


@dataclass
class StateReport:
    """Comparison of states, by part; all distances are relative.

    Attributes:
        compared: states. control: largest distance of two runs of one row a round, alone and with
            neighbours. signal: median distance of two places one token apart; in a loop of one
            token there is next to none. allowed: see `allowed_of`. largest: seen. faults: states
            beyond what is allowed.
        blind: parts in which one token makes less than twice what is allowed; not judged.
    """

    compared: int = 0
    control: dict[str, float] = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pairing:
    """A text and the one it is compared with, by their names in the digests.

    Attributes:
        shared_tokens: length of what both have in common, prompt included.
    """

    name: str
    reference: str
    prompt_tokens: int
    shared_tokens: int


@dataclass(frozen=True)
class Alone:
    """A run of one row a round."""

    name: str
    prompt: Sequence[int]
    tokens: Sequence[int]


def shared_tokens(prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts of one prompt have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return len(prompt) + same


def follow_pairing(
    name: str, prompt: Sequence[int], tokens: Sequence[int], alone: Alone
) -> Pairing:
    """A request that goes on from an answer, with the run of one row that says the same answer.

    Where that run leaves the prompt before its end, nothing is shared.
    """
    whole, other = [*prompt, *tokens], [*alone.prompt, *alone.tokens]
    shared = shared_tokens((), whole, other)
    return Pairing(name, alone.name, len(prompt), shared if shared >= len(prompt) else -1)


def compare_states(
    digests: Digests, checks: Sequence[Pairing], controls: Sequence[Pairing], *, layers: int
) -> StateReport:
    """Compare states behind the same tokens.

    Args:
        checks: texts under test with runs of one row a round.
        controls: runs of one row a round with neighbours, with those alone.
        layers: of the target.
    """
    report = StateReport()
    moves: dict[str, list[float]] = {}
    for pairing in controls:
        for part, found, _ in _distances(digests, pairing):
            report.control[part] = max(report.control.get(part, 0.0), found)
        for context in _contexts(pairing):
            now = digests.get((pairing.reference, context), {})
            later = digests.get((pairing.reference, context + 1), {})
            for part in now.keys() & later.keys():
                moves.setdefault(part, []).append(distance(now[part], later[part]))
    report.signal = {part: float(np.median(values)) for part, values in moves.items()}
    # As `noise`'s, without extremes: a norm is over all values of a layer. sqrt(2 / 3) < 1.
    floor = math.sqrt(STORES_PER_LAYER * layers) * UNIT_ROUNDOFF_BF16
    for part, control in report.control.items():
        signal = report.signal.get(part, 0.0)
        report.allowed[part] = allowed_of(control, signal, floor)
        if signal < SIGNAL_OVER_TOLERANCE * report.allowed[part]:
            report.blind.append(part)
    for pairing in checks:
        for part, found, context in _distances(digests, pairing):
            report.compared += 1
            report.largest[part] = max(report.largest.get(part, 0.0), found)
            allowed = report.allowed.get(part)
            if allowed is not None and part not in report.blind and not found <= allowed:
                text = f"{part} behind {context} tokens is {found:.3g} from rounds of one row"
                report.faults.append(Fault(part, pairing.name, text, found))
    return report


def allowed_of(control: float, signal: float, floor: float = 0.0) -> float:
    """What rounding may make of a state.

    `noise`'s limit where that leaves a token's change visible. Else as much of it as does, but at
    least 4 times the control: 2 for the sums in another order, 2 for texts longer than its own.

    Args:
        control, signal: of a `StateReport`.
        floor: where the control is bitwise equal.
    """
    widest = max(CONTROL_FACTOR * control, floor)
    least = max(LEAST_CONTROL_FACTOR * control, floor)
    return min(widest, max(least, signal / SIGNAL_OVER_TOLERANCE))


def _contexts(pairing: Pairing) -> range:
    # A state behind n tokens is compared where these n are the same.
    return range(pairing.prompt_tokens, pairing.shared_tokens + 1)


def _distances(digests: Digests, pairing: Pairing) -> list[tuple[str, float, int]]:
    found = []
    for context in _contexts(pairing):
        one = digests.get((pairing.name, context))
        other = digests.get((pairing.reference, context))
        if one is None or other is None:
            continue
        found += [(part, distance(one[part], other[part]), context) for part in one.keys() & other]
    return found
