"""The README's figure from a bundle: held-out reliability, and what a round costs here.

python benchmarks/readme_figure.py BUNDLE docs/demo.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

from hybridspec.artifacts.bundle import load_bundle

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WAYS = (("raw-top1", "drafter's own probability", "#b0703c"),)
FITTED = ("beta-position-isotonic", "calibrated", "#1f6f8b")


def main() -> None:
    bundle_folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    bundle = load_bundle(bundle_folder)
    if bundle.calibration is None or bundle.cost is None:
        raise SystemExit(f"{bundle_folder} lacks a part")
    plt.rcParams.update({"svg.hashsalt": "hybridspec", "font.size": 10, "axes.grid": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    reliability = bundle.calibration.reliability
    for model, label, colour in (*WAYS, FITTED):
        part = [
            row
            for row in reliability.to_pylist()
            if row["split"] == "test" and row["model"] == model and row["position"] == -1
        ]
        left.plot(
            [row["mean_predicted"] for row in part],
            [row["mean_observed"] for row in part],
            "o-",
            ms=4,
            color=colour,
            label=label,
        )
    left.plot([0, 1], [0, 1], color="#888888", lw=1, ls="--")
    left.set(
        xlabel="predicted chance that a draft is accepted",
        ylabel="share accepted",
        title="Held-out prompts",
    )
    left.legend(frameon=False)
    step = bundle.cost.step
    lengths = range(1, 17)
    median_ms = step.latency_us[0, 0] / 1e3
    right.fill_between(
        lengths,
        step.latency_p10_us[0, 0, 1:] / 1e3,
        step.latency_p90_us[0, 0, 1:] / 1e3,
        color=FITTED[2],
        alpha=0.2,
        lw=0,
    )
    right.plot(lengths, median_ms[1:], "o-", ms=4, color=FITTED[2], label="draft + verify L rows")
    right.axhline(median_ms[0], color="#b0703c", label="plain decoding, one token")
    right.set(
        xlabel="verify length L",
        ylabel="round, ms",
        title=f"One request, context {int(step.context_tokens[0])}, median and p10-p90",
        ylim=(0, None),
    )
    right.legend(frameon=False, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
