"""Recorded rounds of trained pairs, which lie beside the repository, as traces."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import EnvironmentMissing

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "traces"


def recorded_trace(name: str) -> pa.Table:
    """The trace of a pair, rounds sorted by prompt.

    Raises:
        EnvironmentMissing: it is not there.
    """
    path = TRACES / f"{name}-rounds.parquet"
    if not path.exists():
        raise EnvironmentMissing(
            f"recorded rounds of the {name} pair are not beside the repository: put "
            f"{path.name} into ../shared/traces"
        )
    stream = open_trace(path)
    return pa.concat_tables(stream.pieces(rows=stream.num_rounds))
