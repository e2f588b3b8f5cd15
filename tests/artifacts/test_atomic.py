"""Writes happen completely or not at all, also when the disk is full or the process is killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridspec.artifacts.atomic import (
    TEMPORARY_SUFFIX,
    remove_leftovers,
    write_bytes,
    write_json,
    write_parquet,
)
from hybridspec.artifacts.lock import FolderLock
from hybridspec.errors import EnvironmentMissing


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})
    write_json(path, {"b": 2})
    assert path.read_text() == '{\n  "b": 2\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_parquet_is_written(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2]})
    write_parquet(tmp_path / "t.parquet", table)
    assert pq.read_table(tmp_path / "t.parquet").equals(table)


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"b": float("nan")})
    assert '"b": 1' in path.read_text()


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=r"No such file or directory.*choose another"):
        write_bytes(tmp_path / "missing" / "a", b"x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EnvironmentMissing, match="Not a directory"):
        write_bytes(tmp_path / "file" / "a", b"x")


def test_file_size_limit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")
    code = """
import pathlib, resource, sys
from hybridspec.artifacts.atomic import write_bytes
from hybridspec.errors import EnvironmentMissing
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_bytes(pathlib.Path(sys.argv[1]), b"x" * 5000)
except EnvironmentMissing as error:
    print(error)
"""
    output = run_python(code, path).stdout
    assert "the file size limit is reached" in output
    assert "run the same command again" in output
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_refused_and_cleaned_up(small_disk: Path) -> None:
    write_bytes(small_disk / "kept", b"k" * 1000)
    with pytest.raises(EnvironmentMissing, match="no space is left") as refusal:
        write_bytes(small_disk / "a", b"x" * 200_000)
    assert isinstance(refusal.value.__cause__, OSError)
    assert refusal.value.__cause__.errno == errno.ENOSPC
    assert [p.name for p in small_disk.iterdir()] == ["kept"]
    write_bytes(small_disk / "a", b"x" * 1000)


def test_kill_leaves_the_old_file_and_a_leftover_that_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    code = """
import os, pathlib, signal, sys
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
from hybridspec.artifacts.atomic import write_bytes
write_bytes(pathlib.Path(sys.argv[1]), b"new")
"""
    assert run_python(code, path).returncode == -9
    assert path.read_bytes() == b"old"
    leftovers = [p.name for p in tmp_path.iterdir() if p != path]
    assert len(leftovers) == 1
    assert leftovers[0].endswith(TEMPORARY_SUFFIX)
    assert remove_leftovers(tmp_path) == leftovers
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_lock_admits_one_writer_and_dies_with_its_process(tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path, wait=False),
        pytest.raises(EnvironmentMissing, match="being written by another process"),
    ):
        FolderLock(tmp_path, wait=False)
    code = """
import os, pathlib, signal, sys
from hybridspec.artifacts.lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]), wait=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, tmp_path).returncode == -9
    with FolderLock(tmp_path, wait=False):
        pass
