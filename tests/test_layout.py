"""Guards of the layout: links, namespace folders, one-way imports, and what must not be tracked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("artifacts", "calibrate", "cli", "costmodels", "kernels")
MAX_LINES = 450

# What a module may import from hybridspec, by where it lives: `cli` sits on top, the tables and
# the kernels below. `*` is everything but the command line.
BASE = {"errors", "environ", "__version__"}
ALLOWED = {
    "artifacts": BASE | {"artifacts"},
    "kernels": BASE | {"kernels"},
    "calibrate": BASE | {"calibrate", "artifacts", "costmodels"},
    "costmodels": BASE | {"costmodels", "artifacts", "calibrate"},
}
TORCH_FREE = ("artifacts", "calibrate", "cli")


def tracked(*patterns: str) -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout (an sdist has no list of tracked files)")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def imports(path: Path, *, at_start_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that the module imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_start_only and (lazy or typing_only):
            skipped.update(ast.walk(node))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_resolves(name: str) -> None:
    link = ROOT / "hybridspec" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_is_a_namespace(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists(), "it would shadow distributions of that name"


def test_installed_kernels_distribution_wins_at_the_root(tmp_path: Path) -> None:
    stub = tmp_path / "kernels"
    stub.mkdir()
    (stub / "__init__.py").write_text("OWNER = 'stub'\n")
    found = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.OWNER)"],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "stub", found.stderr


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_downwards(folder: str) -> None:
    wrong = []
    for path in modules(folder):
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "hybridspec" and parts[1] not in ALLOWED[folder]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong, wrong


def test_only_the_command_line_imports_the_command_line() -> None:
    folders = [
        path for path in (ROOT / "hybridspec").iterdir() if path.is_dir() and path.name != "cli"
    ]
    paths = [*(ROOT / "hybridspec").glob("*.py"), *(p for f in folders for p in f.rglob("*.py"))]
    wrong = [
        f"{path}:{line}"
        for path in paths
        for line, name in imports(path)
        if name.startswith("hybridspec.cli")
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_torch_is_not_imported_at_start(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules(folder)
        for line, name in imports(path, at_start_only=True)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong, wrong


def test_the_guards_see_what_they_guard(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import torch.nn\nfrom hybridspec.cli import main\ndef f():\n    import numpy\n"
    )
    assert {name for _, name in imports(probe)} == {"torch.nn", "hybridspec.cli.main", "numpy"}
    assert {name for _, name in imports(probe, at_start_only=True)} == {
        "torch.nn",
        "hybridspec.cli.main",
    }


def test_modules_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert len(lengths) > 10
    long = [
        f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > MAX_LINES
    ]
    assert not long, f"over {MAX_LINES} lines, one file one noun: {long}"


def test_tracked_text_names_no_machine_and_no_unfinished_work() -> None:
    # Spelled in pieces, or this file would find itself.
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "registry." + "npmjs", "deb." + "debian.org")
    paths = ("/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/")
    pattern = re.compile(
        "|".join([rf"\b{word}\b" for word in words] + [re.escape(part) for part in hosts + paths])
    )
    wrong = []
    for path in tracked():
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and tables
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not wrong, wrong


def test_no_large_file_is_tracked() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes"
        for path in tracked()
        if path.is_file() and path.stat().st_size > 9_000_000
    ]
    assert not large, large
