"""A bundle as the two files that SGLang's DSpark planner reads.

`dspark_sps.json` holds verification steps a second by tokens in the batch (SGLang 0.5.16,
`SpsCostTable`), or step seconds as a sum of a part of the requests and a part of the tokens
(`SpsAdditiveCostTable`); `dspark_sts.json` holds one temperature a draft position
(`DSparkStsCalibration`). Neither has room for an identity, so their reader cannot tell whether they
belong to the machine: keep them beside the bundle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.optimize import lsq_linear, minimize_scalar

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS, FloatArray, StepCostTable
from hybridspec.errors import BundleError, NotEnoughData

SPS_NAME, STS_NAME = "dspark_sps.json", "dspark_sts.json"
RAW_MODEL = "raw-top1"
MIN_ROWS = 200
_LENGTHS = np.arange(1, BLOCK_SIZE + 1)
_EDGE = 1e-6


@dataclass(frozen=True)
class SpsExport:
    """`dspark_sps.json` and how well it says what was measured.

    Attributes:
        content: the JSON object.
        context_tokens: the context that the steps were measured at; the format has no axis for it.
        largest_error: largest share by which a step's time differs from the measured one.
    """

    content: dict[str, Any]
    context_tokens: int
    largest_error: float


def sps_export(step: StepCostTable, *, context_tokens: int | None = None) -> SpsExport:
    """Returns step costs in SGLang's form.

    One batch size gives the table of probes, which is exact. Several give the additive form, fitted
    to relative errors with costs that do not fall: a sum cannot say all that was measured, so the
    largest error is part of the result.

    Args:
        step: measured or transferred costs; rounds of length 0 have no place in the format.
        context_tokens: one of the table's contexts; None takes the middle one.

    Raises:
        BundleError: a context that was not measured.
    """
    grid = step.context_tokens.tolist()
    context = grid[len(grid) // 2] if context_tokens is None else context_tokens
    if context not in grid:
        raise BundleError(f"context {context} was not measured; the table has {grid}: choose one")
    seconds = step.latency_us[:, grid.index(context), 1:] / 1e6
    batches = step.batch_sizes
    if batches.size == 1:
        tokens = (batches[0] * _LENGTHS).tolist()
        content = {
            "sample_batch_tokens": tokens,
            "sample_steps_per_sec": (1.0 / seconds[0]).tolist(),
            "max_batch_tokens": tokens[-1],
        }
        return SpsExport(content, context, 0.0)
    tokens_BL = batches[:, None] * _LENGTHS
    probes = np.unique(tokens_BL)
    bias, alpha, theta = _additive(seconds, np.searchsorted(probes, tokens_BL), probes.size)
    fitted = bias + alpha[:, None] + theta[np.searchsorted(probes, tokens_BL)]
    content = {
        "bias_seconds": bias,
        "bs_probes": batches.tolist(),
        "alpha_seconds": alpha.tolist(),
        "m_probes": probes.tolist(),
        "theta_seconds": theta.tolist(),
    }
    return SpsExport(content, context, float(np.abs(fitted / seconds - 1.0).max()))


def _additive(
    seconds_BL: FloatArray, probe_BL: np.ndarray, num_probes: int
) -> tuple[float, FloatArray, FloatArray]:
    """Least squares on relative errors: bias + alpha(batch) + theta(tokens), all rises >= 0.

    Unknown are the bias, the rise of alpha from each batch to the next and that of theta from each
    probe to the next; alpha and theta start at 0, as a constant in them belongs to the bias.
    """
    num_batches = seconds_BL.shape[0]
    rows = []
    for batch in range(num_batches):
        for probe in probe_BL[batch].tolist():
            row = np.zeros(1 + (num_batches - 1) + (num_probes - 1))
            row[0] = 1.0
            row[1 : 1 + batch] = 1.0
            row[num_batches : num_batches + probe] = 1.0
            rows.append(row)
    scale = 1.0 / seconds_BL.ravel()
    smallest = np.zeros(rows[0].size)
    smallest[0] = 1e-3 * float(seconds_BL.min())  # the reader asks for a bias above 0
    solved = lsq_linear(
        np.asarray(rows) * scale[:, None], np.ones(scale.size), bounds=(smallest, np.inf)
    ).x
    alpha = np.concatenate([[0.0], np.cumsum(solved[1:num_batches])])
    theta = np.concatenate([[0.0], np.cumsum(solved[num_batches:])])
    return float(solved[0]), alpha, theta


def sts_export(reliability: pa.Table, *, dataset: str) -> dict[str, Any]:
    """Returns temperatures of the raw top-1 probability in SGLang's form.

    Each is fitted by log loss on the reliability bins of the calibration split; ECE is that of the
    held-out bins, before and after. A position with fewer than 200 rows takes the temperature of
    all positions together.

    Args:
        reliability: a checked `RELIABILITY_SCHEMA` table with the model `raw-top1`.
        dataset: a name for what the bins come from.

    Raises:
        NotEnoughData: fewer than 200 rows in all.
    """
    fit = _bins(reliability, "calibration")
    held_out = _bins(reliability, "test")
    everything = fit.get(-1)
    rows = 0 if everything is None else int(everything[2].sum())
    if everything is None or rows < MIN_ROWS:
        raise NotEnoughData(
            f"{rows} calibration rows of {RAW_MODEL} in the reliability table; temperatures need "
            f"at least {MIN_ROWS}: calibrate on more prompts"
        )
    common = _temperature(*everything)
    temperatures, before, after = [], [], []
    for position in range(NUM_DRAFTS):
        bins = fit.get(position)
        enough = bins is not None and float(bins[2].sum()) >= MIN_ROWS
        temperature = _temperature(*bins) if bins is not None and enough else common
        temperatures.append(temperature)
        predicted, observed, n = held_out.get(position, fit.get(position, everything))
        before.append(_ece(predicted, observed, n))
        after.append(_ece(_scaled(predicted, temperature), observed, n))
    return {
        "temperatures": temperatures,
        "dataset": dataset,
        "num_samples": rows,
        "ece_before": before,
        "ece_after": after,
    }


def _bins(table: pa.Table, split: str) -> dict[int, tuple[FloatArray, FloatArray, FloatArray]]:
    """Mean prediction, mean outcome and rows of the raw model's bins, by position."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for row in table.to_pylist():
        if row["split"] == split and row["model"] == RAW_MODEL and row["n"] > 0:
            cells = found.setdefault(row["position"], [])
            cells.append((row["mean_predicted"], row["mean_observed"], row["n"]))
    arrays = {}
    for position, cells in found.items():
        columns = np.asarray(cells, dtype=np.float64).T
        arrays[position] = (columns[0], columns[1], columns[2])
    return arrays


def _scaled(predicted: FloatArray, temperature: float) -> FloatArray:
    inside = np.clip(predicted, _EDGE, 1.0 - _EDGE)
    logit = np.log(inside) - np.log1p(-inside)
    scaled: FloatArray = 1.0 / (1.0 + np.exp(-logit / temperature))
    return scaled


def _temperature(predicted: FloatArray, observed: FloatArray, n: FloatArray) -> float:
    def loss(log_temperature: float) -> float:
        scaled = np.clip(_scaled(predicted, float(np.exp(log_temperature))), _EDGE, 1.0 - _EDGE)
        return -float(n @ (observed * np.log(scaled) + (1.0 - observed) * np.log1p(-scaled)))

    return float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))


def _ece(predicted: FloatArray, observed: FloatArray, n: FloatArray) -> float:
    return float(n @ np.abs(predicted - observed) / n.sum())
