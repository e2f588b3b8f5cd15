"""Guards of what is installed: the wheel's content, and the command line that runs from it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from hybridspec import __version__

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("artifacts", "calibrate", "cli", "costmodels", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the build backend comes with the test extra")
    folder = tmp_path_factory.mktemp("dist")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own, as `pip install --target` would lay them."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(
    installed: Path, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


def test_top_level_is_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"hybridspec", f"hybridspec-{__version__}.dist-info"}


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    real = [*(ROOT / "hybridspec").rglob("*.py")]
    real += [path for folder in LINKED for path in (ROOT / folder).rglob("*.py")]
    expected = set()
    for path in real:
        relative = path.relative_to(ROOT).as_posix()
        expected.add(relative if relative.startswith("hybridspec/") else f"hybridspec/{relative}")
    assert expected <= set(names)
    assert "hybridspec/py.typed" in names
    assert "hybridspec/cli/main.py" in names, "the links were not followed"
    assert "hybridspec/demo/pair/target/model.safetensors" in names


def test_wheel_from_the_source_archive_is_the_same(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # hatchling visits each file once: a linked folder that is listed twice loses its files.
    folder = tmp_path_factory.mktemp("sdist")
    hatchling = [sys.executable, "-m", "hatchling", "build"]
    subprocess.run([*hatchling, "-t", "sdist", "-d", str(folder)], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (tree,) = [path for path in folder.iterdir() if path.is_dir()]
    assert (tree / "tests").is_dir()
    subprocess.run([*hatchling, "-t", "wheel", "-d", str(folder)], cwd=tree, check=True)
    (second,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(second) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_command_line_runs_from_the_wheel_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, hybridspec.cli.main as main\n"
        "sys.argv[1:] = ['--version']\n"
        "files = [m.__file__ for n, m in sys.modules.items()"
        " if n.startswith('hybridspec') and getattr(m, '__file__', None)]\n"
        "print(*files, sep='\\n', file=sys.stderr)\n"
        "main.main()\n"
    )
    done = run_installed(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"hybridspec {__version__}\n"
    used = done.stderr.split()
    assert len(used) >= 5
    assert all(name.startswith(str(installed)) for name in used), used
    assert list(tmp_path.iterdir()) == [], "the command left files behind"


def test_entry_point_names_the_command_line(installed: Path) -> None:
    (text,) = [path.read_text() for path in installed.glob("*.dist-info/entry_points.txt")]
    assert "hybridspec = hybridspec.cli.main:main" in text


def test_licence_travels_with_the_wheel(installed: Path) -> None:
    names = {path.name for path in installed.glob("*.dist-info/licenses/*")}
    assert names == {"LICENSE", "NOTICE"}


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line.startswith("#"):
            continue
        name, separator, version = line.partition("==")
        assert separator, f"constraints.txt: {line!r} is not an exact pin"
        assert version
        pins[_normal(name)] = version
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    missing = [name for name in map(_name, wanted) if name not in pins]
    assert not missing
    assert pins["torch"] == "2.13.0"


def test_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def _name(requirement: str) -> str:
    end = next(i for i, c in enumerate(requirement + "<") if c in "<>=![;~ ")
    return _normal(requirement[:end])


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
