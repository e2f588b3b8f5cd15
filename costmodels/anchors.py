"""Cells of a cost table that were measured on the machine that costs are transferred to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from hybridspec.artifacts import codec
from hybridspec.artifacts.atomic import write_parquet
from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.digest import canonical_json
from hybridspec.artifacts.identity import CostIdentity, identity_fields
from hybridspec.artifacts.schemas import ANCHORS_SCHEMA, check_table, table_from
from hybridspec.artifacts.store import decode_table, read_file
from hybridspec.artifacts.tables import FloatArray, IntArray, StepCostTable
from hybridspec.costmodels.expert import ExpertSlope
from hybridspec.costmodels.measure import MIN_SWEEPS
from hybridspec.errors import BundleError, NotEnoughData

IDENTITY_KEY = b"cost_identity"
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Anchors:
    """Measured cells and the machine that they were measured on.

    Attributes:
        identity: of the machine.
        batch_sizes, context_tokens, lengths: int64 [n], the cells; each occurs once.
        latency_us, latency_p10_us, latency_p90_us: float64 [n], the whole round.
        draft_us: float64 [n], the draft pass at the cell's batch and context.
        expert_slope_us, expert_slope_r2: as in `StepCostTable`; 0 where it was not measured.
    """

    identity: CostIdentity
    batch_sizes: IntArray
    context_tokens: IntArray
    lengths: IntArray
    latency_us: FloatArray
    latency_p10_us: FloatArray
    latency_p90_us: FloatArray
    draft_us: FloatArray
    expert_slope_us: float = 0.0
    expert_slope_r2: float = 0.0

    def __post_init__(self) -> None:
        cells = np.stack([self.batch_sizes, self.context_tokens, self.lengths], axis=1)
        if len(cells) == 0:
            raise NotEnoughData("there are no anchors: measure some cells of the table")
        found, counts = np.unique(cells, axis=0, return_counts=True)
        if np.any(counts > 1):
            twice = found[int(counts.argmax())].tolist()
            raise BundleError(
                f"anchor batch {twice[0]}, context {twice[1]}, length {twice[2]} occurs more than "
                "once: keep its median"
            )
        spread = (self.latency_p10_us, self.latency_us, self.latency_p90_us)
        if np.any(spread[0] <= 0.0) or np.any(self.draft_us <= 0.0):
            raise BundleError("an anchor has a latency that is not above 0 us: measure again")
        if np.any(spread[0] > spread[1]) or np.any(spread[1] > spread[2]):
            raise BundleError("an anchor's p10 or p90 is on the wrong side of its median")

    def __len__(self) -> int:
        return int(self.lengths.size)

    def table(self) -> pa.Table:
        """As a table of `ANCHORS_SCHEMA`."""
        columns = {
            "batch_size": self.batch_sizes,
            "context_tokens": self.context_tokens,
            "verify_length": self.lengths,
            "latency_us": self.latency_us,
            "latency_p10_us": self.latency_p10_us,
            "latency_p90_us": self.latency_p90_us,
            "draft_us": self.draft_us,
        }
        return table_from(columns, ANCHORS_SCHEMA)


@dataclass(frozen=True)
class AnchorCurve:
    """Anchors of one batch size and context by length, 0 first."""

    lengths: IntArray
    latency_us: FloatArray
    draft_us: float


def cell(anchors: Anchors, *, batch: int, context_tokens: int) -> AnchorCurve:
    """Returns the anchors of one batch size and context.

    Raises:
        NotEnoughData: none there, or none of length 0.
        BundleError: draft passes that differ within the curve; a latency that falls by more than
            its spread while rows are added.
    """
    here = (anchors.batch_sizes == batch) & (anchors.context_tokens == context_tokens)
    rows = np.flatnonzero(here)[np.argsort(anchors.lengths[here], kind="stable")]
    where = f"batch {batch}, context {context_tokens}"
    if rows.size == 0:
        raise NotEnoughData(
            f"no anchor at {where}; every anchored batch size needs every anchored context: "
            "measure it"
        )
    lengths = anchors.lengths[rows]
    if lengths[0] != 0:
        raise NotEnoughData(
            f"no anchor of length 0 at {where}; plain decoding runs another program, so its cost "
            "cannot be told from the others: measure it"
        )
    draft_us = anchors.draft_us[rows]
    if np.ptp(draft_us) > 0.0:
        raise BundleError(
            f"anchors at {where} have draft passes of {draft_us.min():g} to {draft_us.max():g} us; "
            "the draft pass does not depend on the length: give its median"
        )
    falls = np.flatnonzero(anchors.latency_p90_us[rows[2:]] < anchors.latency_p10_us[rows[1:-1]])
    if falls.size:
        at = int(falls[0]) + 1
        raise BundleError(
            f"anchors at {where}: length {lengths[at + 1]} is faster than {lengths[at]} by more "
            "than their spread; costs must not fall when rows are added: measure again"
        )
    return AnchorCurve(lengths, anchors.latency_us[rows], float(draft_us[0]))


def anchors_of_table(identity: CostIdentity, table: StepCostTable) -> Anchors:
    """Returns every cell of a measured table as an anchor."""
    index = np.indices(table.latency_us.shape).reshape(3, -1)
    return Anchors(
        identity=identity,
        batch_sizes=table.batch_sizes[index[0]],
        context_tokens=table.context_tokens[index[1]],
        lengths=index[2].astype(np.int64),
        latency_us=table.latency_us.ravel(),
        latency_p10_us=table.latency_p10_us.ravel(),
        latency_p90_us=table.latency_p90_us.ravel(),
        draft_us=table.draft_us[index[0], index[1]],
        expert_slope_us=table.expert_slope_us,
        expert_slope_r2=table.expert_slope_r2,
    )


def anchors_of_samples(
    identity: CostIdentity, samples: pa.Table, *, expert: ExpertSlope | None = None
) -> Anchors:
    """Returns medians and quantiles of measured rounds as anchors.

    Args:
        identity: of the machine.
        samples: a table of `STEP_SAMPLES_SCHEMA`; each batch and context with length 0 and at
            least one drafted length.
        expert: the slope to keep; None, or one that is not usable, keeps 0.

    Raises:
        NotEnoughData: no samples, fewer than 5 of a cell, or a batch and context without a draft.
    """
    names = ("batch", "context_tokens", "verify_length")
    cells = np.stack([samples.column(name).to_numpy() for name in names], axis=1)
    keys, cell_of = np.unique(cells.astype(np.int64), axis=0, return_inverse=True)
    cell_of = cell_of.ravel()
    total_us = samples.column("total_us").to_numpy().astype(np.float64)
    draft_us = samples.column("draft_us").to_numpy().astype(np.float64)
    counts = np.bincount(cell_of, minlength=len(keys))
    if len(keys) == 0 or counts.min() < MIN_SWEEPS:
        raise NotEnoughData(
            f"a cell has {int(counts.min()) if len(keys) else 0} samples; anchors need at least "
            f"{MIN_SWEEPS}: measure more repeats"
        )
    quantiles = np.stack(
        [np.quantile(total_us[cell_of == i], [0.1, 0.5, 0.9]) for i in range(len(keys))], axis=1
    )
    drafts = np.empty(len(keys))
    for i, (batch, context, _) in enumerate(keys.tolist()):
        drafted = (cells[:, 0] == batch) & (cells[:, 1] == context) & (cells[:, 2] > 0)
        if not drafted.any():
            raise NotEnoughData(
                f"batch {batch}, context {context} has no drafted round: measure one length >= 1"
            )
        drafts[i] = np.median(draft_us[drafted])
    usable = expert is not None and expert.usable
    return Anchors(
        identity=identity,
        batch_sizes=keys[:, 0],
        context_tokens=keys[:, 1],
        lengths=keys[:, 2],
        latency_us=quantiles[1],
        latency_p10_us=quantiles[0],
        latency_p90_us=quantiles[2],
        draft_us=drafts,
        expert_slope_us=expert.slope_us if expert is not None and usable else 0.0,
        expert_slope_r2=expert.r2 if expert is not None else 0.0,
    )


def read_anchors(path: Path) -> Anchors:
    """Reads anchors from a bundle with a measured cost part, or from a Parquet file.

    The file is a table of `ANCHORS_SCHEMA` whose schema metadata names the machine: the key
    `cost_identity` holds a `CostIdentity` as JSON.

    Raises:
        BundleError: no cost part or a transferred one; a file that is damaged, of another schema,
            with values that cannot be, or that does not name its machine.
    """
    if path.is_dir():
        cost = load_bundle(path).cost
        if cost is None:
            raise BundleError(
                f"{path} has no cost part to take anchors from: run `hybridspec profile-latency`"
            )
        if cost.transfer is not None:
            raise BundleError(
                f"{path} holds transferred costs; anchors must be measured: give the profile of "
                "this machine"
            )
        return anchors_of_table(cost.identity, cost.step)
    raw = decode_table(read_file(path, max_bytes=_MAX_FILE_BYTES), path=path)
    table = codec.check_reports(check_table(raw, ANCHORS_SCHEMA, path=path), path=path)
    values: dict[str, Any] = {name: table.column(name).to_numpy() for name in table.column_names}
    return Anchors(
        identity=_identity(raw, path),
        batch_sizes=values["batch_size"].astype(np.int64),
        context_tokens=values["context_tokens"].astype(np.int64),
        lengths=values["verify_length"].astype(np.int64),
        latency_us=values["latency_us"],
        latency_p10_us=values["latency_p10_us"],
        latency_p90_us=values["latency_p90_us"],
        draft_us=values["draft_us"],
    )


def write_anchors(path: Path, anchors: Anchors) -> None:
    """Writes anchors with their machine as a file that `read_anchors` reads; the slope stays out.

    Raises:
        EnvironmentMissing: full disk or a folder that cannot be written.
    """
    table = anchors.table()
    metadata = {
        **table.schema.metadata,
        IDENTITY_KEY: canonical_json(identity_fields(anchors.identity)),
    }
    write_parquet(path, table.replace_schema_metadata(metadata))


def _identity(table: pa.Table, path: Path) -> CostIdentity:
    text = (table.schema.metadata or {}).get(IDENTITY_KEY)
    if text is None:
        raise BundleError(
            f"{path} does not name the machine of its anchors (schema metadata "
            f"{IDENTITY_KEY.decode()!r}); costs without one are refused: write it with the anchors"
        )
    try:
        json.loads(text)
        return TypeAdapter(CostIdentity).validate_json(text, strict=True)
    except (ValueError, ValidationError, RecursionError) as error:
        detail = " ".join(str(error).split())[:160]
        raise BundleError(f"{path}: its {IDENTITY_KEY.decode()} is damaged ({detail})") from error
