from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def random_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small target of three GDN layers and one of attention, and its drafter."""
    from hybridspec.reference.random_pair import PairShape, write_random_pair

    return write_random_pair(tmp_path_factory.mktemp("fuzzed"), PairShape(), seed=1)
