"""Every bundled test prompt against `transformers`: logits, routes and greedy text."""

from __future__ import annotations

import pytest
import torch
from engine_kit import decode, prompts_of, teacher_forced, trained_pair
from oracle_kit import ROUTE_TIE, load_oracle, oracle_logits

from hybridspec.reference.loading import load_pair
from hybridspec.request import LengthRule

TOKENS = 96
TIE_MARGIN = 1e-3


def first_tied_row(router_logits: list[torch.Tensor], top_k: int) -> int:
    """First row in which a router's last chosen and first refused expert tie, else all rows."""
    rows = router_logits[0].shape[0]
    tied = torch.zeros(rows, dtype=torch.bool)
    for scores in router_logits:
        ordered = scores.sort(-1, descending=True).values
        tied |= ordered[:, top_k - 1] - ordered[:, top_k] < ROUTE_TIE
    places = tied.nonzero().view(-1)
    return int(places[0]) if len(places) else rows


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_bundled_prompts_equal_transformers() -> None:
    folder = trained_pair("bundled")
    model = load_oracle(folder / "target")
    engine = load_pair(folder / "target", folder / "drafter", max_context=1024, max_batch=1)
    top_k = engine.target_config.experts_per_token
    prompts = prompts_of(folder)
    assert len(prompts) == 280
    compared = rows = logit_ties = 0
    for prompt in prompts:
        [ours] = decode(engine, [prompt], LengthRule("none"), TOKENS)
        text = [*prompt, *ours]
        logits, router_logits = oracle_logits(model, text)
        forced = teacher_forced(engine, text, [0])
        # A tie in a router may send a row to another expert, and all rows behind it read its state:
        # up to there everything must be equal.
        stop = first_tied_row(router_logits, top_k)
        torch.testing.assert_close(forced.logits[:stop], logits[:stop], atol=2e-4, rtol=0.0)
        for routes, scores in zip(forced.routes, router_logits, strict=True):
            want = scores[:stop].topk(top_k).indices.sort(-1).values
            assert torch.equal(routes[:stop].sort(-1).values, want)
        # Our text is transformers' greedy text if each token is its argmax behind the ones before.
        for place in range(len(prompt), min(len(text), stop + 1)):
            top = logits[place - 1].topk(2)
            if int(top.indices[0]) != text[place]:
                assert int(top.indices[1]) == text[place]
                assert float(top.values[0] - top.values[1]) < TIE_MARGIN
                logit_ties += 1
        compared, rows = compared + stop, rows + len(text)
    # Ties end the comparison of a prompt early; most of the text must still be covered.
    assert compared > 0.75 * rows
    assert logit_ties <= 3
