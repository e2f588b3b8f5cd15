"""Recordings in the older column names (`seq`, `cat`, `n_acc`, ...) as checked trace tables.

The one place that reads them. They keep neither prompt lengths nor the models' digests, so their
context is counted from the first generated token and their identity says `unrecorded`. Repetition
loops are found again by the rule of `loops`, whatever the recording marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.calibrate.features import list_column
from hybridspec.calibrate.loops import text_loop_periods
from hybridspec.calibrate.rounds import TraceIdentity, check_trace, with_identity
from hybridspec.errors import BundleError

UNRECORDED = "unrecorded"
_ANY_TOKEN = 2**31 - 1
_COLUMNS = {
    "seq": "prompt_id",
    "cat": "category",
    "split": "split",
    "round": "round",
    "gen_pos": "generated_tokens",
    "n_acc": "accepted",
    "anchor": "anchor",
    "draft": "draft_tokens",
    "target": "target_tokens",
    "p1": "p1",
    "p2": "p2",
    "ent": "entropy_nats",
    "tp1": "target_p1",
    "routes": "routes",
}
_WIDTHS = {"draft": NUM_DRAFTS, "p1": NUM_DRAFTS, "p2": NUM_DRAFTS, "ent": NUM_DRAFTS}
_WIDTHS |= {"target": BLOCK_SIZE, "tp1": BLOCK_SIZE}
_SPLITS = {"calib": "calibration", "calibration": "calibration", "test": "test"}


def is_recording(names: Iterable[str]) -> bool:
    """Whether a file with these columns is an older recording."""
    return set(names) >= set(_COLUMNS)


def recording_identity(schema: pa.Schema, *, path: Path) -> TraceIdentity:
    """What a recording says of its models: the sizes of the target.

    Raises:
        BundleError: its metadata do not say them.
    """
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    try:
        layers, topk, experts = (int(metadata[name]) for name in ("layers", "topk", "experts"))
    except (KeyError, ValueError) as error:
        raise BundleError(
            f"{path}: the recording's metadata do not say layers, topk and experts: record it again"
        ) from error
    return TraceIdentity(
        target_digest=UNRECORDED,
        drafter_digest=UNRECORDED,
        layers=layers,
        topk=topk,
        experts=experts,
        vocab_size=_ANY_TOKEN,
        temperature=0.0,
        max_new_tokens=0,
        prompts_digest=UNRECORDED,
    )


def trace_from_recording(table: pa.Table, identity: TraceIdentity, *, path: Path) -> pa.Table:
    """Rows of a recording as a checked trace table; loops are not marked yet (`mark_loops`).

    Raises:
        BundleError: nulls, lists of another length, an unknown split, or impossible values.
    """
    columns: dict[str, object] = {}
    for old, new in _COLUMNS.items():
        column = table.column(old).combine_chunks()
        if column.null_count:
            raise BundleError(f"{path}: column {old!r} has nulls; none is allowed: record it again")
        if old not in _WIDTHS:
            columns[new] = column.to_pylist() if old in ("split", "routes", "cat") else column
            continue
        flat = column.flatten()
        if len(flat) != _WIDTHS[old] * len(column):
            raise BundleError(
                f"{path}: column {old!r} has {len(flat)} values in {len(column)} rounds; each "
                f"needs {_WIDTHS[old]}: record it again"
            )
        columns[new] = flat.to_numpy(zero_copy_only=False).reshape(-1, _WIDTHS[old])
    splits = columns["split"]
    assert isinstance(splits, list)
    unknown = sorted(set(splits) - set(_SPLITS))
    if unknown:
        raise BundleError(
            f"{path}: column 'split' has {unknown[0]!r}; allowed are {', '.join(_SPLITS)}"
        )
    columns["split"] = [_SPLITS[split] for split in splits]
    columns["prompt_id"] = [str(value) for value in table.column("seq").to_pylist()]
    # Counted without the anchor there, with it in a trace.
    position = table.column("gen_pos").to_numpy()
    columns["context_tokens"], columns["generated_tokens"] = position, position + 1
    columns["loop_period"] = np.zeros(table.num_rows, dtype=np.int32)
    return check_trace(with_identity(table_from(columns, TRACE_SCHEMA), identity), path=path)


def mark_loops(trace: pa.Table) -> pa.Table:
    """The trace with the loop period of every round.

    Args:
        trace: whole prompts, rows by prompt, then round.
    """
    encoded = trace.column("prompt_id").combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    prompt = np.asarray(encoded.indices)
    periods = text_loop_periods(
        first_R=np.diff(prompt, prepend=-1) != 0,
        anchor_R=trace.column("anchor").to_numpy(),
        accepted_R=trace.column("accepted").to_numpy(),
        target_tokens_RL=list_column(trace, "target_tokens"),
    )
    place = trace.schema.get_field_index("loop_period")
    return trace.set_column(place, trace.schema.field(place), pa.array(periods, pa.int32()))
