"""README.md of a bundle that is handed on: what it is for, its numbers, its limits."""

from __future__ import annotations

from hybridspec.artifacts.bundle import Bundle, CalibrationPart, CostPart
from hybridspec.artifacts.transport import bundle_name

_LENGTHS = (0, 1, 2, 4, 8, 12, 16)
_METRICS = ("hazard_log_loss", "hazard_auc", "hazard_ece")


def card_text(bundle: Bundle, *, plots: tuple[str, ...] = ()) -> str:
    """Returns the card: a front matter that a hub reads, one table a part, limits.

    Args:
        bundle: as loaded.
        plots: names of the plots that lie beside the card.
    """
    lines = ["---", "tags:", "- hybridspec", "- speculative-decoding", "library_name: hybridspec"]
    lines += ["---", "", f"# {bundle_name(bundle)}", ""]
    lines += [
        "Measured costs and calibrated acceptance for choosing how many draft tokens to verify, "
        "read by HybridSpec. Content id "
        f"`{bundle.content_id}`.",
        "",
    ]
    if bundle.calibration is not None:
        lines += _calibration(bundle.calibration)
    if bundle.cost is not None:
        lines += _cost(bundle.cost)
    lines += [f"![{name}]({name})" for name in plots] + ([""] if plots else [])
    lines += [
        "## Limits",
        "",
        "* What is decoded never depends on a bundle; only the speed does.",
        "* Costs hold for the machine, engine and settings above; another machine of the same "
        "memory class can take them over with measured anchors (`hybridspec bundle transfer`).",
        "* Hazards hold for the pair, type and sampling above, whatever the machine.",
        "",
        "## Use",
        "",
        "```",
        "hybridspec bundle verify .",
        "hybridspec serve TARGET --drafter DRAFTER --bundle .",
        "```",
        "",
    ]
    return "\n".join(lines)


def _calibration(part: CalibrationPart) -> list[str]:
    identity = part.identity
    lines = [
        "## Calibration",
        "",
        f"Target `{identity.target_digest[:12]}`, drafter `{identity.drafter_digest[:12]}`, "
        f"{identity.dtype}, quantisation {identity.quantization}, temperature "
        f"{identity.temperature:g}, top-p {identity.top_p:g}; hazards `{part.hazard.method}`.",
        "",
        "| held out | model | value | 95 % interval |",
        "|---|---|--:|--:|",
    ]
    rows = [
        row
        for row in part.metrics.to_pylist()
        if (row["split"], row["category"]) == ("test", "all") and row["metric"] in _METRICS
    ]
    lines += [
        f"| {row['metric']} | {row['model']} | {row['value']:.4f} | {row['lo']:.4f} to "
        f"{row['hi']:.4f} |"
        for row in rows
    ]
    return [*lines, ""]


def _cost(part: CostPart) -> list[str]:
    identity, step = part.identity, part.step
    lines = [
        "## Cost",
        "",
        f"{identity.device} ({identity.memory_class}), {identity.engine} "
        f"{identity.engine_version}, {identity.dtype}, quantisation {identity.quantization}, "
        f"tensor parallelism {identity.tp_size}, {identity.threads} threads.",
    ]
    if part.transfer is not None:
        lines += [
            "",
            f"**Transferred** from {part.transfer.source_device} (cost part "
            f"`{part.transfer.source[:12]}`) with {part.transfer.anchors} measured anchors; "
            f"anchors left out are missed by {part.transfer.error_median:.1%} (median), "
            f"{part.transfer.error_p90:.1%} (90 %).",
        ]
    heads = " | ".join(f"L={length}" for length in _LENGTHS)
    lines += ["", f"| batch | context | {heads} |", "|--:|--:" + "|--:" * len(_LENGTHS) + "|"]
    for i, batch in enumerate(step.batch_sizes.tolist()):
        for j, context in enumerate(step.context_tokens.tolist()):
            cells = " | ".join(f"{step.latency_us[i, j, length]:.0f}" for length in _LENGTHS)
            lines.append(f"| {batch} | {context} | {cells} |")
    return [*lines, "", "Round latency in us by verify length; L=0 is plain decoding.", ""]
