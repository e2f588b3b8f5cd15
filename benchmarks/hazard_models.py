"""Every hazard model on recorded rounds: fitted on calibration prompts, scored on test prompts.

    python benchmarks/hazard_models.py [--pair NAME] [--resamples N] [--out DIR]

Rounds inside repetition loops are fitted on by nobody and scored apart. Intervals are 95 % of a
bootstrap over prompts. Rows by `kind`:

* `model`: a model on the test prompts; `category` names one category, `loops` the rounds in loops;
* `left_out`: the same, the category left out of the fit too;
* `size`: boosted trees by number and depth, also by folds of the calibration prompts alone;
* `features`: boosted trees that see less, or accepted counts in place of surprises;
* `successor`: acceptance by whether the text's own continuation is the draft;
* `cut_history`: hazards where earlier rounds are known only up to a verify length;
* `drift`: the drift test between halves of the test prompts, and category against category.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from recordings import recorded_trace
from results_file import machine, write_results

from hybridspec.calibrate.boosted import NUM_TREES, TREE_DEPTH, BoostedHazard
from hybridspec.calibrate.bootstrap import Score, log_losses
from hybridspec.calibrate.context import BLOCK_NAMES, REQUEST_NAMES, SIGNAL_NAMES, TEXT_NAMES
from hybridspec.calibrate.drift import drift
from hybridspec.calibrate.features import (
    TraceArrays,
    accepted_labels,
    at_risk,
    list_column,
    trace_arrays,
)
from hybridspec.calibrate.held_out import (
    ALL,
    HeldOutScores,
    calibration_rounds,
    categories,
    held_out_rounds,
    held_out_scores,
    leave_one_category_out,
)
from hybridspec.calibrate.history import request_history
from hybridspec.calibrate.metrics import round_scores
from hybridspec.calibrate.model import HazardModel, prompt_folds
from hybridspec.calibrate.models import MODELS, make_model
from hybridspec.errors import HybridSpecError

SEED = 0
MAIN, TABLE, CELLS = "boosted", "distilled", "cells"
KEPT = (
    "hazard_auc",
    "hazard_log_loss",
    "hazard_brier",
    "hazard_ece",
    "survival_log_loss",
    "survival_brier",
    "survival_ece",
    "survival_auc",
    "emitted_bias_4",
    "emitted_bias_8",
    "emitted_bias_16",
)
SIZES = [(trees, depth) for depth in (3, 4, 5, 6) for trees in (4, 8, 16, 32, 64)]
# The learning rate that suits an ensemble of so many trees.
RATES = {4: 0.7, 8: 0.5, 16: 0.3, 32: 0.2, 64: 0.1}
GROUPS = {
    "signals": SIGNAL_NAMES,
    "signals + block": (*SIGNAL_NAMES, *BLOCK_NAMES),
    "signals + block + request": (*SIGNAL_NAMES, *BLOCK_NAMES, *REQUEST_NAMES),
    "signals + block + text": (*SIGNAL_NAMES, *BLOCK_NAMES, *TEXT_NAMES),
    "all": (*SIGNAL_NAMES, *BLOCK_NAMES, *TEXT_NAMES, *REQUEST_NAMES),
}
CUT_LENGTHS = (2, 4, 8)


def flat(scores: dict[str, Score], kept: tuple[str, ...] = KEPT) -> dict[str, float]:
    """Scores with their intervals as plain numbers; log losses in nats, biases in tokens."""
    units = {"log_loss": "_nats", "bias": "_tokens"}
    found: dict[str, float] = {}
    for metric in kept:
        if metric in scores:
            unit = next((word for part, word in units.items() if part in metric), "")
            score = scores[metric]
            name = metric.removeprefix("hazard_") + unit
            found |= {name: score.value, f"{name}_lo": score.lo, f"{name}_hi": score.hi}
    return found


def as_row(kind: str, name: str, scored: HeldOutScores) -> dict[str, Any]:
    return {
        "kind": kind,
        "model": name,
        "category": scored.category,
        "rounds": scored.num_rounds,
        "prompts": scored.num_prompts,
        **flat(scored.scores),
    }


def model_rows(rounds: TraceArrays, resamples: int) -> Iterator[dict[str, Any]]:
    teacher = BoostedHazard(seed=SEED).fit(calibration_rounds(rounds))
    for name in MODELS:
        began = time.perf_counter()
        model = make_model(name)
        if name in (TABLE, CELLS):
            model = type(model)(teacher=teacher)  # type: ignore[call-arg]
        model.fit(calibration_rounds(rounds))
        seconds = time.perf_counter() - began
        for scored in held_out_scores(model, rounds, resamples=resamples, seed=SEED):
            row = as_row("model", name, scored)
            if scored.category == ALL:
                row |= {"fit_s": round(seconds, 3), "fitted": dict(model.describe())}
            yield row


def left_out_rows(rounds: TraceArrays, resamples: int) -> Iterator[dict[str, Any]]:
    for name in MODELS:
        for scored in leave_one_category_out(
            partial(make_model, name), rounds, resamples=resamples, seed=SEED
        ):
            yield as_row("left_out", name, scored)


def scored_on_test(model: HazardModel, test: TraceArrays, resamples: int) -> dict[str, float]:
    scores, _ = round_scores(model.predict(test), test, resamples=resamples, seed=SEED)
    return flat(scores, KEPT[:4])


def folded_log_loss(make: Callable[[], HazardModel], fit: TraceArrays) -> float:
    """Log loss in nats on calibration prompts, each predicted by a fit on the other folds."""
    mask, labels = at_risk(fit.accepted), accepted_labels(fit.accepted)
    losses = np.zeros(mask.shape)
    for held_out in prompt_folds(fit.prompt, SEED):
        model = make().fit(fit.select(~held_out))
        losses[held_out] = log_losses(model.predict(fit.select(held_out)), labels[held_out])
    return float(losses[mask].mean())


def size_rows(rounds: TraceArrays, resamples: int) -> Iterator[dict[str, Any]]:
    fit, test = calibration_rounds(rounds), held_out_rounds(rounds)
    for trees, depth in SIZES:
        make = partial(
            BoostedHazard, num_trees=trees, depth=depth, learning_rate=RATES[trees], seed=SEED
        )
        model = make().fit(fit)
        yield {
            "kind": "size",
            "trees": trees,
            "depth": depth,
            "learning_rate": RATES[trees],
            "nodes": int(model.trees_.feature_K.size),
            "folds_log_loss_nats": folded_log_loss(make, fit),
            **scored_on_test(model, test, resamples),
        }


def accepted_counts(rounds: TraceArrays) -> TraceArrays:
    """Rounds whose mean surprise is the moving mean of accepted counts instead."""
    columns = rounds.history.columns_RH.copy()
    order = np.lexsort((columns[:, 2], rounds.prompt))
    mean = np.float32(0.0)
    for previous, row in zip([-1, *order[:-1]], order, strict=True):
        if columns[row, 2] == 0:
            mean = np.float32(4.0)
        else:
            mean = mean + np.float32(0.25) * (np.float32(rounds.accepted[previous]) - mean)
        columns[row, 1] = mean
    return rounds.with_history(replace(rounds.history, columns_RH=columns))


def feature_rows(rounds: TraceArrays, resamples: int) -> Iterator[dict[str, Any]]:
    cases = [(name, names, rounds) for name, names in GROUPS.items()]
    counts = accepted_counts(rounds)
    cases.append(("signals + block + accepted counts", GROUPS["signals + block + request"], counts))
    cases.append(("all, accepted counts", GROUPS["all"], counts))
    for name, features, source in cases:
        model = BoostedHazard(features=features).fit(calibration_rounds(source))
        found = scored_on_test(model, held_out_rounds(source), resamples)
        yield {"kind": "features", "features": name, **found}


def successor_rows(rounds: TraceArrays) -> Iterator[dict[str, Any]]:
    """How often test drafts at risk were accepted, by what the request wrote before."""
    test = held_out_rounds(rounds)
    mask = at_risk(test.accepted)
    labels, p1 = accepted_labels(test.accepted)[mask], test.p1_RD[mask]
    successor = test.history.successor_RD[mask]
    for value, word in ((1, "is"), (0, "is not known"), (-1, "is another")):
        chosen = successor == value
        yield {
            "kind": "successor",
            "successor": word,
            "drafts": int(chosen.sum()),
            "accepted_share": float(labels[chosen].mean()),
            "mean_p1": float(p1[chosen].mean()),
        }


def cut_rows(rounds: TraceArrays, table: Any, resamples: int) -> Iterator[dict[str, Any]]:
    """What a policy sees: earlier rounds verified up to a length only, the same emitted text."""
    numbers = {
        name: table.column(name).to_numpy().astype(np.int64)
        for name in ("round", "generated_tokens")
    }
    for name, source in (("surprise", rounds), ("accepted counts", accepted_counts(rounds))):
        model = BoostedHazard().fit(calibration_rounds(source))
        for length in (*CUT_LENGTHS, 16):
            if name == "surprise":
                columns = request_history(
                    prompt=rounds.prompt,
                    round_index=numbers["round"],
                    generated_tokens=numbers["generated_tokens"],
                    accepted=rounds.accepted,
                    p1_RD=list_column(table, "p1"),
                    anchor=rounds.anchor,
                    draft_tokens_RD=rounds.draft_tokens_RD,
                    verified_drafts=np.full(len(rounds), length - 1),
                ).columns_RH
            else:
                cut = replace(rounds, accepted=np.minimum(rounds.accepted, length - 1))
                columns = accepted_counts(cut).history.columns_RH
            seen = rounds.with_history(replace(rounds.history, columns_RH=columns))
            found = scored_on_test(model, held_out_rounds(seen), resamples)
            yield {"kind": "cut_history", "history": name, "verify_length": length, **found}


def drift_rows(rounds: TraceArrays) -> Iterator[dict[str, Any]]:
    test = held_out_rounds(rounds)
    prompts = np.unique(test.prompt)
    pairs = [("odd prompts", np.isin(test.prompt, prompts[1::2]))]
    pairs += [(name, test.category == name) for name in categories(test)]
    for name in ("beta", MAIN):
        model = make_model(name).fit(calibration_rounds(rounds))
        for label, chosen in pairs:
            found = drift(model, test.select(~chosen), test.select(chosen), seed=SEED)
            yield {
                "kind": "drift",
                "model": name,
                "current": label,
                "verdict": found.verdict,
                "moved": list(found.moved),
                "reference_residual": found.reference_residual,
                "current_residual": found.current_residual,
            }


def summarise(rows: list[dict[str, Any]], pair: str) -> dict[str, Any]:
    found = {row["model"]: row for row in rows if row["kind"] == "model" and row["category"] == ALL}
    main, table, cells, beta = (found[name] for name in (MAIN, TABLE, CELLS, "beta"))
    return {
        "pair": pair,
        "model": MAIN,
        "trees": NUM_TREES,
        "depth": TREE_DEPTH,
        "auc": main["auc"],
        "log_loss": main["log_loss_nats"],
        "beta_auc": beta["auc"],
        "beta_log_loss": beta["log_loss_nats"],
        "distilled_auc": table["auc"],
        "distilled_log_loss": table["log_loss_nats"],
        "distillation_loss_nats": table["log_loss_nats"] - main["log_loss_nats"],
        "cells_auc": cells["auc"],
        "cells_log_loss": cells["log_loss_nats"],
        "cells_distillation_loss_nats": cells["log_loss_nats"] - main["log_loss_nats"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pair", default="lab", choices=("lab", "small"))
    parser.add_argument("--resamples", type=int, default=500)
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    where = machine()
    try:
        table = recorded_trace(options.pair)
    except HybridSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rounds = trace_arrays(table)
    rows: list[dict[str, Any]] = []
    for label, part in (
        ("models", model_rows(rounds, options.resamples)),
        ("categories left out", left_out_rows(rounds, options.resamples)),
        ("sizes", size_rows(rounds, options.resamples)),
        ("features", feature_rows(rounds, options.resamples)),
        ("successors", successor_rows(rounds)),
        ("cut history", cut_rows(rounds, table, options.resamples)),
        ("drift", drift_rows(rounds)),
    ):
        began = time.perf_counter()
        rows += part
        print(f"{label}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    summary = summarise(rows, options.pair)
    path = write_results(
        "hazard_models" if options.pair == "lab" else f"hazard_models_{options.pair}",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("numpy", "scikit-learn", "scipy", "pyarrow"),
        out=options.out,
    )
    print("model           AUC    log loss  Brier   ECE")
    for row in rows:
        if row["kind"] == "model" and row["category"] == ALL:
            print(
                f"{row['model']:14s} {row['auc']:.4f}  {row['log_loss_nats']:.4f}   "
                f"{row['brier']:.4f}  {row['ece']:.4f}"
            )
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
