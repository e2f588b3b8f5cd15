"""What `hybridspec calibrate` tells: its plan before, its figures after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from hybridspec.calibrate.bootstrap import Score
from hybridspec.calibrate.fit import CalibrationResult, CalibrationSummary
from hybridspec.cli._calibrate_plan import Plan
from hybridspec.cli._output import Output, format_bytes
from hybridspec.cli._rates import tell_rates
from hybridspec.collect import group_prompts

_SHOWN_METRICS = {
    "hazard_log_loss": "hazard: log loss, nats",
    "hazard_brier": "hazard: Brier score",
    "hazard_ece": "hazard: calibration error",
    "hazard_auc": "hazard: AUC",
    "survival_log_loss": "survival: log loss, nats",
    "survival_ece": "survival: calibration error",
    "emitted_bias_16": "tokens a round of 16: bias",
}


def tell_plan(plan: Plan, trace: Path, out: Path, output: Output) -> None:
    """Say what would be recorded and how much it is at most."""
    groups = group_prompts(plan.prompts, plan.identity.group_size)
    counts = Counter((p.prompt.category, p.prompt.split) for p in plan.prompts)
    categories = sorted({category for category, _ in counts})
    output.table(
        "Prompts",
        ("category", "calibration", "test"),
        [
            (name, str(counts[name, "calibration"]), str(counts[name, "test"]))
            for name in categories
        ],
    )
    place = plan.placement
    where = f"on {place.device} ({place.dtype}, {place.threads} threads)"
    if plan.engine == "sglang":
        where = f"in SGLang ({place.dtype})"
    data = {
        "pair": plan.folders.name,
        "engine": plan.engine,
        "device": plan.placement.device,
        "dtype": plan.placement.dtype,
        "threads": plan.placement.threads,
        "prompts": len(plan.prompts),
        "groups": len(groups),
        "max_context_tokens": plan.max_context,
        "max_emitted_tokens": plan.most_tokens,
        "max_trace_bytes": plan.most_bytes,
        "trace": str(trace),
        "bundle": str(out),
    }
    output.result(
        f"would record {len(plan.prompts)} prompts in {len(groups)} groups with "
        f"{plan.folders.target} {where}: "
        f"at most {plan.most_tokens} tokens and {format_bytes(plan.most_bytes)} in {trace}, "
        f"then write {out}; nothing was done",
        data,
    )


def tell_result(
    out: Path,
    trace_folder: Path,
    trace: pa.Table,
    result: CalibrationResult,
    *,
    content_id: str,
    rates: Mapping[str, float],
    output: Output,
) -> None:
    """Show the figures of the fit and write the bundle's path as the result."""
    summary = result.summary
    output.note(
        f"{summary.num_rounds} rounds of {summary.num_prompts} prompts, "
        f"{summary.num_loop_rounds} of them in repetition loops and left out; "
        f"{tokens_per_round(trace):.2f} tokens a round with all 16 rows verified"
    )
    output.table(
        f"Held-out prompts ({summary.num_test_rounds} rounds), 95 % interval by prompt",
        (
            "",
            "drafter's top-1",
            "fitted",
            *(("distilled to a table",) if summary.distilled else ()),
        ),
        _score_rows(summary),
    )
    tell_rates(rates, output)
    if summary.distilled:
        output.note(
            "the bundle holds the trees, which serve evaluates, and the table distilled from them "
            "for what takes no trees"
        )
    gain = summary.after.get("hazard_log_loss_gain")
    if gain is not None and gain.hi < 0:
        output.warn(
            f"the fitted hazards are worse than the drafter's own probability on held-out prompts "
            f"(log loss {-gain.value:+.4f}): record more prompts, or prompts of one kind"
        )
    output.result(
        str(out),
        {
            "bundle": str(out),
            "content_id": content_id,
            "trace": str(trace_folder),
            "rounds": trace.num_rows,
            "tokens_per_round": tokens_per_round(trace),
            "summary": summary.to_json(),
            "predicted_tokens_per_s": dict(rates),
        },
    )


def tokens_per_round(trace: pa.Table) -> float:
    """Mean tokens that a fully verified round emits, outside repetition loops."""
    accepted = trace.column("accepted").to_numpy()
    outside = trace.column("loop_period").to_numpy() == 0
    return float(accepted[outside].mean() + 1.0) if outside.any() else 0.0


def _score_rows(summary: CalibrationSummary) -> list[tuple[str, ...]]:
    columns = [summary.before, summary.after, *([summary.distilled] if summary.distilled else [])]
    return [
        (label, *(_score(column.get(name)) for column in columns))
        for name, label in _SHOWN_METRICS.items()
        if name in summary.after
    ]


def _score(score: Score | None) -> str:
    return "-" if score is None else f"{score.value:.4f} ({score.lo:.4f} to {score.hi:.4f})"
