"""Every shipped kernel compiles for sm_80 and sm_90 without a GPU, and spills nothing.

In a process of its own: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PROGRAM = """
import importlib, json, sys
from hybridspec.kernels.compilation import compile_for
module = importlib.import_module(sys.argv[1])
for case in module.compile_cases():
    for architecture in case.architectures:
        _, found = compile_for(case, architecture)
        print(json.dumps({"case": case.name, "sm": architecture, **found.__dict__}), flush=True)
"""


def with_cases() -> list[str]:
    """Modules that define `compile_cases`."""
    found = []
    for family in sorted(path for path in KERNELS.iterdir() if path.is_dir()):
        for module in pkgutil.iter_modules([str(family)]):
            if "def compile_cases(" in (family / f"{module.name}.py").read_text():
                found.append(f"hybridspec.kernels.{family.name}.{module.name}")
    return found


@pytest.mark.parametrize("module", with_cases())
def test_compiles_without_spills(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, f"{module} lists no case"
    spilled = [row for row in rows if row["spill_store_bytes"] or row["spill_load_bytes"]]
    assert not spilled, spilled
