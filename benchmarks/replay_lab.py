"""Replay of the lab pair's recorded rounds against the H200 cost curve, policy by policy.

Policies and hazards are fitted on the calibration prompts; every figure is of held-out prompts,
outside repetition loops unless it says so. `docs/policies.md` takes its tables from the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from results_file import machine, write_results

from hybridspec.artifacts.tables import NUM_DRAFTS
from hybridspec.calibrate.bootstrap import forecast_scores, prompt_draws
from hybridspec.calibrate.features import at_risk
from hybridspec.calibrate.models import MODELS, fit_model
from hybridspec.costmodels.prediction import Outcome, Prediction, load_price, predict
from hybridspec.costmodels.recorded import fit_rounds, round_sets
from hybridspec.costmodels.replay_sums import ALL_CATEGORIES, OUTSIDE
from hybridspec.costmodels.rounds import RoundSet, expected_emitted, realised_emitted
from hybridspec.costmodels.trace_stream import TraceStream, open_trace

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT.parent / "shared" / "traces" / "lab-rounds.parquet"
CURVE = ROOT / "benchmarks" / "curves" / "h200-qwen3.6-35b-a3b.json"
BEST = "boosted"
POLICIES = (
    "ar",
    "fixed-4",
    "fixed-8",
    "fixed-12",
    "fixed-16",
    "best-fixed",
    "best-fixed-category",
    "ema",
    "evict",
    "dspark",
    "dspark-no-lag",
    "round-ratio",
    "hybridspec",
    "router-paper",
    "router-select",
    "router-all",
    "token-priced",
    "oracle-cost",
    "oracle",
)
BIAS_LENGTH = 8
CORRECTIONS = ("router-paper", "router-select", "router-all", "token-priced", "oracle-cost")


def main() -> None:
    """Replay and write `results/replay_lab.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded rounds of the lab pair")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    arguments = parser.parse_args()
    where = machine()
    stream = open_trace(arguments.trace)
    rows: list[dict[str, Any]] = []
    gains: dict[str, tuple[float, float, float]] = {}
    scores: dict[str, dict[str, float]] = {}
    summary: dict[str, Any] = {}
    for model in MODELS:
        start = time.monotonic()
        prediction = run(stream, model, resamples=arguments.resamples, seed=arguments.seed)
        seconds = time.monotonic() - start
        held_out = held_out_rounds(stream, model)
        scores[model] = hazard_scores(held_out, resamples=arguments.resamples, seed=arguments.seed)
        rows += bias_by_experts(held_out, model)
        outcome = prediction.outcomes[0]
        kept = table_rows(outcome, model, whole=model == BEST)
        rows += kept
        ours = next(r for r in kept if r["policy"] == "hybridspec" and r["category"] == "all")
        rows.append(
            {
                "kind": "hazard",
                "hazard": model,
                **scores[model],
                "of_oracle": ours["of_oracle"],
                "lam_tokens_per_us": outcome.fit.tokens_per_us,
                "seconds_fit_and_replay": round(seconds, 1),
            }
        )
        print(f"{model}: of_oracle {ours['of_oracle']:.4f}, {scores[model]}", flush=True)
        for name in CORRECTIONS:
            gain = outcome.replay.gain(
                name, "hybridspec", resamples=arguments.resamples, seed=arguments.seed
            )
            rows.append(
                {
                    "kind": "correction",
                    "hazard": model,
                    "policy": name,
                    "gain_over_hybridspec": round(gain[0], 5),
                    "gain_low": round(gain[1], 5),
                    "gain_high": round(gain[2], 5),
                }
            )
            if model == BEST:
                gains[name] = gain
        if model == BEST:
            summary |= {
                "hazard": model,
                "of_oracle": ours["of_oracle"],
                "of_oracle_low": ours["of_oracle_low"],
                "of_oracle_high": ours["of_oracle_high"],
                "over_ar": ours["over_ar"],
                "over_dflash16": ours["over_stock"],
                "tokens_per_s": ours["tokens_per_s"],
                "walked_tokens_per_s": ours["resimulated_tokens_per_s"],
                "best_fixed_length": outcome.fit.best_fixed_length,
                "lam_tokens_per_us": outcome.fit.tokens_per_us,
                **scores[model],
            }
    summary |= {
        # The better of the paper's rule and ours with one row of lookahead.
        "router_correction_gain": round(
            max(gains["router-paper"][0], gains["router-select"][0]), 5
        ),
        "router_paper_gain": round(gains["router-paper"][0], 5),
        "router_select_gain": round(gains["router-select"][0], 5),
        "known_experts_gain": round(gains["oracle-cost"][0], 5),
        "bar_of_oracle": 0.905,
    }
    path = write_results(
        "replay_lab",
        rows=rows,
        summary=summary,
        seed=arguments.seed,
        where=where,
        packages=("numpy", "scikit-learn", "pyarrow"),
        out=arguments.out,
    )
    print(f"{path.name}: {summary}")


def run(stream: TraceStream, model: str, *, resamples: int, seed: int) -> Prediction:
    """Replay the test split with one hazard model."""
    return predict(
        stream, [load_price(CURVE)], POLICIES, hazards=model, resamples=resamples, seed=seed
    )


def table_rows(outcome: Outcome, model: str, *, whole: bool) -> list[dict[str, Any]]:
    """Rows to keep: of the best model all policies by category, of the others the totals."""
    kept = []
    for row in outcome.rows.to_pylist():
        overall = row["category"] == ALL_CATEGORIES
        by_category = whole and row["loops"] == OUTSIDE
        if not (overall or by_category) or (not whole and row["loops"] != OUTSIDE):
            continue
        rounded = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in row.items()
        }
        kept.append({"kind": "policy", "hazard": model, **rounded})
    return kept


def held_out_rounds(stream: TraceStream, model: str) -> RoundSet:
    """Held-out rounds outside repetition loops with the hazards of a model."""
    fitted = fit_model(model, fit_rounds(stream).arrays)
    (rounds,) = round_sets(stream, fitted.predict, split="test")
    return rounds.outside_loops()


def bias_by_experts(rounds: RoundSet, model: str) -> list[dict[str, Any]]:
    """Emitted less expected tokens of 8 verified rows, by quarters of distinct experts."""
    assert rounds.distinct_total_NL is not None
    experts = rounds.distinct_total_NL[:, BIAS_LENGTH - 1]
    emitted = realised_emitted(rounds.accepted, BIAS_LENGTH)
    excess = emitted - expected_emitted(rounds.hazards_ND)[:, BIAS_LENGTH]
    quarter = np.searchsorted(np.quantile(experts, [0.25, 0.5, 0.75]), experts)
    return [
        {
            "kind": "bias",
            "hazard": model,
            "verify_length": BIAS_LENGTH,
            "quarter_of_distinct_experts": number + 1,
            "rounds": int((quarter == number).sum()),
            "mean_distinct_experts_8_layers": round(float(experts[quarter == number].mean()), 1),
            "emitted_less_expected_tokens": round(float(excess[quarter == number].mean()), 4),
        }
        for number in range(4)
    ]


def hazard_scores(rounds: RoundSet, *, resamples: int, seed: int) -> dict[str, float]:
    """AUC and log loss of the hazards on drafts at risk."""
    rows = at_risk(rounds.accepted)
    labels = (rounds.accepted[:, None] > np.arange(NUM_DRAFTS))[rows]
    prompt = np.broadcast_to(rounds.prompt_index[:, None], rows.shape)[rows]
    _, number = np.unique(prompt, return_inverse=True)
    draws = prompt_draws(int(number.max()) + 1, resamples=resamples, seed=seed)
    found = forecast_scores(rounds.hazards_ND[rows], labels, number, draws)
    return {
        f"{name}{end}": round(value, 5)
        for name in ("auc", "log_loss")
        for end, value in (
            ("", found[name].value),
            ("_low", found[name].lo),
            ("_high", found[name].hi),
        )
    }


if __name__ == "__main__":
    main()
