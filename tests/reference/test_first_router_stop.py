"""The stop at the first router is real, and rows know nothing of the rows behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_kit import SHAPES, decode, new_kv_cache, random_engine, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from script_kit import CallLog, Script, script_drafts

from hybridspec.policy import Policy
from hybridspec.reference.engine import Engine
from hybridspec.reference.rows import RowLayout
from hybridspec.request import LengthRule

F64 = torch.float64
SHAPE = SHAPES["grouped"]


def log_passes(engine: Engine) -> CallLog:
    """Log, with their rows: mixers, routers, routed experts and the correction."""
    log = CallLog()
    for i, mixer in enumerate(engine.target.mixers):
        if engine.target_config.layer_is_attention[i]:
            continue
        for method in ("verify", "advance"):
            log.wrap(mixer, method, lambda hidden, *_: len(hidden), f"gdn {i}")
    for i, block in enumerate(engine.target.blocks):
        log.wrap(block, "route", lambda hidden: len(hidden), f"router {i}")
        log.wrap(block, "combine", lambda routed: len(routed.hidden_RH), f"experts {i}")
        for method in ("_union", "_sorted"):
            log.wrap(block, method, lambda routed: len(routed.hidden_RH), f"routed {i}")
    if engine.policy is not None:
        log.wrap(engine.policy, "correct", lambda experts, *_, **__: len(experts), "correct")
    return log


def shortening_policy(make_policy: Callable[..., Policy], limit: int, correction: str) -> Policy:
    """Rows past `limit` are unaffordable once the first router was seen, but not before."""
    return make_policy(
        first_mean=[0.0] * 16, slope=[0.0] * limit + [1e5] * (16 - limit), correction=correction
    )


@pytest.mark.parametrize(
    ("correction", "limit", "final"),
    [("select", 16, 9), ("select", 4, 4), ("select", 1, 1), ("paper", 16, 9), ("off", 16, 9)],
)
def test_no_expert_runs_before_the_length_is_final(
    correction: str,
    limit: int,
    final: int,
    pairs_folder: Path,
    make_policy: Callable[..., Policy],
) -> None:
    engine = random_engine(pairs_folder / "grouped", SHAPE)
    prompt = random_tokens(SHAPE.vocab_size, 30, seed=4)
    [plain] = decode(engine, [prompt], LengthRule("none"), 40)
    engine.policy = shortening_policy(make_policy, limit, correction)
    scripted = script_drafts(engine)
    request = engine.add(prompt, length_rule=LengthRule("policy"))
    script = Script([*prompt, *plain], right=15, certain=8)
    scripted.scripts[id(request.draft_cache)] = script
    log = log_passes(engine)
    [outcome] = engine.step([request])
    assert (outcome.selected_length, outcome.verify_length) == (9, final)
    looked_at = 9 if correction == "off" else 10
    stop = [("gdn 0", looked_at), ("router 0", looked_at)]
    if correction != "off":
        stop.append(("correct", looked_at))
    assert log.calls[: len(stop)] == stop
    rest = log.calls[len(stop) :]
    assert rest[:2] == [("experts 0", final), ("routed 0", final)]
    # Layer 0's mixer and router ran once, the other layers on the final rows only.
    assert not {"gdn 0", "router 0", "correct"} & {name for name, _ in rest}
    assert {rows for _, rows in rest} == {final}
    assert [name for name, _ in rest if name.startswith("routed")] == [
        f"routed {i}" for i in range(SHAPE.num_layers)
    ]


def test_paper_rule_keeps_the_length_or_takes_one_more_row(
    pairs_folder: Path, make_policy: Callable[..., Policy]
) -> None:
    engine = random_engine(pairs_folder / "grouped", SHAPE)
    prompt = random_tokens(SHAPE.vocab_size, 30, seed=4)
    [plain] = decode(engine, [prompt], LengthRule("none"), 40)
    scripted = script_drafts(engine)
    # A bonus on row L + 1 that only the stop can see, then one that is out of reach.
    for bonus_row, final in ((10, 10), (12, 9)):
        slope = [0.0] * 16
        slope[bonus_row - 1] = -1e5
        engine.policy = make_policy(first_mean=[0.0] * 16, slope=slope, correction="paper")
        request = engine.add(prompt, length_rule=LengthRule("policy"))
        scripted.scripts[id(request.draft_cache)] = Script([*prompt, *plain], 15, certain=8)
        [outcome] = engine.step([request])
        assert (outcome.selected_length, outcome.verify_length) == (9, final)
        assert outcome.accepted == final - 1
        engine.remove(request)


def test_mixed_batch_stops_once_for_all(
    pairs_folder: Path, make_policy: Callable[..., Policy]
) -> None:
    """A policy request, a fixed one and one without drafts share one pass."""
    engine = random_engine(pairs_folder / "grouped", SHAPE)
    prompts = [random_tokens(SHAPE.vocab_size, n, seed=n) for n in (12, 30, 21)]
    plain = decode(engine, prompts, LengthRule("none"), 40)
    engine.policy = shortening_policy(make_policy, 3, "select")
    scripted = script_drafts(engine)
    rules = [LengthRule("policy"), LengthRule("fixed", 5), LengthRule("none")]
    requests = [engine.add(p, length_rule=r) for p, r in zip(prompts, rules, strict=True)]
    for request, prompt, text in zip(requests, prompts, plain, strict=True):
        scripted.scripts[id(request.draft_cache)] = Script([*prompt, *text], 15, certain=6)
    log = log_passes(engine)
    rounds = engine.step(requests)
    assert [r.verify_length for r in rounds] == [3, 5, 0]
    assert [r.accepted for r in rounds] == [2, 4, 0]
    # 7 + 1 rows of the policy's choice, 5 and 1 of the others; then 3, 5 and 1.
    assert log.calls[:2] == [("gdn 0", 14), ("router 0", 14)]
    assert {rows for name, rows in log.calls[3:]} == {9}
    assert [name for name, _ in log.calls].count("correct") == 1
    for request, prompt, text in zip(requests, prompts, plain, strict=True):
        assert request.tokens == [*prompt, *text][: len(request.tokens)]


class PassRunner:
    """Verification passes from one prefilled context that is never committed to."""

    def __init__(self, engine: Engine, context: int) -> None:
        self.engine, self.context = engine, context
        tokens = random_tokens(engine.target_config.vocab_size, context, seed=context)
        self.slot = engine.pool.take()
        self.cache = new_kv_cache(engine, context + 64)
        layout = RowLayout([self.slot], [0], [context], engine.device)
        with torch.inference_mode():
            state, routed = engine.target.first_router(
                torch.tensor(tokens), layout, engine.pool, in_place=True
            )
            engine.target.finish(state, routed, engine.pool, [self.cache])

    @torch.inference_mode()
    def run(self, tokens: list[int], keep: int) -> list[torch.Tensor]:
        """Logits, residuals that the drafter reads, and factors of the first `keep` rows."""
        engine = self.engine
        layout, kept = (
            RowLayout([self.slot], [self.context], [n], engine.device) for n in (len(tokens), keep)
        )
        state, routed = engine.target.first_router(torch.tensor(tokens), layout, engine.pool)
        hidden = engine.target.finish(state, routed, engine.pool, [self.cache], kept)
        factors = [
            part
            for f in state.factors
            for part in (f.update_NTV, f.gate_NT1, f.qk_N2TK[:, keep:], f.conv_BTC)
        ]
        return [engine.target.logits(hidden), *state.features, *factors]


@pytest.fixture(scope="module")
def runner(pairs_folder: Path) -> PassRunner:
    return PassRunner(random_engine(pairs_folder / "grouped", SHAPE, dtype=F64), 250)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, SHAPE.vocab_size - 1), min_size=16, max_size=16),
    st.lists(st.integers(0, SHAPE.vocab_size - 1), min_size=16, max_size=16),
    st.integers(1, 16),
    st.integers(1, 16),
)
def test_rows_do_not_depend_on_the_length_or_on_later_tokens(
    runner: PassRunner, tokens: list[int], others: list[int], keep: int, longer: int
) -> None:
    keep, longer = sorted((keep, longer))
    short = runner.run(tokens[:keep], keep)
    full = runner.run(tokens[:longer], longer)
    cut = runner.run([*tokens[:keep], *others[keep:]], keep)
    for exact, dropped in zip(short, cut, strict=True):
        torch.testing.assert_close(dropped, exact, atol=1e-12, rtol=0.0)
    torch.testing.assert_close(full[0][:keep], short[0], atol=1e-12, rtol=0.0)
