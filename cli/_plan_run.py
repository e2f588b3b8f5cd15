"""What `hybridspec plan` does: price, judge, tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridspec.artifacts.tables import StepCostTable
from hybridspec.cli._output import Output, format_bytes
from hybridspec.cli._replay_run import Row, predicted, select_rows, warn_about
from hybridspec.costmodels.breakeven import BreakEven, break_even
from hybridspec.costmodels.lookup import batch_row
from hybridspec.costmodels.memory import GdnShape, RollbackMemory, rollback_memory
from hybridspec.costmodels.prediction import Price, load_price
from hybridspec.costmodels.profile import profile_gains, read_profile, verdict
from hybridspec.costmodels.replay_sums import ALL_CATEGORIES
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import UsageError

# Fewer prompts than this resample to intervals that are too narrow, of one to no width at all.
_MIN_PROMPTS = 5
_POLICIES = ("ar", "fixed-16", "best-fixed", "hybridspec", "oracle")
_WORDS = {
    "yes": "speculation pays",
    "no": "speculation does not pay",
    "unclear": "speculation may or may not pay",
}


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec plan`, in its words."""

    cost: Path
    trace: Path | None
    acceptance: str | None
    target: Path | None
    hazard: str | None
    batch: int
    resamples: int
    seed: int


def run(request: Request, output: Output) -> None:
    """Do what the command line asks."""
    if request.trace is None and request.acceptance is None:
        raise UsageError(
            "neither --trace nor --acceptance is given; a plan needs recorded rounds or an "
            "acceptance profile: give --trace PATH or --acceptance P,P,..."
        )
    if request.trace is not None and request.acceptance is not None:
        raise UsageError(
            f"--trace {request.trace} and --acceptance {request.acceptance} are both given; a plan "
            "takes one of them: leave the other out"
        )
    price = load_price(request.cost)
    warn_about([price], output)
    memory = None if request.target is None else _memory(request.target)
    if request.trace is not None:
        line, data, table = _from_trace(request, request.trace, price, output)
    else:
        assert request.acceptance is not None
        line, data, table = _from_profile(request, request.acceptance, price, output)
    verdicts = _break_even(table, request.batch)
    for found in verdicts:
        output.note(found.line())
    data["break_even"] = [
        {
            "batch": found.batch,
            "context_tokens": found.context_tokens,
            "acceptance": found.acceptance,
            "length": found.length,
            "tokens_by_length": found.tokens_by_length.tolist(),
        }
        for found in verdicts
    ]
    data["memory_bytes_a_request"] = None if memory is None else asdict(memory)
    if memory is not None:
        line += (
            f"; rolling a request's state back needs {format_bytes(memory.factors)} of factors "
            f"(snapshots a row: {format_bytes(memory.snapshots)})"
        )
    else:
        output.note("--target DIR adds the memory of a request")
    output.result(line, data)


def _from_trace(
    request: Request, trace: Path, price: Price, output: Output
) -> tuple[str, dict[str, Any], StepCostTable]:
    stream = open_trace(trace)
    prediction = predicted(
        stream,
        [price],
        _POLICIES,
        hazard=request.hazard,
        split="test",
        batch=request.batch,
        resamples=request.resamples,
        seed=request.seed,
        drop_unroutable=True,
        output=output,
    )
    for warning in prediction.warnings:
        output.warn(warning)
    outcome = prediction.outcomes[0]
    rows = {(row["policy"], row["category"]): row for row in select_rows(outcome)}
    ours = rows["hybridspec", ALL_CATEGORIES]
    answer = _judged(ours)
    best = outcome.fit.best_fixed_length
    categories = sorted({category for _, category in rows} - {ALL_CATEGORIES})
    judged = {category: _judged(rows["hybridspec", category]) for category in categories}
    few = [name for name in categories if rows["hybridspec", name]["prompts"] < _MIN_PROMPTS]
    output.table(
        f"{price.name}: gain over plain decoding, held-out prompts",
        ("category", "pays", "best fixed", "by round", "95 %", "oracle", "length"),
        [
            [
                category,
                judged.get(category, answer),
                f"{rows['best-fixed', category]['over_ar']:.2f}x",
                f"{rows['hybridspec', category]['over_ar']:.2f}x",
                f"{rows['hybridspec', category]['over_ar_low']:.2f}-"
                f"{rows['hybridspec', category]['over_ar_high']:.2f}",
                f"{rows['oracle', category]['over_ar']:.2f}x",
                f"{rows['hybridspec', category]['mean_length']:.1f}",
            ]
            for category in (ALL_CATEGORIES, *categories)
        ],
    )
    if few:
        output.note(
            f"unclear where fewer than {_MIN_PROMPTS} prompts were held out, whatever they give: "
            f"{', '.join(few)}"
        )
    line = (
        f"{_WORDS[answer]} on {price.name}: {ours['over_ar']:.2f}x plain decoding "
        f"({ours['over_ar_low']:.2f} to {ours['over_ar_high']:.2f}) with lengths by round, "
        f"{rows['best-fixed', ALL_CATEGORIES]['over_ar']:.2f}x at the best fixed length {best}"
    )
    data = {
        "pays": answer,
        "by": "trace",
        "cost": price.name,
        "batch": request.batch,
        "best_fixed_length": best,
        "gain": {key: ours[key] for key in ("over_ar", "over_ar_low", "over_ar_high")},
        "pays_by_category": judged,
        "hazard": prediction.hazards,
        "rows": outcome.rows.to_pylist(),
    }
    return line, data, outcome.table


