"""docs/policies.md says what the result files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hybridspec.costmodels.catalog import POLICY_NAMES

ROOT = Path(__file__).resolve().parents[2]


def test_tables_of_the_page_are_those_of_the_results() -> None:
    script = ROOT / "benchmarks" / "policies_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_policy_is_on_the_page() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in POLICY_NAMES
        if f"`{name}`" not in page and name not in (f"fixed-{length}" for length in range(2, 16))
    ]
    assert not missing
