"""`make test-losslessness` and its long form name files that exist, and hold what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"test-losslessness": "not slow", "test-losslessness-long": "slow or examples"}


@pytest.fixture(scope="module")
def makefile() -> str:
    path = ROOT / "Makefile"
    if not path.is_file():
        pytest.skip("no Makefile in this tree")
    return path.read_text().replace("\\\n", " ")


def test_every_listed_path_exists(makefile: str) -> None:
    found = re.search(r"^LOSSLESSNESS := (.+)$", makefile, re.MULTILINE)
    assert found is not None
    paths = found[1].split()
    assert len(set(paths)) == len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), f"{path}, listed in the Makefile, does not exist"
        assert path.endswith(".py") or list((ROOT / path).glob("test_*.py")), path


@pytest.mark.parametrize("target", TARGETS)
def test_target_runs_the_list(makefile: str, target: str) -> None:
    found = re.search(rf"^{target}: \$\(VENV\)[^\n]*\n\t([^\n]+)$", makefile, re.MULTILINE)
    assert found is not None
    assert f"-m '{TARGETS[target]}'" in found[1]
    assert found[1].endswith(" $(LOSSLESSNESS)")
