from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from robustness_kit import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    from robustness_kit import serving

    with serving() as running:
        yield running
