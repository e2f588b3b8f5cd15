"""The reliability plot of a calibration, as SVG and PNG. Matplotlib is imported only to draw."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.atomic import make_folder, write_bytes
from hybridspec.artifacts.tables import FloatArray
from hybridspec.calibrate.hazard import BETA_METHOD, RAW_METHOD
from hybridspec.calibrate.reliability import ALL_POSITIONS
from hybridspec.errors import NotEnoughData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#30343b"
_MUTED = "#8a919c"
_GRID = "#e6e8ec"
_BEFORE, _AFTER = "#c8553d", "#12558a"
_FAINT_POSITIONS = (0, 1, 2, 3)
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
    "grid.color": _GRID,
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    # The same tables give the same bytes.
    "svg.hashsalt": "hybridspec",
}


def plot_reliability(
    reliability: pa.Table,
    metrics: pa.Table,
    folder: Path,
    *,
    model: str = BETA_METHOD,
    title: str = "",
    split: str = "test",
) -> list[Path]:
    """Draw predicted against observed acceptance, before and after calibration, side by side.

    The thick line pools all draft positions, a dot a bin of equal mass; faint lines are the first
    four positions. Shaded is the distance to the diagonal, whose mean is the calibration error.

    Args:
        reliability: of a `CalibrationResult` or a bundle.
        metrics: the same.
        folder: where `reliability.svg` and `reliability.png` are written.
        model: of the right panel, as the tables name it.
        title: pair and sampling, drawn above the panels.
        split: whose rows are drawn.

    Returns:
        the paths written.

    Raises:
        NotEnoughData: no rows of that split.
        EnvironmentMissing: the folder cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        (RAW_METHOD, "before: the drafter's top-1 probability", _BEFORE),
        (model, "after: the fitted hazard", _AFTER),
    )
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (shown, heading, colour) in zip(axes, panels, strict=True):
            _draw_panel(axis, reliability, split=split, model=shown, colour=colour)
            axis.set_title(heading, loc="left", fontsize=9.5, fontweight="bold")
            axis.text(
                0.98,
                0.03,
                _caption(metrics, split=split, model=shown),
                transform=axis.transAxes,
                ha="right",
                va="bottom",
                fontsize=8,
                linespacing=1.5,
            )
        axes[0].set_ylabel("observed: share of drafts accepted")
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        return _save(figure, folder)


def _draw_panel(axis: Axes, reliability: pa.Table, *, split: str, model: str, colour: str) -> None:
    axis.plot([0, 1], [0, 1], color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for position in _FAINT_POSITIONS:
        x, y, _ = _curve(reliability, split, model, position)
        axis.plot(x, y, color=colour, linewidth=0.8, alpha=0.25)
    x, y, n = _curve(reliability, split, model, ALL_POSITIONS)
    if x.size == 0:
        raise NotEnoughData(
            f"there are no {split} rounds of {model} to draw; a reliability plot needs held-out "
            "rounds: record prompts of that split"
        )
    axis.fill_between(x, x, y, color=colour, alpha=0.15, linewidth=0)
    error = 1.96 * np.sqrt(y * (1 - y) / n)
    axis.errorbar(x, y, yerr=error, color=colour, linewidth=1.8, elinewidth=0.8, zorder=3)
    axis.scatter(x, y, s=16, color=colour, zorder=4)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.set_aspect("equal")
    axis.set_xlabel("predicted probability of acceptance")


def _curve(
    reliability: pa.Table, split: str, model: str, position: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean predicted, mean observed and rows of each bin."""
    rows = [
        (row["mean_predicted"], row["mean_observed"], row["n"])
        for row in reliability.to_pylist()
        if (row["split"], row["model"], row["position"]) == (split, model, position)
    ]
    x, y, n = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return x, y, n


def _caption(metrics: pa.Table, *, split: str, model: str) -> str:
    """The panel's scores with their intervals."""
    names = {"hazard_ece": "ECE", "hazard_log_loss": "log loss", "hazard_auc": "AUC"}
    lines = []
    rows = 0
    for row in metrics.to_pylist():
        found = (row["split"], row["category"], row["model"]) == (split, "all", model)
        if found and row["metric"] in names:
            label = names[row["metric"]]
            lines.append(f"{label} {row['value']:.3f}  [{row['lo']:.3f}, {row['hi']:.3f}]")
            rows = row["n"]
    return "\n".join([*lines, f"{rows:,} held-out drafts"]) if lines else ""


def _save(figure: Figure, folder: Path) -> list[Path]:
    make_folder(Path(folder))
    paths = []
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
        path = Path(folder) / f"reliability.{kind}"
        write_bytes(path, buffer.getvalue())
        paths.append(path)
    return paths
