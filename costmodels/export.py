"""Sample tables in the form that a bundle keeps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.schemas import EXPERTS_SCHEMA, SAMPLES_SCHEMA, table_from
from hybridspec.costmodels.expert import ExpertSlope, fit_expert_slope
from hybridspec.errors import NotEnoughData

_PARTS = ("total", "draft", "verify", "commit")


def bundle_samples(samples: pa.Table) -> pa.Table:
    """Returns step samples as one row a part: `total`, `draft`, `verify` and `commit`.

    Parts that did not run (0 us: no draft pass) or were not timed apart have no row.

    Args:
        samples: a table of `STEP_SAMPLES_SCHEMA`.
    """
    pieces: list[dict[str, np.ndarray]] = []
    for part in _PARTS:
        column = samples.column(f"{part}_us").to_numpy(zero_copy_only=False)
        latency_us = column.astype(np.float64)
        known = np.isfinite(latency_us) & (latency_us > 0)
        columns = {
            name: samples.column(source).to_numpy()[known]
            for name, source in (
                ("batch_size", "batch"),
                ("context_tokens", "context_tokens"),
                ("verify_length", "verify_length"),
                ("repeat", "repeat"),
            )
        }
        pieces.append(
            columns
            | {
                "part": np.full(int(known.sum()), part, dtype=object),
                "latency_us": latency_us[known],
            }
        )
    joined = {name: np.concatenate([p[name] for p in pieces]) for name in SAMPLES_SCHEMA.names}
    return table_from(joined, SAMPLES_SCHEMA)


def bundle_experts(samples: pa.Table, *, num_layers: int) -> pa.Table:
    """Returns forced-route samples with distinct experts summed over all layers.

    Args:
        samples: a table of `EXPERT_SAMPLES_SCHEMA`; an empty one for a dense target.
        num_layers: layers with routed experts.
    """
    columns = {
        "batch_size": samples.column("batch").to_numpy(),
        "verify_length": samples.column("verify_length").to_numpy(),
        "distinct_experts": samples.column("distinct_experts").to_numpy() * num_layers,
        "repeat": samples.column("repeat").to_numpy(),
        "latency_us": samples.column("total_us").to_numpy(),
    }
    return table_from(columns, EXPERTS_SCHEMA)


def stored_expert_slope(experts: pa.Table) -> ExpertSlope | None:
    """Fits the slope again on what a bundle kept, for its interval, intercepts and residuals.

    Args:
        experts: a table of `EXPERTS_SCHEMA`.

    Returns:
        The slope in us a distinct expert of one layer, counted over all layers as one (so
        `num_layers` is 1); None where nothing was measured or too little.
    """
    if experts.num_rows == 0:
        return None
    renamed = experts.rename_columns({"batch_size": "batch", "latency_us": "total_us"})
    try:
        return fit_expert_slope(renamed, num_layers=1)
    except NotEnoughData:
        return None
