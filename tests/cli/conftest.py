"""A small bundle of the embedded pair, made once by the commands themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from command_kit import Made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from command_kit import CALIBRATE, Made, hybridspec, profile

    folder = tmp_path_factory.mktemp("made")
    bundle = folder / "bundle"
    calibrated = hybridspec("calibrate", "--out", bundle, *CALIBRATE, "--json")
    assert calibrated.returncode == 0, calibrated.stderr
    profiled = profile("--out", bundle, "--json")
    assert profiled.returncode == 0, profiled.stderr
    return Made(bundle, folder / "bundle.trace", calibrated, profiled)