def _judged(row: Row) -> str:
    if row["prompts"] < _MIN_PROMPTS:
        return "unclear"
    return verdict(row["over_ar_low"], row["over_ar_high"])


def _from_profile(
    request: Request, acceptance: str, price: Price, output: Output
) -> tuple[str, dict[str, Any], StepCostTable]:
    if request.hazard is not None:
        raise UsageError("--hazard belongs to recorded rounds: give --trace PATH, or leave it out")
    table = price.table(None, topk=0)
    gains = profile_gains(read_profile(acceptance), table, batch=request.batch)
    answers = [verdict(gain.over_ar_low, gain.over_ar_high) for gain in gains]
    # A curve has one time a length; an interval without width would look like certainty.
    spread = price.curve is None
    output.table(
        f"{price.name}: best fixed length by context, batch {gains[0].batch}; "
        + ("intervals from the spread of the measured times" if spread else "no spread of times"),
        ("context", "pays", "length", "tokens/round", "tokens/s", "over plain", "spread"),
        [
            [
                f"{gain.context_tokens}",
                answer,
                f"{gain.length}",
                f"{gain.tokens_a_round:.2f}",
                f"{gain.tokens_per_s:.1f}",
                f"{gain.over_ar:.2f}x",
                f"{gain.over_ar_low:.2f}-{gain.over_ar_high:.2f}" if spread else "-",
            ]
            for gain, answer in zip(gains, answers, strict=True)
        ],
    )
    output.note(
        "a profile has no sample size, so no interval of the acceptance, and knows no single "
        "rounds: what choosing lengths by round adds takes --trace"
    )
    gain, answer = gains[0], answers[0]
    within = f"{gain.over_ar_low:.2f} to {gain.over_ar_high:.2f} within the spread of the times"
    line = (
        f"{_WORDS[answer]} on {price.name}: {gain.over_ar:.2f}x plain decoding "
        f"({within if spread else 'a curve has no spread'}) at fixed length {gain.length}, context "
        f"{gain.context_tokens}"
    )
    rows = [asdict(found) for found in gains]
    if not spread:
        rows = [row | {"over_ar_low": None, "over_ar_high": None} for row in rows]
    data = {
        "pays": answer,
        "by": "acceptance",
        "cost": price.name,
        "batch": request.batch,
        "best_fixed_length": gain.length,
        "gain": {key: rows[0][key] for key in ("over_ar", "over_ar_low", "over_ar_high")},
        "rows": rows,
    }
    return line, data, table


def _break_even(table: StepCostTable, batch: int) -> list[BreakEven]:
    size = int(table.batch_sizes[batch_row(table, batch)])
    return [found for found in break_even(table) if found.batch == size]


def _memory(folder: Path) -> RollbackMemory:
    from hybridspec.reference.config import load_target_config

    config = load_target_config(folder)
    return rollback_memory(
        GdnShape(
            layers=len(config.gdn_layers),
            key_heads=config.gdn_key_heads,
            value_heads=config.gdn_value_heads,
            key_dim=config.gdn_key_dim,
            value_dim=config.gdn_value_dim,
            conv_kernel=config.conv_kernel,
        )
    )
