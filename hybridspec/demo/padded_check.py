"""Compares a pair with its padding in the reference engine: logits, routes, text and drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridspec.demo.padded_shape import Padding
from hybridspec.reference import drafter as drafter_module
from hybridspec.reference.engine import Engine
from hybridspec.reference.moe import MoeBlock, Routed
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache
from hybridspec.request import LengthRule, RoundRecord

# fp32 sums of one router's logits in two orders differ by less; closer experts may change places.
ROUTE_TIE = 1e-5


@dataclass
class Agreement:
    """What was compared and how far it differs; maxima and counts over all calls.

    Attributes:
        logit_difference: largest |padded - source| over real words, in prompts whose routes are
            all equal; logit_scale: largest |source|.
        routes, route_differences: rows x live layers, and those whose set of experts differs.
        route_tie_margin: largest gap between the router logits of the last expert chosen and the
            first not chosen, in the source, where routes differ; up to `ROUTE_TIE` it is a tie.
        tied_prompts, tied_logit_difference: prompts with a route that differs, and their logits.
        padded_mass: largest probability of the padded vocabulary; padded_margin: largest padded
            logit minus the best real one.
        pass_through_changes: values of the residual stream that added layers changed.
        tokens, token_differences: greedy text.
        drafts, draft_differences: drafted tokens.
        draft_probability_difference: of the top two; draft_entropy_difference: nats.
        draft_padded_mass: as `padded_mass`, of the drafter.
    """

    logit_difference: float = 0.0
    logit_scale: float = 0.0
    routes: int = 0
    route_differences: int = 0
    route_tie_margin: float = 0.0
    tied_prompts: int = 0
    tied_logit_difference: float = 0.0
    padded_mass: float = 0.0
    padded_margin: float = -float("inf")
    pass_through_changes: int = 0
    tokens: int = 0
    token_differences: int = 0
    drafts: int = 0
    draft_differences: int = 0
    draft_probability_difference: float = 0.0
    draft_entropy_difference: float = 0.0
    draft_padded_mass: float = 0.0
    rounds: int = 0
    accepted: int = 0


@dataclass
class Forward:
    """One prefill of T tokens.

    Attributes:
        logits_TV: all rows. residuals: [T, hidden] behind each layer.
        router_logits: [T, experts] of each layer. routes: int64 [T, top-k] of each layer.
    """

    logits_TV: torch.Tensor
    residuals: list[torch.Tensor]
    router_logits: list[torch.Tensor]
    routes: list[torch.Tensor]


@torch.inference_mode()
def forward(engine: Engine, tokens: Sequence[int]) -> Forward:
    """Run the target over `tokens` from an empty context."""
    config, target = engine.target_config, engine.target
    cache = KVCache(
        len(config.attention_layers),
        config.num_kv_heads,
        config.head_dim,
        target.dtype,
        engine.device,
    )
    cache.reserve(len(tokens))
    wanted, target.feature_layers = target.feature_layers, frozenset(range(config.num_layers))
    slot = engine.pool.take()
    scores: list[torch.Tensor] = []
    handles = [_watch_router(block, scores) for block in target.blocks]
    try:
        layout = RowLayout([slot], [0], [len(tokens)], engine.device)
        ids = torch.tensor(list(tokens), device=engine.device)
        state, routed = target.first_router(ids, layout, engine.pool, in_place=True)
        hidden = target.finish(state, routed, engine.pool, [cache])
        return Forward(target.logits(hidden), state.features, scores, state.routes)
    finally:
        target.feature_layers = wanted
        for handle in handles:
            handle()
        engine.pool.give_back(slot)


def _watch_router(block: MoeBlock, scores: list[torch.Tensor]) -> Callable[[], None]:
    """Keep a block's router logits; returns what undoes it."""
    inner, experts = block.route, block.config.num_experts

    def route(hidden_RH: torch.Tensor) -> Routed:
        scores.append(torch.nn.functional.linear(hidden_RH, block.front[:experts]))
        return inner(hidden_RH)

    block.route = route
    return lambda: delattr(block, "route")


def compare_forward(
    source: Forward,
    padded: Forward,
    padding: Padding,
    agreement: Agreement,
    *,
    exact: Forward | None = None,
) -> None:
    """Logits, routes of live layers, the padded vocabulary, and what added layers leave alone.

    Args:
        exact: the source in fp64, to judge ties; by default the source as it is.
    """
    vocab = source.logits_TV.shape[1]
    real, added = padded.logits_TV[:, :vocab], padded.logits_TV[:, vocab:]
    a = agreement
    a.logit_scale = max(a.logit_scale, float(source.logits_TV.abs().max()))
    if added.shape[1]:
        a.padded_mass = max(a.padded_mass, padded_mass(padded.logits_TV, vocab))
        gap = added.max(-1).values - real.max(-1).values
        a.padded_margin = max(a.padded_margin, float(gap.max()))
    judge, differences = exact or source, 0
    for j, layer in enumerate(padding.live_layers):
        differ = routes_differ(source.routes[j], padded.routes[layer])
        a.routes += len(differ)
        differences += int(differ.sum())
        if bool(differ.any()):
            margin = tie_margin(judge.router_logits[j][differ], source.routes[j].shape[1])
            a.route_tie_margin = max(a.route_tie_margin, margin)
    a.route_differences += differences
    difference = float((real - source.logits_TV).abs().max())
    if differences:
        a.tied_prompts += 1
        a.tied_logit_difference = max(a.tied_logit_difference, difference)
    else:
        a.logit_difference = max(a.logit_difference, difference)
    live = set(padding.live_layers)
    for layer in range(1, len(padded.residuals)):
        if layer not in live:
            before, after = padded.residuals[layer - 1 : layer + 1]
            a.pass_through_changes += int((before != after).sum())


