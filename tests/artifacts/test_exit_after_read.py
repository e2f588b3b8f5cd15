"""A command that reads Parquet and has torch loaded must still exit with its own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from hybridspec.artifacts.atomic import write_parquet

PROGRAM = """
import sys, torch
from pathlib import Path
from hybridspec.artifacts.store import decode_table
for _ in range(2):
    decode_table(Path(sys.argv[1]).read_bytes(), path="t")
"""


def test_process_ends_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(path, pa.table({f"c{i}": list(range(200)) for i in range(16)}))
    # A threaded read aborts in about half of the exits, so four in a row seldom pass by chance.
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
