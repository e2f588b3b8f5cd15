"""Greedy texts against plain decoding: equal, or where they part and by what margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serving.decoding import Looping
from serving.load import Prompt, Stream
from serving.servers import Server

# Logits of a bf16 LM head lie between 8 and 32 in these models, where neighbouring bf16 values are
# 1/16 to 1/8 apart: two candidates within twice that can change places by rounding alone.
TIE_NATS = 0.25


def top_two(server: Server, prompts: Sequence[Prompt], max_tokens: int) -> list[dict[str, Any]]:
    """Plain decoding once more, with the two likeliest tokens at every place.

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
                "top_logprobs_num": 2,
            },
        )
        found.append({"prompt": prompt.number, **scored(answer)})
    return found


def scored(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen tokens, their margins and who came second, of one answer of SGLang's `/generate`.

    Of two equal logits the chosen token may be listed second; the other one is the runner-up then.
    """
    told = answer["meta_info"]
    ids = [int(entry[1]) for entry in told["output_token_logprobs"]]
    pairs = told["output_top_logprobs"]
    return {
        "ids": ids,
        "margins_nats": [float(first[0] - second[0]) for first, second in pairs],
        "runner_up": [
            int(first[1] if int(second[1]) == chosen else second[1])
            for chosen, (first, second) in zip(ids, pairs, strict=True)
        ],
        "text": answer["text"],
    }


def _begins_alike(one: str, other: str) -> bool:
    """Whether the shorter text begins the longer, but for a character that its end cut."""
    shorter, longer = sorted((one, other), key=len)
    return longer.startswith(shorter.rstrip("\ufffd"))


def same_text(one: Stream, other: Stream) -> bool:
    """Whether two answers to a prompt are equal, as far as the shorter of the two goes."""
    if one.tokens[-1] == other.tokens[-1]:
        return one.text == other.text
    return _begins_alike(one.text, other.text)


def answered(streams: Sequence[Stream]) -> dict[int, Stream]:
    """Answers by prompt, without those that failed."""
    return {stream.prompt: stream for stream in streams if stream.tokens and not stream.error}


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
    equal, differences = 0, []
    for stream in ours:
        if stream.error or stream.prompt not in reference:
            continue
        other = reference[stream.prompt]
        if same_text(stream, other):
            equal += 1
            continue
        mine, theirs = looping.ids(stream.text), looping.ids(other.text)
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
        entry = margins.get(stream.prompt)
        difference: dict[str, Any] = {"prompt": stream.prompt, "token": at}
        # Answers go on behind end tokens, which have no text: places are those of tokens with one.
        shown = [] if entry is None else [k for k, i in enumerate(entry["ids"]) if looping.shows(i)]
        # The scored run must have gone the same way up to here, or its margin is of another place.
        if entry is not None and at < len(shown):
            place = shown[at]
            if [entry["ids"][k] for k in shown[:at]] == theirs[:at]:
                difference["margin_nats"] = float(entry["margins_nats"][place])
                difference["is_runner_up"] = (
                    at < len(mine) and mine[at] == entry["runner_up"][place]
                )
        differences.append(difference)
    found = [d["margin_nats"] for d in differences if "margin_nats" in d]
    return {
        "compared": equal + len(differences),
        "equal": equal,
        "differences": differences,
        "largest_margin_nats": max(found, default=0.0),
        "differences_beyond_tie": sum(margin > TIE_NATS for margin in found),
        # The tie is between the two likeliest tokens; only the runner-up is one of them for sure.
        "differences_by_runner_up": sum(bool(d.get("is_runner_up")) for d in differences),
        "margins_unknown": len(differences) - len(found),
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
