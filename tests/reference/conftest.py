from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pairs of random weights are written, once each."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a drafter of random weights that a test may damage."""
    from hybridspec.reference.random_pair import PairShape, write_random_pair

    return write_random_pair(tmp_path, PairShape(), seed=1)
