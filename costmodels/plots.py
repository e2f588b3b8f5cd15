"""Plots of a cost table, as SVG and PNG. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, StepCostTable
from hybridspec.costmodels.expert import ExpertSlope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#30343b"
_MUTED = "#8a919c"
_GRID = "#e6e8ec"
_FROM, _TO = np.array([0x7F, 0xB3, 0xD5]) / 255, np.array([0x12, 0x3C, 0x69]) / 255
_PANEL_INCHES = 3.6
_MAX_COLUMNS = 3
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "text.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "hybridspec",
}


def plot_step_costs(table: StepCostTable, folder: Path, *, title: str = "") -> list[Path]:
    """Draws round latency over verify length, one panel a batch size, one line a context.

    Bands are p10 to p90; the dotted line is plain decoding (length 0) at the smallest context.

    Args:
        table: what to draw.
        folder: where `step-cost.svg` and `step-cost.png` are written.
        title: device and engine, drawn above the panels.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = table.batch_sizes.size
    columns = 2 if panels == 4 else min(panels, _MAX_COLUMNS)
    rows = -(-panels // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(
            figsize=(_PANEL_INCHES * columns + 1.2, 2.9 * rows + 0.3), layout="constrained"
        )
        axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        for panel, axis in enumerate(axes):
            if panel >= panels:
                axis.set_visible(False)
                continue
            _draw_batch(axis, table, panel)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        return _save(figure, folder, "step-cost")


def plot_expert_slope(fit: ExpertSlope, samples: pa.Table, folder: Path) -> list[Path]:
    """Draws medians of forced-route rounds over distinct experts, with the fitted line a length.

    Args:
        fit: the slope.
        samples: the `EXPERT_SAMPLES_SCHEMA` table it was fitted on.
        folder: where `expert-slope.svg` and `expert-slope.png` are written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = [samples.column(c).to_numpy() for c in ("batch", "verify_length", "distinct_experts")]
    total_us = samples.column("total_us").to_numpy()
    keys, case = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    groups = list(fit.intercept_us.items())
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axis = figure.subplots()
        for index, ((batch, length), intercept_us) in enumerate(groups):
            color = _shade(index, len(groups))
            cells = np.flatnonzero((keys[:, 0] == batch) & (keys[:, 1] == length))
            distinct = keys[cells, 2].astype(np.float64)
            quantiles = np.stack(
                [np.quantile(total_us[case == cell], [0.1, 0.5, 0.9]) for cell in cells], axis=1
            )
            low, median, high = quantiles / 1e3
            axis.errorbar(
                distinct,
                median,
                yerr=np.stack([median - low, high - median]),
                fmt="o",
                color=color,
                markersize=4,
                elinewidth=1,
            )
            ends = np.array([distinct.min(), distinct.max()])
            line = (intercept_us + fit.slope_us * fit.num_layers * ends) / 1e3
            axis.plot(ends, line, color=color, linewidth=1.2)
            label = f"L = {length}" if batch == 1 else f"L = {length}, batch {batch}"
            axis.annotate(
                label,
                (float(ends[1]), float(line[1])),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=color,
            )
        axis.set_xlabel("distinct experts of each layer")
        axis.set_ylabel("round, ms")
        axis.margins(x=0.12)
        axis.set_title(
            f"{fit.slope_us * fit.num_layers:.3g} us a distinct expert over {fit.num_layers} layers"
            f"  (R² {fit.r2:.3f})",
            loc="left",
            fontsize=9,
        )
        return _save(figure, folder, "expert-slope")


def _draw_batch(axis: Axes, table: StepCostTable, row: int) -> None:
    lengths = np.arange(1, BLOCK_SIZE + 1)
    contexts = table.context_tokens.size
    ends: list[float] = []
    for column in range(contexts):
        color = _shade(column, contexts)
        middle, low, high = (
            values[row, column, 1:] / 1e3
            for values in (table.latency_us, table.latency_p10_us, table.latency_p90_us)
        )
        axis.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
        axis.plot(lengths, middle, color=color, linewidth=1.5, marker="o", markersize=2.5)
        ends.append(float(middle[-1]))
    top = 1.08 * float(table.latency_p90_us[row].max()) / 1e3
    for column, place in enumerate(_spread_out(np.asarray(ends), gap=0.055 * top)):
        axis.text(
            BLOCK_SIZE + 0.4,
            float(place),
            f"{int(table.context_tokens[column]):,} tokens",
            va="center",
            fontsize=7.5,
            color=_shade(column, contexts),
        )
    plain = float(table.latency_us[row, 0, 0]) / 1e3
    axis.axhline(plain, color=_MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axis.annotate(
        "plain decoding",
        (BLOCK_SIZE, plain),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7.5,
        color=_MUTED,
    )
    axis.set_xticks([1, 4, 8, 12, 16])
    axis.set_ylim(0.0, top)
    axis.set_xlabel("verify length (rows a request)")
    axis.set_ylabel("round, ms")
    axis.set_title(f"batch {int(table.batch_sizes[row])}", loc="left", fontsize=9)


def _spread_out(heights: FloatArray, *, gap: float) -> FloatArray:
    """Returns heights moved apart to at least `gap`, in the same order, about the same centre."""
    order = np.argsort(heights, kind="stable")
    steps = gap * np.arange(heights.size)
    moved = np.empty_like(heights)
    moved[order] = np.maximum.accumulate(heights[order] - steps) + steps
    centred: FloatArray = moved - (moved.mean() - heights.mean())
    return centred


def _shade(index: int, count: int) -> tuple[float, float, float]:
    """Returns the color of a line in a light-to-dark ramp."""
    mix = 1.0 if count == 1 else index / (count - 1)
    red, green, blue = ((1.0 - mix) * _FROM + mix * _TO).tolist()
    return red, green, blue


def _save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Writes SVG and PNG without a date, so that the same table gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {"Software": None}}
    paths = []
    for kind, facts in metadata.items():
        path = folder / f"{stem}.{kind}"
        figure.savefig(path, dpi=160, metadata=facts)
        paths.append(path)
    return paths
