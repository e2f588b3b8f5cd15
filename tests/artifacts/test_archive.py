"""Archives: exact and repeatable going out, nothing trusted coming in."""

from __future__ import annotations

import gzip
import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from bundle_kit import make_bundle

from hybridspec.artifacts import archive
from hybridspec.artifacts.archive import read_archive, write_archive
from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.transport import check_package, install, read_package
from hybridspec.errors import BundleError, EnvironmentMissing, UsageError

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 50
SUFFIXES = (".tar.gz", ".zip")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    package = read_package(make_bundle(folder / "bundle"))
    paths = {suffix: folder / f"bundle{suffix}" for suffix in SUFFIXES}
    for path in paths.values():
        write_archive(path, package, card="# card\n")
    return paths


def members(path: Path) -> dict[str, bytes]:
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in file.namelist()}
    with tarfile.open(path) as file:
        return {info.name: file.extractfile(info).read() for info in file}  # type: ignore[union-attr]


def repack(path: Path, contents: list[tuple[str, bytes]]) -> Path:
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as file:
            for name, data in contents:
                file.writestr(zipfile.ZipInfo(name), data)
    else:
        with tarfile.open(path, "w:gz") as file:
            for name, data in contents:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".tgz"])
def test_round_trip_is_exact_and_repeatable(bundle: Path, tmp_path: Path, suffix: str) -> None:
    (bundle / "plots").mkdir()
    (bundle / "plots" / "step-cost.png").write_bytes(PNG)
    (bundle / "plots" / "step-cost.svg").write_text("<svg onload='x()'/>")
    package = read_package(bundle)
    one, other = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    write_archive(one, package, card="# card\n")
    write_archive(other, read_package(bundle), card="# card\n")
    assert one.read_bytes() == other.read_bytes()
    read = read_archive(one)
    check_package(read)
    assert install(tmp_path / "out", read)
    assert load_bundle(tmp_path / "out").content_id == load_bundle(bundle).content_id
    assert (tmp_path / "out" / "plots" / "step-cost.png").read_bytes() == PNG
    assert not list((tmp_path / "out").rglob("*.svg")), "a picture with scripts travelled"
    for path in bundle.rglob("*.parquet"):
        assert (tmp_path / "out" / path.relative_to(bundle)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bundle_in_one_folder_of_the_archive_is_read(
    packed: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    contents = members(packed[suffix])
    contents["plots/old.svg"] = b"<svg/>"
    nested = [(f"my-bundle/{name}", data) for name, data in reversed(contents.items())]
    read = read_archive(repack(tmp_path / f"nested{suffix}", nested))
    assert read.manifest == read_archive(packed[suffix]).manifest
    assert not read.plots


def with_extra(name: str, data: bytes = b"x") -> Callable[[dict[str, bytes]], object]:
    return lambda contents: contents.update({name: data})


def cut_table(contents: dict[str, bytes]) -> None:
    name = next(name for name in contents if name.startswith("cost/step"))
    contents[name] = contents[name][:-1] + b"?"


def drop_table(contents: dict[str, bytes]) -> None:
    del contents[next(name for name in contents if name.startswith("cost/step"))]


def edit_manifest(contents: dict[str, bytes]) -> None:
    raw = json.loads(contents["manifest.json"])
    raw["parts"]["cost"]["files"][0]["path"] = "../../evil.parquet"
    contents["manifest.json"] = json.dumps(raw).encode()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_extra("../evil"), "must be relative and inside"),
        (with_extra("cost/../../evil"), "must be relative and inside"),
        (with_extra("/etc/evil"), "must be relative and inside"),
        (with_extra("C:/evil"), "must be relative and inside"),
        (with_extra("cost\\evil"), "must be relative and inside"),
        (with_extra("cost/\x1b[2J"), "must be relative and inside"),
        (with_extra("cost/evil.py"), "its manifest does not name"),
        (with_extra("plots/evil.html"), "its manifest does not name"),
        (with_extra("plots/a.png", b"<script>"), "is no PNG"),
        (with_extra("a/manifest.json"), "files manifest.json"),
        (cut_table, "is damaged"),
        (drop_table, "lacks cost/step"),
        (edit_manifest, "pattern"),
        (lambda contents: contents.pop("manifest.json"), "holds 0 files manifest.json"),
        (lambda contents: contents.update({"manifest.json": b"{"}), "not valid JSON"),
        (
            lambda contents: contents.update({f"cost/{i}": b"" for i in range(99)}),
            "more than 64 files",
        ),
    ],
)
def test_what_an_archive_may_hide_is_refused(
    packed: dict[str, Path],
    tmp_path: Path,
    suffix: str,
    change: Callable[[dict[str, bytes]], object],
    message: str,
) -> None:
    contents = members(packed[suffix])
    change(contents)
    path = repack(tmp_path / f"bad{suffix}", list(contents.items()))
    with pytest.raises(BundleError, match=message):
        read_archive(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_that_occur_twice_are_refused(
    packed: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    contents = list(members(packed[suffix]).items())
    expected = pytest.warns(UserWarning, match="Duplicate") if suffix == ".zip" else nullcontext()
    with expected:
        path = repack(tmp_path / f"bad{suffix}", [*contents, contents[0]])
    with pytest.raises(BundleError, match=r"manifest.json twice"):
        read_archive(path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "bad.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        info = tarfile.TarInfo("manifest.json")
        info.type, info.linkname = kind, "/etc/passwd"
        file.addfile(info)
    with pytest.raises(BundleError, match="link or a special file"):
        read_archive(path)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as file:
        info = zipfile.ZipInfo("manifest.json")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
    with pytest.raises(BundleError, match="link or a special file"):
        read_archive(path)


def zip_bomb(path: Path, size: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", b"0" * size)


def zip_bomb_that_lies(path: Path, size: int) -> None:
    zip_bomb(path, size)
    data = path.read_bytes()
    path.write_bytes(data.replace(size.to_bytes(4, "little"), (9).to_bytes(4, "little")))


def tar_bomb(path: Path, size: int) -> None:
    repack(path, [("manifest.json", b"0" * size)])


def pax_bomb(path: Path, size: int) -> None:
    """A header that asks its reader for memory before there is any member."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, size
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + b"0" * size)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.zip", zip_bomb),
        ("b.zip", zip_bomb_that_lies),
        ("a.tar.gz", tar_bomb),
        ("b.tar.gz", pax_bomb),
    ],
)
def test_bombs_do_not_unpack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path, int], None]
) -> None:
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 1 << 20)
    make(tmp_path / name, 40 << 20)
    with pytest.raises(BundleError, match=r"unpacks to more than 1 MiB|is damaged"):
        read_archive(tmp_path / name)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("keep", [0, 1, 10, 300, -40])
def test_truncated_archives_are_refused(
    packed: dict[str, Path], tmp_path: Path, suffix: str, keep: int
) -> None:
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(packed[suffix].read_bytes()[:keep])
    with pytest.raises(BundleError):
        read_archive(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_bytes_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"foreign{suffix}"
    path.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(BundleError):
        read_archive(path)
    with pytest.raises(EnvironmentMissing, match="cannot be read"):
        read_archive(tmp_path / f"none{suffix}")


@pytest.mark.parametrize("name", ["a.tar", "a.rar", "a", "zip"])
def test_other_endings_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="known endings"):
        write_archive(tmp_path / name, read_package(bundle), card="")
    with pytest.raises(UsageError, match="known endings"):
        read_archive(tmp_path / name)
