"""What an engine remembers of a request, copied out for comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.reference.engine import Engine, Request


@dataclass
class State:
    """Everything the target remembers of a request: by layer recurrent, conv, keys, values."""

    recurrent: torch.Tensor
    conv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def distance(self, other: State) -> float:
        pairs = ((getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__)
        distances = []
        for mine, others in pairs:
            assert mine.shape == others.shape
            assert torch.isfinite(mine).all()
            distances.append(float((mine - others).abs().max()) if mine.numel() else 0.0)
        return max(distances)


def state_of(engine: Engine, request: Request) -> State:
    context = request.context_tokens
    return State(
        engine.pool.recurrent_SXHVK[request.slot].clone(),
        engine.pool.conv_SXWC[request.slot].clone(),
        request.cache.keys[:, :, :context].clone(),
        request.cache.values[:, :, :context].clone(),
    )


def draft_context_of(engine: Engine, request: Request) -> torch.Tensor:
    """Context keys and values of the drafter, those not injected yet included."""
    assert engine.drafter is not None
    assert request.draft_cache is not None
    count = request.drafter_tokens
    old = request.draft_cache
    cache = engine.drafter.new_cache()
    cache.reserve(request.context_tokens + BLOCK_SIZE)
    cache.keys[:, :, :count] = old.keys[:, :, :count]
    cache.values[:, :, :count] = old.values[:, :, :count]
    if request.pending_features:
        with torch.inference_mode():
            features = torch.cat(
                [torch.cat(part) for part in zip(*request.pending_features, strict=True)], -1
            )
            assert count + features.shape[0] == request.context_tokens
            engine.drafter.inject(cache, count, features)
    spans = [x[:, :, : request.context_tokens] for x in (cache.keys, cache.values)]
    return torch.stack(spans).clone()
