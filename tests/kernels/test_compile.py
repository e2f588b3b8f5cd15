"""Every shipped kernel compiles for sm_80 and sm_90 without a GPU, and spills nothing.

In a process of its own, one for all modules: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PROGRAM = """
import importlib, json, sys, traceback
from hybridspec.kernels.compilation import compile_for
for line in sys.stdin:
    name, most = json.loads(line)
    rows, failure = [], None
    try:
        cases = list(importlib.import_module(name).compile_cases())
        pairs = [(case, architecture) for case in cases for architecture in case.architectures]
        if most is not None:
            pairs = [(case, max(case.architectures)) for case in cases]
            pairs = pairs[:: -(-len(pairs) // most)]
        for case, architecture in pairs:
            _, found = compile_for(case, architecture)
            rows.append({"case": case.name, "sm": architecture, **found.__dict__})
    except Exception:
        failure = traceback.format_exc()
    print(json.dumps({"rows": rows, "failure": failure}), flush=True)
"""


def with_cases() -> list[str]:
    """Modules that define `compile_cases`."""
    found = []
    for family in sorted(path for path in KERNELS.iterdir() if path.is_dir()):
        for module in pkgutil.iter_modules([str(family)]):
            if "def compile_cases(" in (family / f"{module.name}.py").read_text():
                found.append(f"hybridspec.kernels.{family.name}.{module.name}")
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[subprocess.Popen[str]]:
    """Takes the name of a module and how many cases at most, answers with rows; JSON by lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("most", [3, pytest.param(None, marks=pytest.mark.slow, id="all")])
@pytest.mark.parametrize("module", with_cases())
def test_compiles_without_spills(
    module: str, most: int | None, compiler: subprocess.Popen[str]
) -> None:
    """By default some cases of each module, for the newest architecture; all of them take long."""
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(json.dumps([module, most]), file=compiler.stdin, flush=True)
    said = compiler.stdout.readline()
    assert said, f"the compiling process ended with {compiler.wait(60)} at {module}"
    answer = json.loads(said)
    assert answer["failure"] is None, answer["failure"]
    rows = answer["rows"]
    assert rows, f"{module} lists no case"
    spilled = [row for row in rows if row["spill_store_bytes"] or row["spill_load_bytes"]]
    assert not spilled, spilled
