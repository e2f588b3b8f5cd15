"""SIGKILL at any moment of a write leaves the old bundle or the new one; SIGINT what is finished.

Short: a handful of kills at moments spread over the write. Long: `pytest -m slow`, 200 kills.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from robustness_kit import ARTIFACTS, MODEL, bundle_kit, serving

from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.artifacts.certificate import list_certificates
from hybridspec.artifacts.digest import model_digest
from hybridspec.demo import assets

WRITER = """
import sys, itertools
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from bundle_kit import calibration_arguments, cost_arguments, make_step
from test_certificate import write
from hybridspec.artifacts.bundle import write_calibration, write_cost
folder = Path(sys.argv[1])
print("ready", flush=True)
for turn in itertools.count():
    scale = 1.0 + turn % 5
    write_calibration(folder, **calibration_arguments(scale))
    write_cost(folder, **cost_arguments(step=make_step(scale)))
    write(folder, settings={"gates": ["control", "greedy"], "seed": turn % 5})
"""
SCALES = [1.0, 2.0, 3.0, 4.0, 5.0]


def kill_a_writer(folder: Path, after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(ARTIFACTS)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()


def whole(folder: Path) -> set[float]:
    """Scales of both parts of the bundle; anything half would be refused or be no scale."""
    bundle = load_bundle(folder)
    found = set()
    if bundle.calibration is not None:
        found.add(round(float(bundle.calibration.hazard.weights_F[0]) / 0.9, 9))
    if bundle.cost is not None:
        found.add(round(float(bundle.cost.step.latency_us[0, 0, 0]) / 900.0, 9))
    return found


def kills(folder: Path, count: int, seed: int) -> None:
    kit = bundle_kit()
    rng = random.Random(seed)
    write_calibration(folder, **kit.calibration_arguments())
    for _ in range(count):
        kill_a_writer(folder, rng.uniform(0.0, 0.15))
        assert whole(folder) <= set(SCALES)
        certificates, refused = list_certificates(folder)
        assert refused == []
        assert len(certificates) <= 1
        assert all(c.verdict == "passed" for c in certificates)
    # The next writers are not kept out by a dead one's lock, and clear what it left.
    write_cost(folder, **kit.cost_arguments())
    importlib.import_module("test_certificate").write(folder)
    assert [path for path in folder.rglob("*") if path.name.endswith("hybridspec-tmp")] == []
    assert list_certificates(folder)[1] == []
    names = {path.name for path in folder.glob("co*/*.parquet")}
    names |= {path.name for path in folder.glob("cal*/*.parquet")}
    assert names == {Path(entry.path).name for entry in load_bundle(folder).manifest.entries()}


def test_killed_writers_leave_whole_bundles(tmp_path: Path) -> None:
    kills(tmp_path / "bundle", 5, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_killed_writers_leave_whole_bundles(tmp_path: Path) -> None:
    kills(tmp_path / "bundle", 200, seed=1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_profile_leaves_the_bundle_alone(tmp_path: Path, how: signal.Signals) -> None:
    kit = bundle_kit()
    folder = tmp_path / "bundle"
    hazards = kit.calibration_arguments()
    # Costs are added to hazards of their own pair alone.
    pair = {"target": assets.TARGET, "drafter": assets.DRAFTER}
    digests = {f"{part}_digest": model_digest(path) for part, path in pair.items()}
    hazards["identity"] = dataclasses.replace(hazards["identity"], **digests)
    write_calibration(folder, **hazards)
    before = load_bundle(folder).content_id
    words = ("--threads", "1", "--contexts", "64", "--batch-sizes", "1", "--repeats", "500")
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "profile-latency", "--out", folder, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("loading "):
            break
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert out == ""
    if how is signal.SIGINT:
        assert process.returncode == 130, err
        assert "interrupted: " in err
        assert "Traceback" not in err
    assert load_bundle(folder).content_id == before


def test_killed_server_is_followed_by_another_on_its_port() -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 400, "temperature": 0, "stream": True}
    with serving() as server:
        port = server.port
        with server.open("/v1/completions", body) as connection:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGKILL)
            assert server.process.wait(30) == -signal.SIGKILL
            # The client sees an end without `[DONE]`, never a silent success.
            rest = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    rest += piece
            assert b"[DONE]" not in rest
    with serving(port=port) as again:
        assert again.port == port
        asked = {**body, "stream": False, "max_tokens": 3}
        status, data = again.ask("POST", "/v1/completions", asked)
        assert (status, json.loads(data)["usage"]["completion_tokens"]) == (200, 3)


def test_interrupted_server_finishes_what_it_took() -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "temperature": 0, "stream": True}
    with serving() as server, server.open("/v1/completions", body) as connection:
        data = connection.recv(64)
        server.process.send_signal(signal.SIGINT)
        while piece := connection.recv(65536):
            data += piece
        assert b"data: [DONE]" in data
        assert server.process.wait(60) == 0


def test_stale_lock_file_keeps_nobody_out(tmp_path: Path) -> None:
    kit = bundle_kit()
    folder = kit.make_bundle(tmp_path / "bundle")
    assert (folder / ".lock").exists()
    copy = shutil.copytree(folder, tmp_path / "copy")
    write_calibration(copy, **kit.calibration_arguments(2.0))
    assert whole(copy) == {1.0, 2.0}
