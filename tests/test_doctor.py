"""`hybridspec doctor` tells the truth about this machine and says what to do."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from hybridspec import __version__, doctor
from hybridspec.cli.main import run
from hybridspec.demo import assets


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.examine()


def test_versions_are_those_installed(report: doctor.Report) -> None:
    assert report.version == __version__
    assert report.python.startswith(platform.python_version())
    assert report.packages["torch"] == torch.__version__
    assert report.usable


def test_gpu_is_found_or_its_absence_explained(report: doctor.Report) -> None:
    checks = {check.name: check for check in report.checks}
    if torch.cuda.is_available():
        assert checks["gpu 0"].status == "ok"
    else:
        assert checks["gpu"].status == "limited"
        assert checks["gpu"].remedy


def test_embedded_pair_is_found(report: doctor.Report) -> None:
    (check,) = [check for check in report.checks if check.name == "embedded pair"]
    assert check.status == "ok"


def test_incomplete_pair_limits_but_does_not_forbid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "PROMPTS", tmp_path / "prompts.jsonl")
    check = doctor._pair_check()
    assert check.status == "limited"
    assert "prompts.jsonl" in check.detail


def test_download_folder_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HYBRIDSPEC_HOME", str(tmp_path / "file" / "home"))
    (check,) = doctor._home_checks()
    assert check.status == "limited"
    monkeypatch.setenv("HYBRIDSPEC_HOME", str(tmp_path / "new" / "home"))
    (check,) = doctor._home_checks()
    assert check.status == "ok"


def test_missing_package_makes_it_unusable(report: doctor.Report) -> None:
    check = doctor._packages_check(report.packages | {"pyarrow": None})
    assert check.status == "missing"
    assert "pyarrow" in check.detail
    assert check.remedy


def test_text_names_every_check(report: doctor.Report) -> None:
    text = doctor.as_text(report)
    assert all(check.name in text and check.detail in text for check in report.checks)


def test_command_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["usable"] is True
    assert data["version"] == __version__
    assert {check["status"] for check in data["checks"]} <= {"ok", "limited"}


def test_command_exits_with_4_when_unusable(
    report: doctor.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = doctor.Check("torch", "missing", "does not import", "install torch again")
    unusable = doctor.Report(**{**vars(report), "checks": (broken,)})
    monkeypatch.setattr(doctor, "examine", lambda: unusable)
    assert run(["doctor"]) == 4
    assert "install torch again" in capsys.readouterr().out
