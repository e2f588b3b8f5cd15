"""Every bundled test prompt against `transformers`: logits, routes and greedy text."""

from __future__ import annotations

import pytest
from engine_kit import decode, prompts_of, teacher_forced, trained_pair
from oracle_kit import assert_equal_to_oracle, load_oracle, oracle_logits

from hybridspec.reference.loading import load_pair
from hybridspec.request import LengthRule

TOKENS = 96
TIE_MARGIN = 1e-3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_bundled_prompts_equal_transformers() -> None:
    folder = trained_pair("bundled")
    model = load_oracle(folder / "target")
    engine = load_pair(folder / "target", folder / "drafter", max_context=1024, max_batch=1)
    prompts = prompts_of(folder)
    assert len(prompts) == 280
    ties = tokens = 0
    for prompt in prompts:
        [ours] = decode(engine, [prompt], LengthRule("none"), TOKENS)
        text = [*prompt, *ours]
        ties += assert_equal_to_oracle(model, text, teacher_forced(engine, text, [0]))
        # Our text is transformers' greedy text if each token is its argmax behind the ones before.
        logits, _ = oracle_logits(model, text)
        for place in range(len(prompt), len(text)):
            top = logits[place - 1].topk(2)
            if int(top.indices[0]) != text[place]:
                assert int(top.indices[1]) == text[place]
                assert float(top.values[0] - top.values[1]) < TIE_MARGIN
        tokens += len(ours)
    # Router ties are rare: a row of a layer in ten thousand at most.
    assert ties <= tokens * engine.target_config.num_layers / 10_000 + 5
