"""Greedy texts against plain decoding: equal, or where they part and by what margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.decoding import Looping
from serving.load import Prompt, Stream
from serving.servers import Server

# Logits of a bf16 LM head lie between 8 and 32 in these models, where neighbouring bf16 values are
# 1/16 to 1/8 apart: two candidates within twice that can change places by rounding alone.
TIE_NATS = 0.25


def top_two(
    server: Server, prompts: Sequence[Prompt], max_tokens: int, *, candidates: int = 2
) -> list[dict[str, Any]]:
    """Plain decoding once more, with the likeliest tokens at every place.

    Args:
        candidates: tokens that are told of each place; with more than two as `near`, see `scored`.

    Returns:
        one object a prompt: `prompt`, `ids` [N] and `margins_nats` [N], text in `text`.
    """
    found = []
    for prompt in prompts:
        answer = server.post(
            "/generate",
            {
                "input_ids": prompt.ids,
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": max_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "top_logprobs_num": candidates,
            },
        )
        found.append({"prompt": prompt.number, **scored(answer)})
    return found


def scored(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen tokens, their margins and who came second, of one answer of SGLang's `/generate`.

    Of two equal logits the chosen token may be listed second; the other one is the runner-up then.
    With more than two candidates `near` has how far each lies behind the best one, nats by token
    (three logits can be equal too), and `best_nats` the best one's log-probability.
    """
    told = answer["meta_info"]
    ids = [int(entry[1]) for entry in told["output_token_logprobs"]]
    places = told["output_top_logprobs"]
    found: dict[str, Any] = {
        "ids": ids,
        "margins_nats": [float(first[0] - second[0]) for first, second, *_ in places],
        "runner_up": [
            int(first[1] if int(second[1]) == chosen else second[1])
            for chosen, (first, second, *_) in zip(ids, places, strict=True)
        ],
        "text": answer["text"],
    }
    if any(len(place) > 2 for place in places):
        found["near"] = [
            {int(token): float(place[0][0] - value) for value, token, *_ in place}
            for place in places
        ]
        found["best_nats"] = [float(place[0][0]) for place in places]
    return found


def _begins_alike(one: str, other: str) -> bool:
    """Whether the shorter text begins the longer, but for a character that its end cut."""
    shorter, longer = sorted((one, other), key=len)
    return longer.startswith(shorter.removesuffix("\ufffd"))


def same_text(one: Stream, other: Stream) -> bool:
    """Whether two answers to a prompt are equal, as far as the shorter of the two goes."""
    if one.tokens[-1] == other.tokens[-1]:
        return one.text == other.text
    return _begins_alike(one.text, other.text)


def answered(streams: Sequence[Stream]) -> dict[int, Stream]:
    """Answers by prompt, without those that failed."""
    return {stream.prompt: stream for stream in streams if stream.tokens and not stream.error}


@dataclass(frozen=True)
class Difference:
    """First place where a text leaves plain decoding's.

    Attributes:
        token: tokens with text before it.
        place: the same among all of plain decoding's tokens, None where the scored run went
            another way before it or ends there.
        plain, found: the tokens of plain decoding and of the text, None behind their ends.
        margin_nats: plain decoding's best token over its second best there, None if unknown.
    """

    prompt: int
    token: int
    place: int | None
    plain: int | None
    found: int | None
    margin_nats: float | None
    is_runner_up: bool

    def row(self) -> dict[str, Any]:
        """For result files."""
        row: dict[str, Any] = {"prompt": self.prompt, "token": self.token}
        if self.margin_nats is not None:
            row |= {"margin_nats": self.margin_nats, "is_runner_up": self.is_runner_up}
        return row


