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
from scipy.optimize import lsq_linear

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, StepCostTable, TemperatureTable
from hybridspec.errors import BundleError

SPS_NAME, STS_NAME = "dspark_sps.json", "dspark_sts.json"
_LENGTHS = np.arange(1, BLOCK_SIZE + 1)


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


def sts_export(temperatures: TemperatureTable, *, dataset: str) -> dict[str, Any]:
    """Returns temperatures of the raw top-1 probability in SGLang's form.

    Args:
        temperatures: of the calibration part; those of the model `temperature`.
        dataset: a name for what they were fitted on.
    """
    return {
        "temperatures": temperatures.temperatures_D.tolist(),
        "dataset": dataset,
        "num_samples": temperatures.num_rounds,
        "ece_before": temperatures.ece_before_D.tolist(),
        "ece_after": temperatures.ece_after_D.tolist(),
    }
