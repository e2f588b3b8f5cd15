"""The Python of SGLang's environment, and our package installed where that Python finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "hybridspec" / "demo" / "pair"
VERSION = "0.5.16"


def checked(command: list[str], **options: Any) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command[:4]}: {done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def sglang_python() -> str:
    path = os.environ.get("HYBRIDSPEC_SGLANG_PYTHON")
    if not path:
        pytest.skip(
            f"HYBRIDSPEC_SGLANG_PYTHON names no Python with SGLang {VERSION}: `make test-sglang`"
        )
    return path


@pytest.fixture(scope="session")
def site(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with our wheel in it, as `pip install --no-deps` installs one."""
    pytest.importorskip("hatchling", reason="the build backend comes with the test extra")
    wheels, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    quiet = ["--quiet", "--no-deps", "--no-index"]
    build = [sys.executable, "-m", "pip", "wheel", *quiet, "--no-build-isolation"]
    checked([*build, "--wheel-dir", str(wheels), str(ROOT)])
    (wheel,) = wheels.glob("*.whl")
    checked([sglang_python, "-m", "pip", "install", *quiet, "--target", str(folder), str(wheel)])
    return folder


@pytest.fixture(scope="session")
def environment(site: Path) -> dict[str, str]:
    """Variables of a process in which SGLang finds the plugin as an installed package."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    paths = os.pathsep.join([str(site), str(Path(__file__).parent)])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def found_by(
    sglang_python: str, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What a script of this folder finds in SGLang's environment, its last line; the folder of
    benchmarks is its argument.
    """

    def found(script: str) -> dict[str, Any]:
        command = [sglang_python, str(Path(__file__).with_name(script)), str(ROOT / "benchmarks")]
        out = checked(command, env=environment, cwd=tmp_path_factory.mktemp("empty"))
        return json.loads(out.splitlines()[-1])

    return found


@pytest.fixture(scope="session")
def facts(
    sglang_python: str, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `contract_facts.py` found; SGLang takes long to import, so it is asked once."""
    short = tmp_path_factory.mktemp("short-drafter")
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    config["block_size"] = config["dflash_config"]["block_size"] = 8
    (short / "config.json").write_text(json.dumps(config))
    folders = [str(PAIR / "target"), str(PAIR / "drafter"), str(short)]
    script = str(Path(__file__).with_name("contract_facts.py"))
    out = checked(
        [sglang_python, script, *folders], env=environment, cwd=tmp_path_factory.mktemp("empty")
    )
    return json.loads(out.splitlines()[-1])
