"""Recorded rounds of trained pairs, if they lie beside the repository."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from hybridspec.costmodels.trace_stream import open_trace

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def recording(name: str) -> pa.Table:
    """The trace of a pair; skips the test where it is not there."""
    path = TRACES / f"{name}-rounds.parquet"
    if not path.exists():
        pytest.skip(f"recorded rounds of the {name} pair are not beside the repository")
    stream = open_trace(path)
    return pa.concat_tables(stream.pieces(rows=stream.num_rounds))
