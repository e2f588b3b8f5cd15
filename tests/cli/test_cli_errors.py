"""How a command line leaves: exit code, one line on stderr, nothing on stdout."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest

from hybridspec import doctor
from hybridspec.cli.main import run
from hybridspec.errors import (
    BundleError,
    EnvironmentMissing,
    HybridSpecError,
    Interrupted,
    ModelError,
    NotEnoughData,
    PromptError,
    QualityGate,
    UsageError,
)


def raising(error: BaseException) -> object:
    def examine() -> doctor.Report:
        raise error

    return examine


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (UsageError, 2),
        (PromptError, 2),
        (ModelError, 3),
        (BundleError, 3),
        (EnvironmentMissing, 4),
        (NotEnoughData, 5),
        (QualityGate, 5),
    ],
)
def test_refusals_are_one_line_with_their_code(
    kind: type[HybridSpecError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examine", raising(kind("value 3 is wrong:\nuse 4")))
    assert run(["doctor"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: value 3 is wrong: use 4\n")


def test_interrupt_says_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", raising(Interrupted("kept 3 of 9; run --resume")))
    assert run(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted: kept 3 of 9; run --resume\n"
    monkeypatch.setattr(doctor, "examine", raising(KeyboardInterrupt()))
    assert run(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"


def test_bug_is_one_line_and_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", raising(ValueError("bad\nluck")))
    monkeypatch.delenv("HYBRIDSPEC_LOG", raising=False)
    assert run(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: unexpected ValueError: bad luck")
    assert "HYBRIDSPEC_LOG=debug" in err
    monkeypatch.setenv("HYBRIDSPEC_LOG", "debug")
    assert run(["doctor"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_disk_troubles_are_the_environment(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number), "out/map.parquet")
    monkeypatch.setattr(doctor, "examine", raising(error))
    assert run(["doctor"]) == 4
    err = capsys.readouterr().err
    assert err.startswith(f"error: out/map.parquet: {os.strerror(number)}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["doctor", "--no-such-flag"],
        ["doctor", "surplus"],
        ["serve", "--port", "70000"],
        ["serve", "--fixed-length", "17"],
        ["serve", "--policy", "fastest"],
        ["calibrate", "--max-new-tokens", "many"],
        ["profile-latency", "--contexts", "128;512"],
        ["profile-latency", "--batch-sizes", "4,2"],
        ["profile-latency", "--batch-sizes", "0,1"],
    ],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["serve", "--fixed-length", "40"], "16"),
        (["serve", "--port", "99999"], "65535"),
        (["serve", "--port", "abc"], "int"),
        (["serve", "--engine", "foo"], "not one of 'reference', 'sglang'"),
        (["calibrate", "--max-prompts", "0"], "2"),
        (["profile-latency", "--budget", "long"], "a valid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_name_option_value_and_rule(
    arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    *_, flag, value = arguments
    line = capsys.readouterr().err.splitlines()[-1]
    # How the rule is worded depends on the version of typer.
    assert re.search(rf"'{flag}'.*: '?{value}'? .*{rule}", line), line
    assert line.count(value) == 1


def test_near_miss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--max-promts", "3"]) == 2
    assert "--max-prompts" in capsys.readouterr().err


def test_bad_log_level_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDSPEC_LOG", "loud")
    assert run(["doctor"]) == 2
    assert "HYBRIDSPEC_LOG=loud" in capsys.readouterr().err


def test_unrecognised_variable_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDSPEC_HOEM", "x")
    monkeypatch.setattr(doctor, "examine", raising(ModelError("no")))
    run(["doctor"])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: HYBRIDSPEC_HOEM")
    assert "HYBRIDSPEC_HOME" in first
    assert second == "error: no"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]])
def test_reader_that_went_away_is_silent(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "hybridspec.cli.main", *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert done.stderr == ""
