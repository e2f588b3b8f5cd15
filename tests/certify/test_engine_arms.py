"""The gates on the real engine: it passes as it is, and planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from certify_kit import embedded_arms, embedded_tasks

from hybridspec.acceptance import Verdict, accept_greedy, accept_sampled
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.certify import gates
from hybridspec.certify.engine_arms import EngineArms, tie_bound
from hybridspec.certify.law import LEVEL, build_tree, law_fit
from hybridspec.certify.texts import Difference, Task, Text
from hybridspec.errors import ModelError, PromptError
from hybridspec.reference import engine as engine_module

TOKENS = 20


def decode(arms: EngineArms, tasks: list[Task], *, drafts: bool, batch: int = 3) -> list[Text]:
    return arms.decode(
        "arm", tasks, drafts=drafts, batch=batch, backwards=drafts, max_new_tokens=TOKENS,
        done=lambda _: None,
    )  # fmt: skip


def differences(
    arms: EngineArms, tasks: list[Task], one: list[Text], two: list[Text]
) -> list[Difference]:
    found = [arms.compare(*three) for three in zip(tasks, one, two, strict=True)]
    return [difference for difference in found if difference is not None]


def test_drafts_keep_the_texts_and_slots_come_back(arms: EngineArms) -> None:
    tasks = arms.encode(embedded_tasks(5), max_new_tokens=TOKENS)
    plain = decode(arms, tasks, drafts=False, batch=1)
    hybrid = decode(arms, tasks, drafts=True)
    assert arms.engine.free_slots == arms.engine.max_batch
    assert [text.prompt_id for text in hybrid] == [task.prompt_id for task in tasks]
    assert max(text.num_tokens for text in hybrid) == TOKENS
    gate = gates.greedy(5, differences(arms, tasks, plain, hybrid), control_gap=0.0)
    assert gate.verdict == "passed", gate.message


def test_draft_that_is_wrongly_accepted_is_found(
    arms: EngineArms, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(drafts: list[int], best: list[int]) -> Verdict:
        verdict = accept_greedy(drafts, best)
        more = min(verdict.accepted + 1, len(drafts))
        return Verdict(more, best[more])

    tasks = arms.encode(embedded_tasks(3), max_new_tokens=TOKENS)
    plain = decode(arms, tasks, drafts=False)
    monkeypatch.setattr(engine_module, "accept_greedy", too_many)
    found = differences(arms, tasks, plain, decode(arms, tasks, drafts=True))
    gate = gates.greedy(3, found, control_gap=0.0)
    assert gate.verdict == "failed"
    # Acceptance looks better than ever, the text is another one.
    assert gate.figures["largest_gap_logits"] > 0.1


def test_gap_is_that_of_both_tokens(arms: EngineArms) -> None:
    (task,) = arms.encode(embedded_tasks(1), max_new_tokens=TOKENS)
    (plain,) = decode(arms, [task], drafts=False)
    at = 4
    logits = arms.logits_behind([*task.token_ids, *plain.token_ids[:at]])
    assert plain.token_ids[at] == int(logits.argmax())
    other = int(logits.topk(3).indices[2])
    changed = Text("a", task.prompt_id, "", "", (*plain.token_ids[:at], other), at + 1, 1.0)
    difference = arms.compare(task, plain, changed)
    assert difference is not None
    assert difference.position == at
    assert difference.gap_logits == pytest.approx(float(logits.max() - logits[other]))
    assert difference.bound_logits == pytest.approx(
        tie_bound(torch.float32, float(logits.abs().max()))
    )
    shorter = Text("a", task.prompt_id, "", "", plain.token_ids[:at], at, 1.0)
    ended = arms.compare(task, plain, shorter)
    assert ended is not None
    assert ended.gap_logits == float("inf")


def test_bound_grows_with_the_types_epsilon() -> None:
    bounds = [tie_bound(t, 20.0) for t in (torch.float64, torch.float32, torch.bfloat16)]
    assert bounds == sorted(bounds)
    assert bounds[1] == pytest.approx(16 * 2.0**-23 * 20.0)
    assert bounds[2] == pytest.approx(4 * 2.0**-7 * 20.0)


def test_nan_logits_are_refused(arms: EngineArms) -> None:
    arms.engine.target.lm_head_VH[7].fill_(float("nan"))
    tasks = arms.encode(embedded_tasks(2), max_new_tokens=TOKENS)
    with pytest.raises(ModelError, match=r"logits are NaN or infinite; nothing can be certified"):
        decode(arms, tasks, drafts=False)
    assert arms.engine.free_slots == arms.engine.max_batch


def test_prompts_that_do_not_fit_are_refused(arms: EngineArms) -> None:
    for ids in ((), (5,) * 500):
        with pytest.raises(PromptError, match="prompt p has"):
            arms.encode([Task("p", "c", "" if not ids else "x", ids)], max_new_tokens=TOKENS)


def test_bins_share_the_whole_probability(arms: EngineArms) -> None:
    (task,) = arms.encode(embedded_tasks(1), max_new_tokens=TOKENS)
    tree = build_tree(arms, task, samples=200, depth=3)
    assert sum(tree.bins.values()) == pytest.approx(1.0)
    assert len(tree.bins) > 5
    for name in tree.bins:
        text = [99_999 if token == -1 else token for token in name]
        assert tree.bin_of([*text, 1, 2, 3]) == name


def law(arms: EngineArms, samples: int) -> Any:
    (task,) = arms.encode(embedded_tasks(1), max_new_tokens=1)
    return law_fit(arms, task, samples=samples, batch=4, level=LEVEL, seed=5, done=lambda _: None)


def test_sampled_law_holds_with_drafts() -> None:
    fit = law(embedded_arms(length=4), 160)
    assert fit.p_value > LEVEL
    assert fit.total_variation < fit.limit


def test_biased_acceptance_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(drafts: Any, logits: Any, sampling: Any, coins: list[float]) -> Verdict:
        low = [0.1 * coin for coin in coins[: BLOCK_SIZE - 1]]
        return accept_sampled(drafts, logits, sampling, [*low, coins[-1]])

    monkeypatch.setattr(engine_module, "accept_sampled", biased)
    fit = law(embedded_arms(length=4), 160)
    assert fit.p_value < LEVEL
