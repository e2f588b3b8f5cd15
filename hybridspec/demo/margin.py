"""How close two tokens were where an output first differs from plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from hybridspec.calibrate.prompts import load_prompts
from hybridspec.demo import assets
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule


def logit_margins(places: Sequence[tuple[str, Sequence[int]]]) -> list[float]:
    """Top-1 minus top-2 logit of the embedded target behind each place.

    Args:
        places: bundled prompt id and the tokens generated before the difference.
    """
    target, _, prompts_file = assets.require()
    texts = {p.prompt_id: p.text for p in load_prompts(str(prompts_file))}
    tokenizer = Tokenizer.load(target)
    engine = load_pair(target, None, max_batch=1)
    return [next_margin(engine, [*tokenizer.encode(texts[p]), *done]) for p, done in places]


def next_margin(engine: Engine, tokens: Sequence[int]) -> float:
    """Top-1 minus top-2 logit behind `tokens`, by plain prefill."""
    request = engine.add(tokens, length_rule=LengthRule("none"))
    engine.remove(request)
    top = engine.last_prefill_logits.topk(2).values.tolist()
    return float(top[0] - top[1])
