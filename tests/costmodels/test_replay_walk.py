"""Walking the recorded text to its end, and the sums that a replay keeps of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import CURVE_US, calibrated, rounds_of, table_of

from hybridspec.costmodels.peers import EmaAccepted
from hybridspec.costmodels.policies import Dinkelbach, FixedLength, LengthPolicy, OracleLength
from hybridspec.costmodels.replay import Replay, replay, resimulate
from hybridspec.costmodels.rounds import RoundSet, expected_emitted
from hybridspec.errors import UsageError


def walk(rounds: RoundSet, policy: LengthPolicy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    latency = np.broadcast_to(CURVE_US, (len(rounds), 17))
    lengths = policy.lengths(rounds, latency)
    return resimulate(rounds, policy, lengths, latency, latency)


def test_walks_by_hand() -> None:
    rounds = rounds_of(np.full((3, 15), 0.9), accepted=np.array([0, 5, 15]))
    # Six tokens in rounds of four rows take two of them, sixteen take four.
    time_us, walked, unrecorded = walk(rounds, FixedLength(4))
    assert walked.tolist() == [1, 2, 4]
    assert unrecorded.tolist() == [0, 1, 3]
    assert time_us == pytest.approx(walked * CURVE_US[4])
    # Plain decoding needs no draft pass, so nothing of it is unrecorded.
    time_us, walked, unrecorded = walk(rounds, FixedLength(0))
    assert walked.tolist() == [1, 6, 16]
    assert not unrecorded.any()
    assert time_us == pytest.approx(walked * CURVE_US[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-5, 1e-3))
def test_walk_of_the_policy_is_that_of_a_plain_loop(seed: int, lam: float) -> None:
    g = np.random.default_rng(seed)
    rounds = rounds_of(g.beta(2.0, 1.0, (6, 15)), accepted=g.integers(0, 16, 6))
    time_us, walked, unrecorded = walk(rounds, Dinkelbach(lam))
    for row in range(6):
        left, hazards = int(rounds.accepted[row]) + 1, rounds.hazards_ND[row]
        spent, taken = 0.0, 0
        while left > 0:
            padded = np.concatenate([hazards, np.zeros(15 - hazards.size)])[None]
            score = expected_emitted(padded)[0, 1:] - lam * CURVE_US[1:]
            length = 1 + int(np.argmax(score >= score.max() - 1e-9))
            out = min(length, left)
            spent, taken, left, hazards = (
                spent + CURVE_US[length],
                taken + 1,
                left - out,
                hazards[out:],
            )
        assert time_us[row] == pytest.approx(spent)
        assert walked[row] == taken
        assert unrecorded[row] == taken - 1


def test_plain_stock_and_oracle_are_exact_and_memory_is_not_invented() -> None:
    rounds = calibrated()
    policies = [FixedLength(0), FixedLength(16), OracleLength(), Dinkelbach(5e-4), EmaAccepted()]
    rows = {
        r["policy"]: r
        for r in replay(rounds, policies, table_of()).to_pylist()
        if r["category"] == "all"
    }
    for name in ("ar", "fixed-16", "oracle"):
        assert rows[name]["resimulated_tokens_per_s"] == pytest.approx(rows[name]["tokens_per_s"])
        assert rows[name]["recorded_anchor_share"] == 1.0
    assert 0.3 < rows["hybridspec"]["recorded_anchor_share"] < 1.0
    assert rows["ema"]["resimulated_tokens_per_s"] is None
    assert rows["ema"]["recorded_anchor_share"] is None
    assert rows["oracle"]["regret_tokens_per_s"] == 0.0
    ours = rows["hybridspec"]
    gap = rows["oracle"]["tokens_per_s"] - ours["tokens_per_s"]
    assert ours["regret_tokens_per_s"] == pytest.approx(gap)
    assert ours["of_oracle_low"] <= ours["of_oracle"] <= ours["of_oracle_high"] <= 1.0
    assert ours["over_ar_low"] <= ours["over_ar"] <= ours["over_ar_high"]


def test_after_cut_keeps_what_is_known_and_no_more() -> None:
    rounds = calibrated(5)
    cut = rounds.select(rounds.accepted >= 3)
    left = cut.after_cut(np.full(len(cut), 3))
    assert left.accepted.tolist() == (cut.accepted - 3).tolist()
    assert np.array_equal(left.hazards_ND[:, :12], cut.hazards_ND[:, 3:])
    assert not left.hazards_ND[:, 12:].any()
    assert left.distinct_total_NL is None
    assert left.first_distinct_NL is None


def test_pieces_give_what_one_call_gives_and_loops_come_apart() -> None:
    rounds = calibrated()
    g = np.random.default_rng(0)
    names = {"prompt_index": np.repeat(np.arange(40), 10), "loop_period": g.integers(0, 2, 400)}
    rounds = rounds_of(
        rounds.hazards_ND,
        accepted=rounds.accepted,
        category=np.where(np.arange(400) < 200, "code", "prose"),
        **names,
    )
    policies = [Dinkelbach(5e-4), EmaAccepted(), FixedLength(5)]
    whole = replay(rounds, policies, table_of(), inside_loops=True)
    pieces = Replay(policies, table_of())
    for start in range(0, 400, 70):
        stop = start + 70
        prompts = np.arange(start // 10, min(stop, 400) // 10)
        pieces.add(rounds.select(np.isin(rounds.prompt_index, prompts)))
    assert pieces.result(inside_loops=True).equals(whole)
    inside = [r for r in whole.to_pylist() if r["loops"] == "inside" and r["category"] == "all"]
    assert inside[0]["rounds"] == int((rounds.loop_period > 0).sum())
    # The moving average remembers rounds in loops, although they are reported apart.
    outside = replay(rounds.outside_loops(), policies, table_of()).to_pylist()
    ema = [r for r in whole.to_pylist() if r["policy"] == "ema" and r["category"] == "all"]
    assert ema[0]["mean_length"] != outside[1]["mean_length"]


def test_gain_is_paired_and_refuses_strangers() -> None:
    rounds = rounds_of(
        calibrated().hazards_ND,
        accepted=calibrated().accepted,
        prompt_index=np.repeat(np.arange(40), 10),
    )
    run = Replay([Dinkelbach(5e-4), FixedLength(8)], table_of())
    run.add(rounds)
    gain, low, high = run.gain("hybridspec", "fixed-8")
    rows = {r["policy"]: r["tokens_per_s"] for r in run.result().to_pylist()}
    assert gain == pytest.approx(rows["hybridspec"] / rows["fixed-8"] - 1.0)
    assert low < gain < high
    assert run.gain("fixed-8", "fixed-8") == (0.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="'oracle' was not replayed"):
        run.gain("oracle", "fixed-8")
