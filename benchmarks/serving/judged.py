"""Greedy answers judged by plain decoding: equal, a tie with its margin, or a fault.

An answer is judged at its first difference from plain decoding of one client. It is a tie where the
token that it goes on with lies within `TIE_NATS` of plain decoding's best one there, by plain
decoding's own log-probabilities. Beyond that the target itself is asked, in float64 behind the same
tokens: plain decoding in bfloat16 rounds too, and the token found must be the target's best.
Whatever is neither is a fault, and so is a difference whose margin is unknown. Texts are compared,
so a token that has none (a special one) is seen by what follows it only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from fuzzing.exact import ExactRow
from serving.decoding import Looping
from serving.load import Prompt, Stream
from serving.texts import TIE_NATS, Difference, answered, difference

Verdict = Literal["tie", "float64", "fault"]
# Likeliest tokens that plain decoding tells of each place. Three can be equal.
CANDIDATES = 8


@dataclass
class Reference:
    """Plain decoding of one client.

    Attributes:
        prompts: by number. streams: its answers. scored: the same with `CANDIDATES`, of `top_two`.
    """

    prompts: dict[int, Prompt] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)
    scored: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def add(
        self,
        prompts: Sequence[Prompt],
        streams: Sequence[Stream],
        scored: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take the answers to some prompts."""
        self.prompts |= {prompt.number: prompt for prompt in prompts}
        self.streams |= answered(streams)
        self.scored |= {int(entry["prompt"]): entry for entry in scored}


@dataclass(frozen=True)
class Judged:
    """Answers of one stage against plain decoding's.

    Attributes:
        rows: one object a difference, with its verdict.
    """

    compared: int
    rows: tuple[dict[str, Any], ...]

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Differences that nothing excuses."""
        return [row for row in self.rows if row["verdict"] == "fault"]

    def told(self) -> str:
        """For people."""
        text = f"{self.compared - len(self.rows)} of {self.compared} as plain decoding"
        for verdict, words in (
            ("tie", "{} by a tie of at most {:.4g} nats"),
            ("float64", "{} as the target in float64 (margin up to {:.4g} nats)"),
            ("fault", "{} BEYOND A TIE (margin up to {:.4g} nats)"),
        ):
            margins = [row["margin_nats"] for row in self.rows if row["verdict"] == verdict]
            if margins:
                known = [margin for margin in margins if margin is not None]
                text += ", " + words.format(len(margins), max(known, default=float("nan")))
        return text


class Judge:
    """Judges greedy answers.

    Args:
        reference: plain decoding.
        exact: logits of the target in float64, asked only beyond a tie.
    """

    def __init__(self, reference: Reference, looping: Looping, exact: ExactRow) -> None:
        self.reference, self.looping, self.exact = reference, looping, exact
        self._asked: dict[tuple[int, int], torch.Tensor] = {}

    def judge(self, streams: Sequence[Stream]) -> Judged:
        """All answers of a stage; an abandoned one is judged as far as it came.

        Raises:
            KeyError: plain decoding was not asked for one of the prompts.
        """
        rows = []
        for stream in streams:
            plain = self.reference.streams[stream.prompt]
            entry = self.reference.scored.get(stream.prompt)
            found = difference(stream, plain, entry, self.looping)
            if found is not None:
                rows.append(self._row(found))
        return Judged(len(streams), tuple(rows))

    def _row(self, found: Difference) -> dict[str, Any]:
        margin = self._margin(found)
        row: dict[str, Any] = {
            "prompt": found.prompt,
            "token": found.token,
            "margin_nats": margin,
            "is_runner_up": found.is_runner_up,
            "plain_token": found.plain,
            "found_token": found.found,
        }
        if margin is None:
            return {**row, "verdict": "fault"}
        if margin <= TIE_NATS:
            return {**row, "verdict": "tie"}
        lead = self._lead(found)
        row["float64_lead_of_found_nats"] = round(lead, 4)
        return {**row, "verdict": "float64" if lead > 0.0 else "fault"}

    def _margin(self, found: Difference) -> float | None:
        """How far the token found lies behind plain decoding's best, None beyond its candidates."""
        place = self._place(found)
        if place is None or found.found is None:
            return None
        near: Mapping[int, float] = self.reference.scored[found.prompt]["near"][place]
        return near.get(found.found)

    def _place(self, found: Difference) -> int | None:
        """Where the two part, None where the scored run has not the text's token there."""
        if found.place is None or found.plain is None:
            return None
        same = self.reference.scored[found.prompt]["ids"][found.place] == found.plain
        return found.place if same else None

    def _lead(self, found: Difference) -> float:
        """How far the token found is ahead of the best other one in float64."""
        place, token = self._place(found), found.found
        assert place is not None
        assert token is not None
        key = found.prompt, place
        if key not in self._asked:
            said = self.reference.scored[found.prompt]["ids"][:place]
            self._asked[key] = self.exact([*self.reference.prompts[found.prompt].ids, *said])
        others_V = self._asked[key].clone()
        others_V[token] = -torch.inf
        return float(self._asked[key][token] - others_V.max())


def lead_changes(
    post: Callable[[str, Mapping[str, Any]], Any],
    prompts: Sequence[Prompt],
    scored: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Plain decoding against itself in another order of sums, nats, one entry a token.

    Plain decoding's own texts go through the server once more in one pass each. What changes in
    the lead of the best token over the second best is rounding, and none of it ours.

    Args:
        post: of a server of plain decoding.
        scored: its answers, of `top_two`.
    """
    by = {prompt.number: prompt for prompt in prompts}
    changes: list[float] = []
    for entry in scored:
        asked, said = by[int(entry["prompt"])].ids, list(entry["ids"])
        answer = post(
            "/generate",
            {
                "input_ids": [*asked, *said],
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": len(asked),
                "top_logprobs_num": CANDIDATES,
            },
        )["meta_info"]
        tokens, tops = answer["input_token_logprobs"], answer["input_top_logprobs"]
        # Servers differ in whether the first place is among them: they are matched from the end.
        for back in range(1, min(len(said), len(tokens), len(tops)) + 1):
            if int(tokens[-back][1]) != said[-back]:
                raise ValueError(f"token {tokens[-back][1]} where {said[-back]} was asked for")
            of = {int(token): float(value) for value, token, *_ in tops[-back] or ()}
            first, second = said[-back], int(entry["runner_up"][-back])
            if first in of and second in of:
                changes.append(abs(of[first] - of[second] - float(entry["margins_nats"][-back])))
    return changes


def spread(changes: Sequence[float]) -> dict[str, float]:
    """Largest and 99th percentile of what changes, and over how many tokens."""
    ordered = sorted(changes)
    at = min(len(ordered) - 1, int(0.99 * len(ordered))) if ordered else 0
    return {
        "tokens": len(ordered),
        "largest_nats": round(ordered[-1], 4) if ordered else 0.0,
        "p99_nats": round(ordered[at], 4) if ordered else 0.0,
    }
