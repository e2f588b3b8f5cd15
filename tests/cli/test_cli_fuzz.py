"""`hybridspec fuzz` as a person meets it: a clean run, a finding and its file, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridspec.cli.main import run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small pair, one thread, no decoration."""
    from hybridspec.reference.random_pair import PairShape, write_random_pair

    folders = write_random_pair(tmp_path_factory.mktemp("pair"), PairShape(), seed=1)
    return (str(folders[0]), "--drafter", str(folders[1]), "--threads", "1")


@pytest.fixture
def commits_too_little(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import hybridspec.reference.engine as engine_module

    real: Callable[..., None] = engine_module.commit

    def wrong(pool: object, factors: object, layout: object, committed: list[int]) -> None:
        real(pool, factors, layout, [n - 1 for n in committed])

    monkeypatch.setattr(engine_module, "commit", wrong)
    return monkeypatch


def test_clean_run(
    pair: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fuzz", *pair, "--rounds", "20", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["violation"] is result["file"] is None
    assert result["rounds"] == result["counts"]["rounds"] >= 20
    assert 0 < result["largest_difference"]["recurrent_state"] < 1e-9
    assert not list(tmp_path.iterdir())
    # And the embedded pair, where none is named.
    assert run(["fuzz", "--seconds", "0", "--threads", "1", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("no violation: 0 rounds")


def test_finding_is_kept_and_plays_again(
    pair: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    commits_too_little: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "new" / "folder"
    assert run(["fuzz", *pair, "--out", str(folder)]) == 1
    told = capsys.readouterr()
    (path,) = folder.iterdir()
    assert f"hybridspec fuzz --replay {path}" in told.out
    assert "history" in told.err
    assert "2 rows, 0 right" in told.err
    replay = ["fuzz", *pair, "--replay", str(path), "--quiet"]
    assert run([*replay, "--json"]) == 1
    again = json.loads(capsys.readouterr().out)
    saved = json.loads(path.read_text())
    assert again["violation"] == saved["violation"]
    assert len(saved["operations"]) == 2
    commits_too_little.undo()
    assert run(replay) == 0
    assert "no violation" in capsys.readouterr().out


def test_file_of_another_pair_is_refused(
    pair: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    commits_too_little: pytest.MonkeyPatch,
) -> None:
    run(["fuzz", *pair, "--out", str(tmp_path), "--quiet"])
    (path,) = tmp_path.iterdir()
    capsys.readouterr()
    assert run(["fuzz", "--replay", str(path), "--threads", "1", "--quiet"]) == 3
    assert "name the pair" in capsys.readouterr().err
    assert run(["fuzz", *pair, "--replay", str(tmp_path / "none.json")]) == 3


def test_interrupt_while_shrinking_keeps_the_finding(
    pair: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    commits_too_little: pytest.MonkeyPatch,
) -> None:
    import hybridspec.fuzz.run as fuzz_run

    real, calls = fuzz_run.play, []

    def stopped(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    commits_too_little.setattr(fuzz_run, "play", stopped)
    assert run(["fuzz", *pair, "--out", str(tmp_path), "--quiet"]) == 130
    (path,) = tmp_path.iterdir()
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("interrupted: a violation is kept in")
    assert str(path) in told
    assert json.loads(path.read_text())["found_by"]["minimal"] is False


def test_interrupt_says_what_was_done(pair: tuple[str, ...], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "fuzz", *pair, "--rounds", "1000000"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "reference engine, float64" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1].startswith(
        ("interrupted: no violation in ", "interrupted: nothing")
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("played", "says"), [(0, "nothing was played to its end"), (1, "no violation in ")]
)
def test_interrupt_before_the_first_round_claims_nothing(
    played: int,
    says: str,
    pair: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import hybridspec.fuzz.run as fuzz_run

    real, calls = fuzz_run.play, []

    def stopped(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > played:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fuzz_run, "play", stopped)
    assert run(["fuzz", *pair, "--rounds", "1000000", "--out", str(tmp_path), "--quiet"]) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"interrupted: {says}")
    assert " 0 rounds" not in told
    assert not list(tmp_path.iterdir())
