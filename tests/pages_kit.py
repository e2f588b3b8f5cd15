"""Result files, and tables of pages, for tests of what pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """Content of a result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def cells(part: str) -> list[list[list[str]]]:
    """Cells of all tables of a part of a page, without their heads."""
    tables: list[list[list[str]]] = []
    for block in part.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            tables.append([[cell.strip() for cell in ln.strip("|").split("|")] for ln in lines[2:]])
    return tables
