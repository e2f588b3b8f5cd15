"""Modules of the client in SGLang on the path, and an answer of it."""

# Modules of benchmarks are found by the path that this adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no benchmarks in this tree (an sdist)", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from serving.load import Stream  # noqa: E402

TARGET = ROOT / "hybridspec" / "demo" / "pair" / "target"


def stream(text: str, tokens: int = 9, prompt: int = 7) -> Stream:
    """An answer that came in one chunk."""
    return Stream(prompt, "code", 0.0, [1.0], [tokens], [len(text)], text)
