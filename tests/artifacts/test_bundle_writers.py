"""Writers that are killed, meet, or run out of disk never leave a bundle of two halves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_kit import calibration_arguments, cost_arguments, make_bundle

from hybridspec.artifacts.atomic import TEMPORARY_SUFFIX
from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.errors import EnvironmentMissing

PRELUDE = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from bundle_kit import calibration_arguments, cost_arguments
from hybridspec.artifacts.bundle import write_calibration, write_cost
folder = pathlib.Path(sys.argv[1])
"""


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PRELUDE + code, *map(str, arguments)])


@pytest.mark.parametrize("fsyncs", [1, 5, 11, 12])
def test_killed_writer_leaves_the_old_or_the_new_bundle(bundle: Path, fsyncs: int) -> None:
    before = load_bundle(bundle).content_id
    code = """
left = int(sys.argv[2])
real = os.fsync
def fsync(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = fsync
write_calibration(folder, **calibration_arguments(3.0))
"""
    assert start(code, bundle, fsyncs).wait() == -9
    after = load_bundle(bundle)
    # Five files with two fsyncs each, then the manifest: its last fsync comes after the rename.
    assert (after.content_id == before) == (fsyncs < 12)
    write_calibration(bundle, **calibration_arguments(4.0))
    names = [path.name for path in bundle.rglob("*") if path.is_file()]
    assert not [name for name in names if name.endswith(TEMPORARY_SUFFIX)]
    assert len([name for name in names if name.endswith(".parquet")]) == 9


def test_writers_of_both_parts_and_a_reader_at_once(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    loop = """
for turn in range(5):
    if sys.argv[2] == "calibration":
        write_calibration(folder, **calibration_arguments(1.0 + turn % 5))
    else:
        write_cost(folder, **cost_arguments())
"""
    writers = [start(loop, folder, part) for part in ("calibration", "cost", "calibration")]
    loads = 0
    while any(writer.poll() is None for writer in writers):
        bundle = load_bundle(folder)
        assert bundle.calibration is not None
        assert bundle.cost is not None
        loads += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert loads > 3
    assert load_bundle(folder).calibration is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_keeps_the_old_bundle(small_disk: Path) -> None:
    folder = make_bundle(small_disk / "b")
    before = sorted(path.name for path in folder.rglob("*"))
    status = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (status.f_bavail * status.f_frsize - 9000))
    with pytest.raises(EnvironmentMissing, match=r"no space is left.*run the same command again"):
        write_calibration(folder, **calibration_arguments(2.0))
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert load_bundle(folder).warnings == ()
    (small_disk / "ballast").unlink()
    write_cost(folder, **cost_arguments())
    load_bundle(folder)
