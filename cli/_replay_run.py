"""What `hybridspec replay` does: read, fit, replay, tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridspec.cli._output import Output
from hybridspec.costmodels.catalog import DEFAULT_POLICIES, check_names
from hybridspec.costmodels.prediction import Outcome, Prediction, Price, load_price, predict
from hybridspec.costmodels.replay_sums import ALL_CATEGORIES, INSIDE, OUTSIDE
from hybridspec.costmodels.trace_stream import TraceStream, open_trace

Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec replay`, in its words; `policies` None for the default."""

    trace: Path
    cost: Path
    policies: tuple[str, ...] | None
    what_if: Path | None
    hazard: str | None
    split: str
    batch: int
    resamples: int
    seed: int


def policy_names(text: str | None) -> tuple[str, ...] | None:
    """The policies of a list with commas, refused where one is unknown."""
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    check_names(names)
    return names


def run(request: Request, output: Output) -> None:
    """Do what the command line asks."""
    stream = open_trace(request.trace)
    paths = [request.cost, *([] if request.what_if is None else [request.what_if])]
    prices = [load_price(path) for path in paths]
    warn_about(prices, output)
    prediction = predicted(
        stream,
        prices,
        request.policies or DEFAULT_POLICIES,
        hazard=request.hazard,
        split=request.split,
        batch=request.batch,
        resamples=request.resamples,
        seed=request.seed,
        drop_unroutable=request.policies is None,
        output=output,
    )
    for outcome in prediction.outcomes:
        _tell(outcome, output)
    _tell_limits(prediction, output)
    output.result(
        "\n".join(_line(outcome) for outcome in prediction.outcomes),
        {
            "trace": {
                "path": str(stream.path),
                "rounds": stream.num_rounds,
                "split": request.split,
            },
            "hazard": prediction.hazards,
            "priced_by_routes": prediction.has_routes,
            "not_walked": list(prediction.not_walked),
            "costs": [as_json(outcome) for outcome in prediction.outcomes],
        },
    )


def predicted(
    stream: TraceStream,
    prices: Sequence[Price],
    policies: Sequence[str],
    *,
    hazard: str | None,
    split: str,
    batch: int,
    resamples: int,
    seed: int,
    drop_unroutable: bool,
    output: Output,
) -> Prediction:
    """`predict` with progress."""
    with output.progress("replaying rounds", float(stream.num_rounds)) as bar:
        return predict(
            stream,
            prices,
            policies,
            hazards=hazard,
            split=split,
            batch=batch,
            resamples=resamples,
            seed=seed,
            drop_unroutable=drop_unroutable,
            progress=lambda rounds: bar.advance(float(rounds)),
        )


def warn_about(prices: Sequence[Price], output: Output) -> None:
    """Tell what is odd about costs."""
    for price in prices:
        for warning in price.warnings():
            output.warn(warning)


def as_json(outcome: Outcome) -> Row:
    """One cost's replay as a JSON object."""
    return {
        "path": str(outcome.price.path),
        "name": outcome.price.name,
        "tokens_per_us": outcome.fit.tokens_per_us,
        "best_fixed_length": outcome.fit.best_fixed_length,
        "drafting_pays": outcome.fit.drafting_pays,
        "rows": outcome.rows.to_pylist(),
    }


def select_rows(
    outcome: Outcome, *, loops: str = OUTSIDE, category: str | None = None
) -> list[Row]:
    """Rows of a replay, of one category if named."""
    return [
        row
        for row in outcome.rows.to_pylist()
        if row["loops"] == loops and category in (None, row["category"])
    ]


def _tell(outcome: Outcome, output: Output) -> None:
    overall = select_rows(outcome, category=ALL_CATEGORIES)
    first = overall[0]
    output.table(
        f"{outcome.price.name}: {first['rounds']} rounds of {first['prompts']} prompts outside "
        "repetition loops; intervals 95 %",
        (
            "policy",
            "tokens/s",
            "95 %",
            "walked",
            "tokens/round",
            "length",
            "over plain",
            "over 16",
            "of oracle",
        ),
        [_overall_cells(row) for row in overall],
    )
    names = [row["policy"] for row in overall]
    by_category = [
        row for row in select_rows(outcome) if row["category"] != ALL_CATEGORIES
    ] + select_rows(outcome, loops=INSIDE, category=ALL_CATEGORIES)
    cells: dict[str, dict[str, float]] = {}
    for row in by_category:
        key = "(in loops)" if row["loops"] == INSIDE else row["category"]
        cells.setdefault(key, {})[row["policy"]] = row["tokens_per_s"]
    output.table(
        "tokens/s by category",
        ("policy", *cells),
        [[name, *(f"{rates[name]:.0f}" for rates in cells.values())] for name in names],
    )


def _overall_cells(row: Row) -> list[str]:
    walked = row["resimulated_tokens_per_s"]
    return [
        row["policy"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['tokens_per_s_low']:.0f}-{row['tokens_per_s_high']:.0f}",
        "-" if walked is None else f"{walked:.1f}",
        f"{row['tokens_a_round']:.2f}",
        f"{row['mean_length']:.2f}",
        f"{row['over_ar']:.2f}x",
        f"{row['over_stock']:.2f}x",
        f"{row['of_oracle']:.1%}",
    ]


def _tell_limits(prediction: Prediction, output: Output) -> None:
    output.note(
        "walked: the same text to its end, the rest of a cut block standing in for the draft pass "
        "that was never recorded"
        + (
            f"; not for {', '.join(prediction.not_walked)}, which remember earlier rounds"
            if prediction.not_walked
            else ""
        )
    )
    if not prediction.has_routes:
        output.note("the trace has no routes: every round of a length costs the same")
    for outcome in prediction.outcomes:
        if prediction.has_routes and not outcome.price.prices_experts:
            output.note(
                f"{outcome.price.name} has no price of an expert: policies that weigh experts "
                "choose as the others do"
            )
    for warning in prediction.warnings:
        output.warn(warning)


def _line(outcome: Outcome) -> str:
    overall = select_rows(outcome, category=ALL_CATEGORIES)
    ours = [row for row in overall if row["policy"] == "hybridspec"]
    shown = ours or [max(overall, key=lambda row: row["tokens_per_s"])]
    row = shown[0]
    return (
        f"{outcome.price.name}: {row['policy']} {row['tokens_per_s']:.1f} tokens/s "
        f"({row['tokens_per_s_low']:.0f} to {row['tokens_per_s_high']:.0f}), "
        f"{row['over_ar']:.2f}x plain decoding, {row['over_stock']:.2f}x stock DFlash, "
        f"{row['of_oracle']:.1%} of the oracle length"
    )
