from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from hybridspec.certify.engine_arms import EngineArms


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from certify_kit import made_up_bundle

    return made_up_bundle(tmp_path_factory.mktemp("certify") / "bundle")


@pytest.fixture
def arms() -> EngineArms:
    from certify_kit import embedded_arms

    return embedded_arms()
