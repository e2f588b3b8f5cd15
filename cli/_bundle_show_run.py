"""What `hybridspec bundle show` and `diff` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridspec.artifacts.bundle import Bundle, CalibrationPart, CostPart, load_bundle
from hybridspec.artifacts.diff import PartDifference, diff_bundles
from hybridspec.artifacts.identity import identity_fields
from hybridspec.artifacts.transport import bundle_name
from hybridspec.cli._certificates import certificate_lines, certificates_json
from hybridspec.cli._output import Output
from hybridspec.costmodels.export import stored_expert_slope

_LENGTHS = (0, 1, 2, 4, 8, 12, 16)
_SHOWN = ("hazard_log_loss", "hazard_auc", "hazard_ece", "survival_ece", "emitted_bias_16")
_DIGEST_DIGITS = 12


def show(folder: Path, output: Output) -> None:
    """Write what a bundle says."""
    bundle = load_bundle(folder)
    for warning in bundle.warnings:
        output.warn(warning)
    lines = [
        f"bundle {bundle_name(bundle)}",
        f"  content id {bundle.content_id}, schema {bundle.manifest.schema_version}",
    ]
    if bundle.calibration is not None:
        lines += _calibration_lines(bundle.calibration)
    if bundle.cost is not None:
        lines += _cost_lines(bundle.cost)
    lines += certificate_lines(bundle, output)
    output.result("\n".join(lines), describe(bundle))
    if bundle.cost is not None:
        _cost_table(bundle.cost, output)
    if bundle.calibration is not None:
        _metrics_table(bundle.calibration, output)


def describe(bundle: Bundle) -> dict[str, Any]:
    """A bundle as JSON: identities, ids, costs, held-out metrics, files."""
    calibration, cost = bundle.calibration, bundle.cost
    return {
        "name": bundle_name(bundle),
        "content_id": bundle.content_id,
        "schema_version": bundle.manifest.schema_version,
        "warnings": list(bundle.warnings),
        "calibration": None
        if calibration is None
        else {
            "content_id": calibration.content_id,
            "identity": identity_fields(calibration.identity),
            "method": calibration.hazard.method,
            "routing": calibration.routing is not None,
            "held_out": [row for row in calibration.metrics.to_pylist() if row["split"] == "test"],
            "provenance": dict(calibration.provenance),
        },
        "cost": None if cost is None else _cost_json(cost),
        "files": [
            {"path": entry.path, "num_bytes": entry.num_bytes, "rows": entry.rows}
            for entry in bundle.manifest.entries()
        ],
        "certificates": certificates_json(bundle),
    }


def _cost_json(cost: CostPart) -> dict[str, Any]:
    step, transfer, throughput = cost.step, cost.transfer, cost.throughput
    slope = stored_expert_slope(cost.experts)
    return {
        "content_id": cost.content_id,
        "identity": identity_fields(cost.identity),
        "source": "measured" if transfer is None else "transferred",
        "transfer": None if transfer is None else vars(transfer).copy(),
        "batch_sizes": step.batch_sizes.tolist(),
        "context_tokens": step.context_tokens.tolist(),
        "latency_us": step.latency_us.tolist(),
        "latency_p10_us": step.latency_p10_us.tolist(),
        "latency_p90_us": step.latency_p90_us.tolist(),
        "draft_us": step.draft_us.tolist(),
        "expert_slope_us": step.expert_slope_us,
        "expert_slope_r2": step.expert_slope_r2,
        "expert_fit": None
        if slope is None
        else {
            "slope_low_us": slope.slope_low_us,
            "slope_high_us": slope.slope_high_us,
            "intercept_us": [
                {"batch_size": batch, "verify_length": length, "intercept_us": value}
                for (batch, length), value in slope.intercept_us.items()
            ],
            "largest_residual_share_by_length": dict(slope.residual_by_length),
        },
        "throughput": None
        if throughput is None
        else [
            {"batch_size": batch, "tokens_per_s": 1e6 * rate, "best_fixed_length": length}
            for batch, rate, length in zip(
                throughput.batch_sizes.tolist(),
                throughput.tokens_per_us.tolist(),
                throughput.best_fixed_length.tolist(),
                strict=True,
            )
        ],
        "provenance": dict(cost.provenance),
    }


def _calibration_lines(part: CalibrationPart) -> list[str]:
    identity = part.identity
    routes = "with" if part.routing is not None else "without"
    trees = "" if part.trees is None else f" and {part.trees.num_trees} trees"
    return [
        f"calibration {part.content_id[:_DIGEST_DIGITS]}: hazards {part.hazard.method}{trees}, "
        f"{routes} routing",
        f"  target {identity.target_digest[:_DIGEST_DIGITS]}, drafter "
        f"{identity.drafter_digest[:_DIGEST_DIGITS]}, {identity.dtype}, quantisation "
        f"{identity.quantization}, temperature {identity.temperature:g}, top-p {identity.top_p:g}",
    ]


def _cost_lines(part: CostPart) -> list[str]:
    identity, step = part.identity, part.step
    lines = [
        f"cost {part.content_id[:_DIGEST_DIGITS]}: {identity.device} ({identity.memory_class}), "
        f"{identity.engine} {identity.engine_version}, {identity.dtype}, quantisation "
        f"{identity.quantization}",
        f"  tensor parallelism {identity.tp_size}, {identity.threads} threads, graphs "
        f"{identity.graph_tiers}, backends {identity.backends}, torch {identity.torch_version}",
    ]
    if part.transfer is not None:
        record = part.transfer
        lines.append(
            f"  TRANSFERRED from {record.source_device} ({record.source[:_DIGEST_DIGITS]}) with "
            f"{record.anchors} measured anchors; those left out are missed by "
            f"{record.error_median:.1%} (median), {record.error_p90:.1%} (90 %)"
        )
    if step.expert_slope_us > 0.0:
        fit = stored_expert_slope(part.experts)
        interval = f", {fit.slope_low_us:.3g} to {fit.slope_high_us:.3g}" if fit else ""
        lines.append(
            f"  {step.expert_slope_us:.3g} us a distinct expert of one layer "
            f"(R2 {step.expert_slope_r2:.3f}{interval})"
        )
    else:
        lines.append("  experts are not priced")
    throughput = part.throughput
    if throughput is None:
        lines.append("  no throughput is fitted for these two parts")
    else:
        rates = zip(
            throughput.batch_sizes.tolist(),
            throughput.tokens_per_us.tolist(),
            throughput.best_fixed_length.tolist(),
            strict=True,
        )
        lines += [
            f"  batch {batch}: rounds are judged by {1e6 * rate:.0f} tokens/s a request (fitted; "
            f"`hybridspec replay` predicts), best fixed length {length}"
            for batch, rate, length in rates
        ]
    return lines


def _cost_table(part: CostPart, output: Output) -> None:
    step = part.step
    rows = [
        (
            f"batch {batch}, context {context}",
            *(f"{step.latency_us[i, j, length]:.0f}" for length in _LENGTHS),
        )
        for i, batch in enumerate(step.batch_sizes.tolist())
        for j, context in enumerate(step.context_tokens.tolist())
    ]
    heads = ("", *(f"L={length}" for length in _LENGTHS))
    output.table("Round latency in us by verify length (L=0: plain decoding)", heads, rows)


def _metrics_table(part: CalibrationPart, output: Output) -> None:
    rows = [
        (
            f"{row['metric']}, {row['model']}",
            f"{row['value']:.4f}",
            f"{row['lo']:.4f} to {row['hi']:.4f}",
        )
        for row in part.metrics.to_pylist()
        if (row["split"], row["category"]) == ("test", "all") and row["metric"] in _SHOWN
    ]
    if rows:
        output.table("Held out", ("metric, model", "value", "95 % interval"), rows)


def diff(a: Path, b: Path, output: Output) -> None:
    """Write what differs between two bundles."""
    first, second = load_bundle(a), load_bundle(b)
    for side, bundle in (("A", first), ("B", second)):
        for warning in bundle.warnings:
            output.warn(f"{side}: {warning}")
    parts = diff_bundles(first, second)
    same = first.content_id == second.content_id
    lines = [f"the same bundle ({first.content_id[:_DIGEST_DIGITS]})"] if same else []
    if not same:
        lines = [line for part in parts for line in _difference_lines(part)]
        if all(part.same for part in parts):
            lines.append("throughput: fitted apart")
    output.result(
        "\n".join(lines),
        {
            "same": same,
            "content_id": [first.content_id, second.content_id],
            **{part.name: _difference_json(part) for part in parts},
        },
    )


def _difference_json(part: PartDifference) -> dict[str, Any]:
    cost = part.cost
    return {
        "same": part.same,
        "present": list(part.present),
        "identity": {name: list(values) for name, values in part.identity.items()},
        "files": list(part.files),
        "numbers": dict(part.numbers),
        "latency": None if cost is None else {**vars(cost), "largest_at": dict(cost.largest_at)},
    }


def _difference_lines(part: PartDifference) -> list[str]:
    if part.same:
        return [f"{part.name}: the same" if part.present[0] else f"{part.name}: in neither"]
    if not all(part.present):
        return [f"{part.name}: only in {'A' if part.present[0] else 'B'}"]
    lines = [f"{part.name}: differs ({', '.join(part.files) or 'identity alone'})"]
    lines += [
        f"  {name}: {_short(before)} -> {_short(now)}"
        for name, (before, now) in part.identity.items()
    ]
    cost = part.cost
    if cost is not None and cost.cells:
        at = cost.largest_at
        lines.append(
            f"  latency: {cost.cells} cells in both, median difference {cost.median_share:.1%}, "
            f"largest {cost.signed_share:+.1%} at batch {at['batch_size']}, context "
            f"{at['context_tokens']}, length {at['verify_length']}"
        )
    if cost is not None and (cost.only_in_a or cost.only_in_b):
        lines.append(f"  cells only in A: {cost.only_in_a}, only in B: {cost.only_in_b}")
    lines += [f"  {name}: {value:.6g}" for name, value in part.numbers.items()]
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text[:_DIGEST_DIGITS] if len(text) == 64 else text
