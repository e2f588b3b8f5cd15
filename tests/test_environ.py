"""Each environment variable is read in one place, and a wrong value is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hybridspec import environ
from hybridspec.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


def test_home_is_only_what_is_set() -> None:
    assert environ.home({"HYBRIDSPEC_HOME": "~/a"}) == Path.home() / "a"
    assert environ.home({"XDG_CACHE_HOME": "/b"}) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"HYBRIDSPEC_OFFLINE": "0"}, False),
        ({"HYBRIDSPEC_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "true"}, True),
        ({"HYBRIDSPEC_OFFLINE": "", "HF_HUB_OFFLINE": "off"}, False),
    ],
)
def test_offline(variables: dict[str, str], expected: bool) -> None:
    assert environ.offline(variables) is expected


def test_offline_refuses_what_is_neither() -> None:
    with pytest.raises(UsageError, match="HYBRIDSPEC_OFFLINE=maybe"):
        environ.offline({"HYBRIDSPEC_OFFLINE": "maybe"})


def test_log_level() -> None:
    assert environ.log_level({}) == logging.WARNING
    assert environ.log_level({"HYBRIDSPEC_LOG": "DEBUG"}) == logging.DEBUG
    with pytest.raises(UsageError, match="HYBRIDSPEC_LOG=loud"):
        environ.log_level({"HYBRIDSPEC_LOG": "loud"})


def test_settings_reach_the_libraries_that_use_the_network() -> None:
    variables = {"HYBRIDSPEC_OFFLINE": "1", "HYBRIDSPEC_HOME": "/a", "HF_DATASETS_CACHE": "/mine"}
    environ.pass_on(variables)
    assert variables["HF_HUB_OFFLINE"] == variables["HF_DATASETS_OFFLINE"] == "1"
    assert variables["HF_DATASETS_CACHE"] == "/mine"
    untouched: dict[str, str] = {}
    environ.pass_on(untouched)
    assert untouched == {}
    housed = {"HYBRIDSPEC_HOME": "/a"}
    environ.pass_on(housed)
    assert housed["HF_DATASETS_CACHE"] == "/a/datasets"


def test_unrecognised_names_the_near_miss() -> None:
    known = dict.fromkeys(environ.VARIABLES, "1")
    assert environ.unrecognised(known | {"PATH": "/bin"}) == []
    near, far = environ.unrecognised({"HYBRIDSPEC_OFLINE": "1", "HYBRIDSPEC_ZZZZZ": "1"})
    assert near.endswith("did you mean HYBRIDSPEC_OFFLINE?")
    assert "known: HYBRIDSPEC_HOME" in far


def test_variables_of_the_repository_itself_are_no_near_misses() -> None:
    read = list((ROOT / "benchmarks").rglob("*.py"))
    read += [path for path in (ROOT / "Makefile", ROOT / "tests" / "conftest.py") if path.exists()]
    names = {
        name
        for path in read
        for name in re.findall(r"\bHYBRIDSPEC_[A-Z]+(?:_[A-Z]+)*\b", path.read_text())
    }
    assert names
    assert environ.unrecognised(dict.fromkeys(names, "1")) == []


def test_code_reads_no_variable_outside_the_table() -> None:
    folders = ("hybridspec", "artifacts", "calibrate", "cli", "costmodels", "kernels")
    names = {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bHYBRIDSPEC_[A-Z]+(?:_[A-Z]+)*\b", path.read_text())
    }
    assert names <= set(environ.VARIABLES)
