"""Drafters with hand-made proposals, and a log of which parts of a pass ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from hybridspec.artifacts.tables import NUM_DRAFTS
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.engine import Engine
from hybridspec.reference.state import KVCache


@dataclass
class Script:
    """What to propose for one request in its next draft pass.

    Attributes:
        continuation: the true tokens of the request from position 0.
        right: drafts that are right before the first wrong one, 0..15.
        certain: drafts that get a top-1 probability of almost 1; the rest get almost 0.
    """

    continuation: list[int]
    right: int = 0
    certain: int = NUM_DRAFTS


@dataclass
class ScriptedDrafter:
    """A drafter with hand-made proposals; its passes and caches are the real ones.

    Stands in for a drafter's weights: scripts are looked up by the request's cache.
    """

    real: Drafter
    vocab_size: int
    scripts: dict[int, Script] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        signals = self.real.draft(anchors, starts, caches)
        tokens, p1 = signals.tokens_BD.clone(), signals.p1_BD.clone()
        for row, (anchor, start, cache) in enumerate(zip(anchors, starts, caches, strict=True)):
            script = self.scripts[id(cache)]
            assert script.continuation[start] == anchor
            truth = script.continuation[start + 1 : start + 1 + NUM_DRAFTS]
            assert len(truth) == NUM_DRAFTS
            wrong = [(t + 1) % self.vocab_size for t in truth]
            tokens[row] = torch.tensor(truth[: script.right] + wrong[script.right :])
            p1[row] = 1e-6
            p1[row, : script.certain] = 1.0 - 1e-6
        return replace(signals, tokens_BD=tokens, p1_BD=p1, p2_BD=torch.zeros_like(p1))


def script_drafts(engine: Engine) -> ScriptedDrafter:
    """Replace the engine's drafter by a scripted one over it."""
    assert engine.drafter is not None
    scripted = ScriptedDrafter(engine.drafter, engine.target_config.vocab_size)
    engine.drafter = cast(Drafter, scripted)
    return scripted


class CallLog:
    """Names, and row counts, of methods in the order in which they ran."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wrap(self, owner: object, method: str, rows: Callable[..., int], name: str) -> None:
        """Log calls of one bound method, which goes on to run."""
        real = getattr(owner, method)

        def logged(*args: object, **kwargs: object) -> object:
            self.calls.append((name, rows(*args, **kwargs)))
            return real(*args, **kwargs)

        setattr(owner, method, logged)
