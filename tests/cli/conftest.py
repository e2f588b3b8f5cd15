"""A small bundle of the embedded pair, made once by the commands themselves."""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from command_kit import Made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One for all processes of a run: the first that asks makes it, the others wait for it."""
    from command_kit import make

    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make(tmp_path_factory.mktemp("made"))
    folder = tmp_path_factory.getbasetemp().parent / "made"
    folder.mkdir(exist_ok=True)
    told = folder / "told.pickle"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            told.write_bytes(pickle.dumps(make(folder)))
    return pickle.loads(told.read_bytes())
