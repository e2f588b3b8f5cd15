"""The captured round's own kernels compile for sm_90 without a GPU and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# In a process of its own: under the interpreter there is nothing to compile.
PROGRAM = """
import json
from hybridspec.kernels.compilation import compile_for
from hybridspec.reference.gpu.compiling import compile_cases
for case in compile_cases():
    _, found = compile_for(case, 90)
    print(json.dumps({"case": case.name, **found.__dict__}), flush=True)
"""


def test_compiles_without_spills() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 20
    spilled = [row for row in rows if row["spill_store_bytes"] or row["spill_load_bytes"]]
    assert not spilled, spilled
    # Shared memory of a multiprocessor that one block may have.
    assert max(row["shared_bytes"] for row in rows) <= 227 * 1024
