"""Rounds that the policy did not choose, and what becomes of an earlier demo."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridspec.demo import run
from hybridspec.demo.comparison import Decoded
from hybridspec.errors import EnvironmentMissing, Interrupted, UsageError
from hybridspec.server.round_times import DRIFTED


def decoded(rounds: int, *fallbacks: str) -> list[Decoded]:
    return [Decoded("p", "code", (1,), (1,) * rounds, (1.0,) * rounds, (1,) * rounds, fallbacks)]


def test_rounds_after_a_drift_are_told_from_rounds_that_do_not_pay() -> None:
    runs = {run.POLICY: [decoded(6, DRIFTED, "other"), decoded(2)], run.AR: [decoded(9, DRIFTED)]}
    assert run._static_share(runs) == 1 / 8
    assert run._static_share({run.POLICY: [decoded(0)]}) == 0.0


def test_what_a_server_says_after_its_start_is_passed_on_whatever_its_length() -> None:
    script = "import sys; sys.stderr.write('x' * 99 + '\\n'); sys.stderr.write('late\\n' * 20000)"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    told: list[str] = []
    run._pass_on(told.append, process)
    assert process.wait(20) == 0
    assert told[0] == "  serve: " + "x" * 99
    assert told[1:] == ["  serve: late"] * 20000


BUNDLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu_demo_bundle"
FILES = ("trace/run.json", "trace/part-00000.parquet", "bundle/manifest.json", "results.json")


def write_demo(folder: Path, text: str, *more: str) -> None:
    for name in (*FILES, *more):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and run.WORK_NAME not in path.parts
    }


def start(out: Path) -> dict[str, Any]:
    return run.run_demo(out=out, max_new_tokens=4, prompts_per_category=2, port=0)


def test_a_finished_demo_replaces_the_earlier_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo(tmp_path, "old", "trace/part-00069.parquet", "bundle/notes.txt", "mine.txt")

    def stages(work: Path, *_: object) -> tuple[Any, list[float], dict[str, Any]]:
        write_demo(work, "new", "bundle/plots/a.svg")
        return None, [], {"over_ar": 2.0}

    monkeypatch.setattr(run, "_stages", stages)
    monkeypatch.setattr(run, "_tell", lambda *_: None)
    assert start(tmp_path) == {"over_ar": 2.0}
    assert held(tmp_path) == {
        **dict.fromkeys((*FILES, "bundle/plots/a.svg"), "new"),
        **dict.fromkeys(("bundle/notes.txt", "mine.txt"), "old"),
    }
    assert not (tmp_path / run.WORK_NAME).exists()
    assert start(tmp_path) == {"over_ar": 2.0}, "what a demo wrote, the next one replaces"


def test_an_unfinished_demo_leaves_the_earlier_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo(tmp_path, "old")
    before = held(tmp_path)
    error: BaseException = KeyboardInterrupt()

    def stages(work: Path, *_: object) -> None:
        assert [path.name for path in work.iterdir()] == [run.LOCK_NAME], "it starts afresh"
        write_demo(work, "new")
        raise error

    monkeypatch.setattr(run, "_stages", stages)
    with pytest.raises(Interrupted, match=rf"unchanged.*{run.WORK_NAME}.*starts afresh"):
        start(tmp_path)
    assert held(tmp_path) == before
    error = run.StageFailed("hybridspec calibrate", 4)
    with pytest.raises(run.StageFailed):
        start(tmp_path)
    assert held(tmp_path) == before


@pytest.mark.skipif(not BUNDLE.is_dir(), reason="no demonstration bundle (an sdist)")
def test_a_busy_machine_costs_no_second_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def command(say: object, words: Sequence[object], *, tries: int = 1) -> None:
        ran.append(str(words[0]))
        if words[0] == "profile-latency":
            assert tries > 1
            raise run.StageFailed("hybridspec profile-latency", 5, run.BUSY)
        shutil.copytree(BUNDLE, tmp_path / run.WORK_NAME / "bundle")

    monkeypatch.setattr(run, "_command", command)
    with pytest.raises(run.StageFailed, match="close other programs and run the demo again"):
        start(tmp_path)
    with pytest.raises(run.StageFailed):
        start(tmp_path)
    assert ran == ["calibrate", "profile-latency", "profile-latency"]
    with pytest.raises(run.StageFailed):
        run.run_demo(out=tmp_path, max_new_tokens=5, prompts_per_category=2, port=0)
    assert ran[3:] == ["calibrate", "profile-latency"], "answers of another length"
    (tmp_path / run.WORK_NAME / "bundle" / "manifest.json").write_text("{}")
    with pytest.raises(run.StageFailed):
        run.run_demo(out=tmp_path, max_new_tokens=5, prompts_per_category=2, port=0)
    assert ran[5:] == ["calibrate", "profile-latency"], "a damaged one is made again"


def test_a_stage_that_fails_again_and_again_says_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = iter([5, 5, 5, 5, 4])

    def ended(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], next(codes))

    monkeypatch.setattr(run.subprocess, "run", ended)
    with pytest.raises(run.StageFailed, match="close other programs"):
        run._command(lambda line: None, ["profile-latency"], tries=3)
    for code in (5, 4):
        with pytest.raises(run.StageFailed, match=f"exit code {code}; its reason stands above$"):
            run._command(lambda line: None, ["calibrate"])


@pytest.mark.parametrize("folder", ["trace", "bundle"])
def test_folders_of_others_and_running_demos_are_left_alone(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    with (
        run.FolderLock(tmp_path / run.WORK_NAME, wait=False),
        pytest.raises(EnvironmentMissing, match="another process"),
    ):
        start(tmp_path)
    (tmp_path / folder / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"no earlier demo wrote it.*--out"):
        start(tmp_path)
    (tmp_path / folder / "README.md").unlink()
    (tmp_path / folder).rmdir()
    (tmp_path / folder).write_text("a file")
    with pytest.raises(UsageError, match="--out"):
        start(tmp_path)


@pytest.mark.timeout(120)
def test_ctrl_c_while_a_second_demo_records(tmp_path: Path) -> None:
    write_demo(tmp_path, "old")
    before = held(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "demo", "--out", tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    trace = tmp_path / run.WORK_NAME / "trace"
    while not list(trace.glob("part-*.parquet")) and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the stage gets it too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    last = err.splitlines()[-1]
    assert last.startswith("interrupted: ")
    assert "unchanged" in last
    assert held(tmp_path) == before


def test_a_port_that_is_taken_is_told_before_anything_runs(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentMissing, match=f"port {port} on 127.0.0.1 is in use"):
            run.run_demo(out=tmp_path, max_new_tokens=4, prompts_per_category=2, port=port)
    assert list(tmp_path.iterdir()) == []
