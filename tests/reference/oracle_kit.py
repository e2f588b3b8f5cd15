"""`transformers` as the oracle of logits, routes and greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_kit import Forced

ROUTE_TIE = 1e-5

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def load_oracle(folder: Path, model_class: str = "Qwen3_5MoeForConditionalGeneration") -> Any:
    """The same folder in fp32 on transformers' plain kernels."""
    model = getattr(transformers, model_class).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


@torch.inference_mode()
def oracle_logits(model: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [T, V] and router logits [T, experts] of each layer."""
    out = model(input_ids=torch.tensor([list(tokens)]), output_router_logits=True, use_cache=False)
    return out.logits[0], [layer.reshape(len(tokens), -1) for layer in out.router_logits]


def assert_equal_to_oracle(
    model: Any, tokens: Sequence[int], ours: Forced, *, atol: float = 2e-4
) -> int:
    """Logits within `atol`, experts of each row equal as sets unless the router ties.

    Returns:
        rows left out of the comparison because of a tie.
    """
    logits, router_logits = oracle_logits(model, tokens)
    torch.testing.assert_close(ours.logits, logits, atol=atol, rtol=0.0)
    assert len(ours.routes) == len(router_logits)
    ties = 0
    for layer, (routes, scores) in enumerate(zip(ours.routes, router_logits, strict=True)):
        top_k, experts = routes.shape[1], scores.shape[1]
        ordered = scores.sort(-1, descending=True)
        want = ordered.indices[:, :top_k].sort(-1).values
        differ = (routes.sort(-1).values != want).any(-1)
        if top_k < experts:
            tied = ordered.values[:, top_k - 1] - ordered.values[:, top_k] < ROUTE_TIE
            ties += int(tied.sum())
            differ &= ~tied
        assert not differ.any(), f"layer {layer} routes rows {differ.nonzero().view(-1).tolist()}"
    return ties


@torch.inference_mode()
def oracle_greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy text of transformers with its own cache, through `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()
