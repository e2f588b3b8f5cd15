"""The engine under boosted trees: each request keeps its own history as others join and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import hazard_trees_kit as kit
import torch
from engine_kit import SHAPES, decode, random_engine, random_tokens
from script_kit import Script, script_drafts

from hybridspec.hazards import RequestHistory, TreeHazards
from hybridspec.policy import Policy
from hybridspec.reference.sequence import Request
from hybridspec.request import LengthRule

SHAPE = SHAPES["grouped"]


class Watched(TreeHazards):
    """Trees that remember the hazards they gave each history last."""

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        draft_tokens_BD: torch.Tensor | None,
        histories: Sequence[RequestHistory | None] | None,
    ) -> list[list[float]]:
        signals = (p1_BD, p2_BD, entropy_BD, context_tokens, draft_tokens_BD, histories)
        found = super().hazards(*signals)
        assert histories is not None
        self.last = {id(history): row for history, row in zip(histories, found, strict=True)}
        return found


def test_each_request_sees_its_own_past_as_others_come_and_go(
    pairs_folder: Path, make_policy: Callable[..., Policy]
) -> None:
    engine = random_engine(
        pairs_folder / "grouped", SHAPE, dtype=torch.float64, max_batch=3, max_context=400
    )
    prompts = [random_tokens(SHAPE.vocab_size, 5 + n, seed=n) for n in range(6)]
    texts = [decode(engine, [prompt], LengthRule("none"), 60)[0] for prompt in prompts]
    tables = make_policy(plain_us=1000.0, drafted_us=1010.0, row_us=60.0, lam=2e-3)
    trees = kit.random_trees(5, trees=20, depth=4)
    served = Watched(trees)
    engine.policy = Policy(tables.hazard, tables.cost, tables.throughput, hazard_model=served)
    scripted = script_drafts(engine)
    alone = TreeHazards(trees)
    waiting = list(range(6))
    running: dict[int, tuple[Request, RequestHistory]] = {}
    lengths: set[int] = set()
    paused = 0
    while waiting or running:
        while waiting and engine.free_slots:
            number = waiting.pop(0)
            request = engine.add(prompts[number], length_rule=LengthRule("policy"))
            scripted.scripts[id(request.draft_cache)] = Script(
                [*prompts[number], *texts[number]], right=2 * number, certain=8
            )
            running[number] = request, RequestHistory(request.tokens[len(prompts[number]) :])
        rounds = engine.step([request for request, _ in running.values()], record=True)
        for number, outcome in zip(list(running), rounds, strict=True):
            request, history = running[number]
            record = outcome.record
            paused += record is None
            if record is not None:
                expected = alone.hazards(
                    torch.tensor([record.p1]),
                    torch.tensor([record.p2]),
                    torch.tensor([record.entropy_nats]),
                    [record.context_tokens],
                    torch.tensor([record.draft_tokens]),
                    [history],
                )
                assert served.last[id(request.history)] == expected[0]
                lengths.add(outcome.verify_length)
            history.observe(
                outcome.emitted, accepted=outcome.accepted, verify_length=outcome.verify_length
            )
            text = request.tokens[len(prompts[number]) :]
            assert text == texts[number][: len(text)]
            if len(text) > 20 + 4 * number:
                engine.remove(request)
                del running[number]
    assert len(lengths) > 2
    assert paused