def routes_differ(first_TK: torch.Tensor, second_TK: torch.Tensor) -> torch.Tensor:
    """Rows whose sets of experts differ, bool [T]."""
    return (first_TK.sort(-1).values != second_TK.sort(-1).values).any(-1)


def tie_margin(router_logits_TE: torch.Tensor, top_k: int) -> float:
    """Largest gap between the last expert chosen and the first that is not, over rows."""
    ordered = router_logits_TE.sort(-1, descending=True).values
    return float((ordered[:, top_k - 1] - ordered[:, top_k]).max())


def padded_mass(logits: torch.Tensor, vocab: int) -> float:
    """Largest probability that any row gives to tokens from `vocab` on."""
    return float(logits.double().softmax(-1)[..., vocab:].sum(-1).max())


@dataclass
class Decoded:
    """Greedy text in rounds of 16 rows.

    Attributes:
        tokens: generated ones.
        records: of every round.
        accepted: drafts accepted in each round.
        draft_logits: [rounds, 1, 15, vocabulary].
    """

    tokens: list[int]
    records: list[RoundRecord] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def _draft_logits() -> Iterator[list[torch.Tensor]]:
    """Collect the logits of every draft pass."""
    inner, seen = drafter_module.signals, []

    def signals(logits_BDV: torch.Tensor) -> drafter_module.DraftSignals:
        seen.append(logits_BDV)
        return inner(logits_BDV)

    drafter_module.signals = signals
    try:
        yield seen
    finally:
        drafter_module.signals = inner


def decode(engine: Engine, prompt: Sequence[int], new_tokens: int, *, drafts: bool) -> Decoded:
    """Greedy decoding, plain or with 16 rows a round."""
    rule = LengthRule("fixed", 16) if drafts else LengthRule("none")
    request = engine.add(prompt, length_rule=rule)
    decoded = Decoded([])
    with _draft_logits() as seen:
        while not request.finished and len(request.log.tokens) - len(prompt) < new_tokens:
            (outcome,) = engine.step([request], record=drafts, record_routes=drafts)
            if outcome.record is not None:
                decoded.records.append(outcome.record)
                decoded.accepted.append(outcome.accepted)
    decoded.tokens = request.log.tokens[len(prompt) :][:new_tokens]
    decoded.draft_logits = seen
    engine.remove(request)
    return decoded


def count_differences(first: Sequence[int], second: Sequence[int]) -> int:
    """Places where two token sequences differ, missing ones included."""
    longest = max(len(first), len(second))
    return longest - sum(a == b for a, b in zip(first, second, strict=False))


def compare_decoded(source: Decoded, padded: Decoded, vocab: int, agreement: Agreement) -> None:
    """Greedy text, drafts and the drafter's signals, round by round."""
    a = agreement
    a.tokens += len(source.tokens)
    a.token_differences += count_differences(source.tokens, padded.tokens)
    a.rounds += len(source.records)
    a.accepted += sum(source.accepted)
    for ours, theirs in zip(padded.records, source.records, strict=False):
        a.drafts += len(theirs.draft_tokens)
        a.draft_differences += count_differences(theirs.draft_tokens, ours.draft_tokens)
        for x, y in ((ours.p1, theirs.p1), (ours.p2, theirs.p2)):
            gap = float(np.abs(np.subtract(x, y)).max())
            a.draft_probability_difference = max(a.draft_probability_difference, gap)
        gap = float(np.abs(np.subtract(ours.entropy_nats, theirs.entropy_nats)).max())
        a.draft_entropy_difference = max(a.draft_entropy_difference, gap)
    for logits in padded.draft_logits:
        if logits.shape[-1] > vocab:
            a.draft_padded_mass = max(a.draft_padded_mass, padded_mass(logits, vocab))


def distinct_experts(
    records: Sequence[RoundRecord], *, layers: int, top_k: int, experts: int
) -> np.ndarray:
    """Distinct experts of the first L rows of each round, int64 [rounds, layers, 16]."""
    kind = np.uint8 if experts <= 256 else np.dtype("<u2")
    counts = np.zeros((len(records), layers, 16), dtype=np.int64)
    for n, record in enumerate(records):
        routes = np.frombuffer(record.routes, dtype=kind).reshape(layers, -1, top_k)
        for length in range(1, routes.shape[1] + 1):
            for layer in range(layers):
                counts[n, layer, length - 1] = len(np.unique(routes[layer, :length]))
    return counts
