from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    from bundle_kit import make_bundle

    return make_bundle(tmp_path / "bundle")
