"""Every vectorised rule against a plain loop over one round at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.costmodels.catalog import (
    DEFAULT_POLICIES,
    POLICY_NAMES,
    Fitting,
    check_names,
    make_policies,
)
from hybridspec.costmodels.correction import ExpertLine, ExpertPriced, RouterCorrected
from hybridspec.costmodels.peers import DSparkPlanner, EmaAccepted, Evict
from hybridspec.costmodels.policies import Dinkelbach, FixedByCategory, RoundRatio
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.errors import BundleError, NotEnoughData, UsageError

CURVE_US = np.concatenate([[4000.0], 4800.0 + 300.0 * np.arange(16)])


def table_of(*, slope_us: float = 0.0) -> StepCostTable:
    latency = CURVE_US[None, None]
    return StepCostTable(
        batch_sizes=np.array([1]),
        context_tokens=np.array([0]),
        latency_us=latency,
        latency_p10_us=latency,
        latency_p90_us=latency,
        draft_us=np.array([[800.0]]),
        expert_slope_us=slope_us,
        expert_slope_r2=1.0 if slope_us else 0.0,
    )


# On a grid: a chance of 1e-9 lies on the very edge of what counts as a tie, where the last bit of
# two ways to write the same bound decides.
probabilities = arrays(np.float64, (9, 15), elements=st.integers(0, 2**20).map(lambda n: n / 2**20))
prompt_numbers = arrays(np.int64, 9, elements=st.integers(0, 2))
accepted_counts = arrays(np.int64, 9, elements=st.integers(0, 15))
counts = arrays(np.float64, (9, 16), elements=st.integers(1, 40))


def latency_rows() -> st.SearchStrategy[np.ndarray]:
    """float64 [9, 17] in us, rising or not, with steps that are exactly equal."""
    steps = arrays(np.float64, (9, 17), elements=st.sampled_from([-20.0, 0.0, 0.0, 50.0, 300.0]))
    return st.builds(lambda base, step: base + np.cumsum(step, axis=1), st.just(5000.0), steps)


def rounds_of(hazards: np.ndarray, **columns: np.ndarray) -> RoundSet:
    n = len(hazards)
    base = {
        "prompt_index": np.zeros(n, dtype=np.int64),
        "category": np.full(n, "code"),
        "loop_period": np.zeros(n, dtype=np.int64),
        "accepted": np.zeros(n, dtype=np.int64),
        "context_tokens": np.zeros(n, dtype=np.int64),
    }
    return RoundSet(hazards_ND=hazards, **(base | columns))


def emitted(hazards: np.ndarray, length: int) -> float:
    """E(L) of one round, drafts beyond the first L - 1 not verified."""
    survival, total = 1.0, 1.0
    for hazard in hazards[: max(length, 1) - 1]:
        survival *= hazard
        total += survival
    return total


def first_best(scores: list[float], *, relative: bool = False) -> int:
    best = max(scores)
    slack = abs(best) * 1e-9 if relative else 1e-9
    return next(i for i, score in enumerate(scores) if score >= best - slack)


def best_ratio(hazards: np.ndarray, latency: np.ndarray, draft_us: float = 0.0) -> int:
    ratios = [emitted(hazards, k) / (latency[k] - draft_us) for k in range(1, 17)]
    return 1 + first_best(ratios, relative=True)


@settings(max_examples=60, deadline=None)
@given(probabilities, probabilities, latency_rows())
def test_ratio_and_evict(hazards: np.ndarray, top1: np.ndarray, latency: np.ndarray) -> None:
    rounds = rounds_of(hazards, top1_ND=top1)
    expected = [best_ratio(h, t) for h, t in zip(hazards, latency, strict=True)]
    assert RoundRatio().lengths(rounds, latency).tolist() == expected
    raw = [best_ratio(p, t, 800.0) for p, t in zip(top1, latency, strict=True)]
    assert Evict(800.0).lengths(rounds, latency).tolist() == raw


@settings(max_examples=60, deadline=None)
@given(probabilities, latency_rows(), st.floats(1e-5, 1e-2), st.integers(1, 16))
def test_dinkelbach(hazards: np.ndarray, latency: np.ndarray, lam: float, cap: int) -> None:
    found = Dinkelbach(lam, max_length=cap).lengths(rounds_of(hazards), latency)
    for row, (h, t) in enumerate(zip(hazards, latency, strict=True)):
        scores = [emitted(h, k) - lam * t[k] for k in range(1, cap + 1)]
        assert found[row] == 1 + first_best(scores)


@settings(max_examples=60, deadline=None)
@given(
    probabilities,
    latency_rows(),
    counts,
    st.floats(1e-5, 1e-3),
    st.floats(0.0, 100.0),
    st.sampled_from(["paper", "select"]),
    st.integers(1, 16),
)
def test_router_correction_and_expert_pricing(
    hazards: np.ndarray,
    latency: np.ndarray,
    seen: np.ndarray,
    lam: float,
    us: float,
    rule: str,
    lookahead: int,
) -> None:
    line = ExpertLine("first-router", np.linspace(4, 30, 16), np.linspace(0.5, 3.0, 16))
    rounds = rounds_of(hazards, first_distinct_NL=seen)
    policy = RouterCorrected(lam, line, us, rule=rule, lookahead=lookahead)  # type: ignore[arg-type]
    found = policy.lengths(rounds, latency)
    whole = ExpertPriced(lam, line, us, "priced").lengths(rounds, latency)
    first = Dinkelbach(lam).lengths(rounds, latency)
    for row in range(9):
        score = [
            emitted(hazards[row], k)
            - lam
            * (latency[row, k] + us * line.slope_L[k - 1] * (seen[row, k - 1] - line.mean_L[k - 1]))
            for k in range(1, 17)
        ]
        chosen = int(first[row])
        allowed = range(chosen if rule == "paper" else 1, min(chosen + lookahead, 16) + 1)
        best = allowed.start + first_best([score[k - 1] for k in allowed])
        assert found[row] == (best if chosen > 1 else 1)
        assert whole[row] == 1 + first_best(score)
    assert policy.lengths(rounds_of(hazards), latency).tolist() == first.tolist()


@settings(max_examples=60, deadline=None)
@given(probabilities, latency_rows(), prompt_numbers, st.integers(0, 3))
def test_dspark_plans_on_older_confidences(
    hazards: np.ndarray, latency: np.ndarray, prompt: np.ndarray, lag: int
) -> None:
    found = DSparkPlanner(lag_rounds=lag).lengths(rounds_of(hazards, prompt_index=prompt), latency)
    history: dict[int, list[np.ndarray]] = {}
    for row in range(9):
        before = history.setdefault(int(prompt[row]), [])
        before.append(hazards[row])
        survival = np.cumprod(before[-1 - lag]) if len(before) > lag else np.ones(15)
        gains = np.sort(np.where(survival < 1e-6, 0.0, survival))[::-1]
        theta = [(1.0 + gains[:budget].sum()) / latency[row, 1 + budget] for budget in range(16)]
        assert found[row] == 1 + first_best(theta, relative=True)


@settings(max_examples=60, deadline=None)
@given(accepted_counts, prompt_numbers, st.floats(0.05, 1.0), st.integers(2, 16))
def test_ema_follows_what_an_engine_sees(
    accepted: np.ndarray, prompt: np.ndarray, weight: float, first: int
) -> None:
    rounds = rounds_of(np.zeros((9, 15)), accepted=accepted, prompt_index=prompt)
    found = EmaAccepted(weight, first_length=first).lengths(rounds, np.ones((9, 17)))
    ema: dict[int, float] = {}
    for row in range(9):
        average = ema.get(int(prompt[row]), first - 2.0)
        drafts = min(max(round(average) + 1, 1), 15)
        assert found[row] == drafts + 1
        seen = min(int(accepted[row]), drafts)
        ema[int(prompt[row])] = average + weight * (seen - average)


def test_fixed_by_category_takes_the_best_length_of_each_and_the_overall_one_for_new_ones() -> None:
    accepted = np.array([15] * 6 + [0] * 6)
    rounds = rounds_of(
        np.full((12, 15), 0.5),
        accepted=accepted,
        category=np.array(["easy"] * 6 + ["hard"] * 6),
    )
    latency = np.broadcast_to(np.concatenate([[1.5], 1.0 + np.arange(1.0, 17.0)]), (12, 17))
    policy = FixedByCategory.fit(rounds, latency)
    assert policy.by_category == {"easy": 16, "hard": 0}
    unseen = rounds_of(np.full((3, 15), 0.5), category=np.array(["hard", "new", "easy"]))
    assert policy.lengths(unseen, latency[:3]).tolist() == [0, policy.otherwise, 16]


def calibrated(n: int = 400, *, routes: bool = True) -> RoundSet:
    rng = np.random.default_rng(3)
    hazards = rng.beta(3.0, 1.0, (n, 15))
    accepted = np.cumprod(rng.random((n, 15)) < hazards, axis=1).sum(axis=1)
    first = np.cumsum(rng.integers(0, 3, (n, 16)), axis=1).astype(np.float64) + 2.0
    known = {
        "distinct_total_NL": first * 2.0 + rng.normal(0, 0.1, (n, 16)),
        "first_distinct_NL": first,
        "distinct_tokens_NL": first,
    }
    return rounds_of(hazards, accepted=accepted, top1_ND=hazards, **(known if routes else {}))


def test_every_name_makes_a_policy_of_that_name() -> None:
    rounds = calibrated()
    made = make_policies(POLICY_NAMES, Fitting(rounds, table_of(slope_us=5.0)))
    assert [policy.name for policy in made] == list(POLICY_NAMES)
    assert set(DEFAULT_POLICIES) <= set(POLICY_NAMES)
    latency = np.broadcast_to(table_of().latency_us[0, 0], (len(rounds), 17))
    for policy in made:
        lengths = policy.lengths(rounds, latency)
        assert lengths.dtype == np.int64
        assert lengths.min() >= 0
        assert lengths.max() <= 16


def test_line_recovers_the_slope_it_was_drawn_with() -> None:
    line = ExpertLine.fit(calibrated(), "first-router")
    assert line.slope_L[1:] == pytest.approx(2.0, abs=0.05)
    surplus = line.surplus(calibrated())
    assert surplus is not None
    assert surplus.mean(axis=0) == pytest.approx(np.zeros(16), abs=1e-9)


def test_refusals_say_what_and_what_to_do() -> None:
    with pytest.raises(UsageError, match="did you mean hybridspec"):
        check_names(["hybirdspec"])
    with pytest.raises(UsageError, match="'ar' is named twice"):
        check_names(["ar", "oracle", "ar"])
    with pytest.raises(UsageError, match="need recorded routes"):
        make_policies(["router-paper"], Fitting(calibrated(routes=False), table_of()))
    with pytest.raises(NotEnoughData, match="20 calibration rounds"):
        make_policies(["hybridspec"], Fitting(calibrated(20), table_of()))
    rounds = rounds_of(np.zeros((2, 15)))
    with pytest.raises(UsageError, match="top-1 probabilities"):
        Evict(1.0).lengths(rounds, np.full((2, 17), 9.0))
    with pytest.raises(UsageError, match="as long as a whole round"):
        Evict(9.0).lengths(
            rounds_of(np.zeros((2, 15)), top1_ND=np.zeros((2, 15))), np.full((2, 17), 9.0)
        )
    for make in (
        lambda: EmaAccepted(0.0),
        lambda: EmaAccepted(math.nan),
        lambda: EmaAccepted(0.5, first_length=1),
        lambda: DSparkPlanner(lag_rounds=-1),
        lambda: Evict(-1.0),
        lambda: FixedByCategory({"code": 17}, 3),
        lambda: FixedByCategory({}, -1),
    ):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(BundleError, match="top-1 probabilities are not finite"):
        rounds_of(np.zeros((2, 15)), top1_ND=np.full((2, 15), np.nan))
