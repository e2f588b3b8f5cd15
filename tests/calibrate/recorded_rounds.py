"""Recorded rounds of trained pairs, if they lie beside the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_rounds import make_identity

from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.calibrate.loops import round_loop_periods
from hybridspec.calibrate.rounds import check_trace, with_identity

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
# The recordings do not keep prompt lengths; their prompts are about this long.
PROMPT_TOKENS = 160


def convert_recording(path: Path) -> pa.Table:
    """A recording in the older column names as a trace, rounds sorted by prompt."""
    old = pq.read_table(path).sort_by([("seq", "ascending"), ("round", "ascending")])
    metadata = {key.decode(): value.decode() for key, value in old.schema.metadata.items()}
    draft, target, p1, p2, entropy, target_p1 = (
        np.asarray(old.column(name).combine_chunks().flatten()).reshape(old.num_rows, -1)
        for name in ("draft", "target", "p1", "p2", "ent", "tp1")
    )
    accepted, anchor = old.column("n_acc").to_numpy(), old.column("anchor").to_numpy()
    prompt = old.column("seq").to_numpy()
    loop_period = np.zeros(old.num_rows, dtype=np.int64)
    for rows in np.split(np.arange(old.num_rows), np.flatnonzero(np.diff(prompt)) + 1):
        tokens, starts = [int(anchor[rows[0]])], []
        for row in rows:
            starts.append(len(tokens))
            tokens += [*draft[row, : accepted[row]].tolist(), int(target[row, accepted[row]])]
        stops = [*starts[1:], len(tokens)]
        loop_period[rows] = round_loop_periods(tokens, starts=starts, stops=stops)
    generated = old.column("gen_pos").to_numpy()
    columns = {
        "prompt_id": [str(value) for value in prompt],
        "category": old.column("cat").to_pylist(),
        "split": ["test" if s == "test" else "calibration" for s in old["split"].to_pylist()],
        "round": old.column("round").to_numpy(),
        "generated_tokens": generated,
        "context_tokens": generated + PROMPT_TOKENS,
        "loop_period": loop_period,
        "accepted": accepted,
        "anchor": anchor,
        "draft_tokens": draft,
        "target_tokens": target,
        "p1": p1,
        "p2": p2,
        "entropy_nats": entropy,
        "target_p1": target_p1,
        "routes": old.column("routes").to_pylist(),
    }
    sizes = {name: int(metadata[name]) for name in ("layers", "topk", "experts")}
    table = with_identity(table_from(columns, TRACE_SCHEMA), make_identity(**sizes))
    return check_trace(table, path=path)


def recording(name: str) -> pa.Table:
    """The trace of a pair; skips the test where it is not there."""
    path = TRACES / f"{name}-rounds.parquet"
    if not path.exists():
        pytest.skip(f"recorded rounds of the {name} pair are not beside the repository")
    return convert_recording(path)