def difference(
    ours: Stream, plain: Stream, entry: Mapping[str, Any] | None, looping: Looping
) -> Difference | None:
    """Where an answer leaves plain decoding's, None where it does not.

    Args:
        entry: plain decoding of the prompt with its margins, of `top_two`.
    """
    if same_text(ours, plain):
        return None
    mine, theirs = looping.ids(ours.text), looping.ids(plain.text)
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    found = mine[at] if at < len(mine) else None
    expected = theirs[at] if at < len(theirs) else None
    # Answers go on behind end tokens, which have no text: places are those of tokens with one.
    shown = [] if entry is None else [k for k, i in enumerate(entry["ids"]) if looping.shows(i)]
    # The scored run must have gone the same way up to here, or its margin is of another place.
    if entry is not None and at < len(shown):
        place = shown[at]
        if [entry["ids"][k] for k in shown[:at]] == theirs[:at]:
            second = found is not None and found == entry["runner_up"][place]
            margin = float(entry["margins_nats"][place])
            return Difference(ours.prompt, at, place, expected, found, margin, second)
    return Difference(ours.prompt, at, None, expected, found, None, False)


def compare(
    ours: Sequence[Stream],
    plain: Sequence[Stream],
    scored: Sequence[Mapping[str, Any]],
    looping: Looping,
) -> dict[str, Any]:
    """Texts of an arm against those of plain decoding, as far as the shorter of the two goes.

    Args:
        ours, plain: answers to the same prompts with one client.
        scored: of `top_two`.
    """
    reference = answered(plain)
    margins = {int(entry["prompt"]): entry for entry in scored}
    compared = [s for s in ours if not s.error and s.prompt in reference]
    found = [
        difference(stream, reference[stream.prompt], margins.get(stream.prompt), looping)
        for stream in compared
    ]
    differences = [one.row() for one in found if one is not None]
    known = [d["margin_nats"] for d in differences if "margin_nats" in d]
    return {
        "compared": len(compared),
        "equal": len(compared) - len(differences),
        "differences": differences,
        "largest_margin_nats": max(known, default=0.0),
        "differences_beyond_tie": sum(margin > TIE_NATS for margin in known),
        # The tie is between the two likeliest tokens; only the runner-up is one of them for sure.
        "differences_by_runner_up": sum(bool(d.get("is_runner_up")) for d in differences),
        "margins_unknown": len(differences) - len(known),
    }


def scored_elsewhere(
    plain: Sequence[Stream], other: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
    """Scored plain decoding of another recording, in which plain decoding has the same texts.

    Args:
        plain: answers of plain decoding with one client.
        other: recording.
        name: of its file.

    Raises:
        SystemExit: nothing is scored there, or its margins would be those of other texts.
    """
    if not other.get("scored"):
        raise SystemExit(
            f"--scored {name}: no plain decoding is scored there; name a recording with the arm "
            "ar, whole"
        )
    runs = other["arms"].get("ar", {"runs": {}})["runs"]
    there = answered([Stream(**stream) for stream in runs.get("1", [])])
    here = answered(plain)
    common = sorted(here.keys() & there.keys())
    if not common:
        raise SystemExit(
            f"--scored {name}: plain decoding with one client has no prompt in common with the "
            "recordings; margins hold for its own prompts only"
        )
    differ = [prompt for prompt in common if not same_text(here[prompt], there[prompt])]
    if differ:
        raise SystemExit(
            f"--scored {name}: plain decoding's texts of prompts {differ} are others than in the "
            "recordings, so its margins are not of these; take the recordings' own (leave it out)"
        )
    return list(other["scored"])


def differences_of(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All differences from plain decoding with one client, of all arms and client counts."""
    found = [difference for row in texts for difference in row["differences"]]
    margins = [d["margin_nats"] for d in found if "margin_nats" in d]
    return {
        "answers": sum(row["compared"] for row in texts),
        "differences": len(found),
        # Arms part from plain decoding at the same places again and again.
        "places": len({(d["prompt"], d["token"]) for d in found}),
        "by_runner_up": sum(row["differences_by_runner_up"] for row in texts),
        "exact_ties": sum(margin == 0.0 for margin in margins),
        "largest_margin_nats": max(margins, default=0.0),
        "margins_unknown": sum(row["margins_unknown"] for row in texts),
    }
