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
    reference = {stream.prompt: stream.text for stream in plain if not stream.error}
    reference_tokens = {stream.prompt: stream.tokens[-1] for stream in plain if stream.tokens}
    margins = {int(entry["prompt"]): entry for entry in scored}
    equal, differences = 0, []
    for stream in ours:
        if stream.error or stream.prompt not in reference:
            continue
        other = reference[stream.prompt]
        if stream.tokens[-1] == reference_tokens[stream.prompt]:
            same = stream.text == other
        else:
            same = _begins_alike(stream.text, other)
        if same:
            equal += 1
            continue
        mine, theirs = looping.ids(stream.text), looping.ids(other)
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
