"""`--help` is complete, imports nothing heavy and answers at once; documented commands exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "",
    "calibrate",
    "profile-latency",
    "plan",
    "replay",
    "bundle",
    "serve",
    "demo",
    "fuzz",
    "certify",
    "doctor",
)
VERBS = ("show", "verify", "diff", "drift", "transfer", "export", "import", "push", "pull")
ALL_COMMANDS = (*COMMANDS, *(f"bundle {verb}" for verb in VERBS))
HEAVY = (
    "torch",
    "sklearn",
    "scipy",
    "numpy",
    "pyarrow",
    "matplotlib",
    "transformers",
    "fastapi",
    "rich",
)
HELP_SECONDS = 0.5

PROBE = """
import json, sys
from hybridspec.cli.main import run
code = run(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted({n.split(".")[0] for n in sys.modules})}),
      file=sys.stderr)
"""


def help_of(command: str, columns: int = 100) -> tuple[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": str(columns)},
    )
    return done.stdout, json.loads(done.stderr)


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[str, dict[str, object]]]:
    return {command: help_of(command) for command in ALL_COMMANDS}


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_help_imports_nothing_heavy(
    pages: dict[str, tuple[str, dict[str, object]]], command: str
) -> None:
    text, facts = pages[command]
    assert facts["code"] == 0
    modules = facts["modules"]
    assert isinstance(modules, list)
    assert "typer" in modules
    assert not set(HEAVY) & set(modules)
    assert "Usage: hybridspec" in text


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_help_says_examples_and_exit_codes(
    pages: dict[str, tuple[str, dict[str, object]]], command: str
) -> None:
    text, _ = pages[command]
    assert "Exit codes:" in text
    assert "130 interrupted" in text
    if command:
        assert re.search(rf"Examples:\n    # .+\n    hybridspec {command}", text)
        options = re.findall(r"^  (?:-\w, )?(--[\w-]+)(.*(?:\n {10,}.*)*)", text, re.MULTILINE)
        assert len(options) >= (1 if command == "bundle" else 2)
        bare = [name for name, rest in options if len(re.findall(r"[a-z]{3,}", rest)) < 2]
        assert not bare, f"options without a help text: {bare}"
    else:
        assert "HYBRIDSPEC_HOME" in text
        assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", ["", "bundle"])
def test_summaries_of_commands_fit_a_terminal(command: str) -> None:
    text, _ = help_of(command, columns=80)
    rows = text.split("\nCommands:\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == len(VERBS if command else COMMANDS[1:])
    assert max(map(len, rows)) <= 80
    assert not [row for row in rows if not row.endswith(".") or row.endswith("...")]


def test_rounds_are_a_least_number(pages: dict[str, tuple[str, dict[str, object]]]) -> None:
    for command in ("fuzz", "certify"):
        text, _ = pages[command]
        [told] = re.findall(r"^  --rounds N +(.*(?:\n {10,}.*)*)", text, re.MULTILINE)
        assert "at least N rounds" in " ".join(told.split())


@pytest.mark.parametrize(
    ("command", "of_bundle"),
    [
        ("serve", True),
        ("certify", True),
        ("bundle verify", True),
        ("calibrate", False),
        ("profile-latency", False),
        ("fuzz", False),
    ],
)
def test_threads_come_from_the_bundle_where_there_is_one(
    pages: dict[str, tuple[str, dict[str, object]]], command: str, of_bundle: bool
) -> None:
    text, _ = pages[command]
    [told] = re.findall(r"^  --threads N +(.*(?:\n {10,}.*)*)", text, re.MULTILINE)
    assert ("the bundle's costs were measured with" in " ".join(told.split())) is of_bundle


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_at_once(command: str) -> None:
    def processor_seconds() -> float:
        arguments = [sys.executable, "-m", "hybridspec.cli.main", *command.split(), "--help"]
        child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return usage.ru_utime + usage.ru_stime

    # Processor time, and the best of three: a busy machine must not fail the test.
    assert min(processor_seconds() for _ in range(3)) < HELP_SECONDS


def documents() -> list[Path]:
    return [
        path
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
        if path.is_file()
    ]


def documented(word: str) -> Iterator[tuple[str, list[str]]]:
    """Place and words of every command line in a fenced block that starts with `word`."""
    for path in documents():
        blocks = re.findall(r"^```[a-z]*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").split("#")[0].split()
                if words and Path(words[0]).name == word:
                    yield f"{path.name}: {line.strip()}", words[1:]


def test_documented_commands_and_flags_exist(
    pages: dict[str, tuple[str, dict[str, object]]],
) -> None:
    for place, words in documented("hybridspec"):
        command = words[0] if words and not words[0].startswith("-") else ""
        assert command in COMMANDS, place
        if command == "bundle" and len(words) > 1 and not words[1].startswith("-"):
            command = f"bundle {words[1]}"
            assert command in ALL_COMMANDS, place
        text, _ = pages[command]
        # What stands behind `--` is SGLang's.
        ours = words[: words.index("--")] if "--" in words else words
        for flag in (word.split("=")[0] for word in ours if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), f"{place}: {flag}"


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "test-long", "lint", "clean", "help"} <= targets
    for place, words in documented("make"):
        named = [word for word in words if "=" not in word and not word.startswith("-")]
        assert set(named) <= targets, place


def test_a_metavar_like_the_name_comes_with_the_name_spelled_out() -> None:
    """Typer 0.27 takes a metavar that is the name in capitals for the option's name: `--PORT`."""
    program = """
import inspect, typer
from typer.models import OptionInfo
from hybridspec.cli.main import app
from typing import get_type_hints
def commands(group):
    yield from (command.callback for command in group.registered_commands)
    for below in group.registered_groups:
        yield from commands(below.typer_instance)
for callback in commands(app):
    for name, hint in get_type_hints(callback, include_extras=True).items():
        for told in getattr(hint, "__metadata__", ()):
            if isinstance(told, OptionInfo) and told.metavar == name.upper():
                # Annotated, the first name arrives as the default.
                names = [n for n in (told.default, *(told.param_decls or ())) if n is not ...]
                print(callback.__name__, name, *(names or ["unnamed"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert any(line.startswith("serve port --port") for line in found), found
    assert not [line for line in found if line.endswith("unnamed")]
