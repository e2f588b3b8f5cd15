"""Putting bundles into folders: checked first, whole or not at all, never over another one."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bundle_kit import calibration_arguments, cost_arguments, forge, make_bundle, make_step

from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.artifacts.transport import (
    bundle_name,
    check_package,
    copy_calibration,
    install,
    read_package,
)
from hybridspec.errors import BundleError


def test_install_says_whether_it_wrote_and_never_replaces_unasked(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    package = read_package(bundle)
    assert install(out, package)
    assert not install(out, package)
    write_cost(bundle, **cost_arguments(step=make_step(factor=2.0)))
    other = read_package(bundle)
    with pytest.raises(BundleError, match="holds another bundle"):
        install(out, other)
    assert load_bundle(out).content_id == package.manifest.content_id
    assert install(out, other, replace=True)
    assert load_bundle(out).content_id == other.manifest.content_id
    names = {path.name for path in out.rglob("*.parquet")}
    assert names == {path.name for path in bundle.rglob("*.parquet")}, "old files were left"


def test_package_with_impossible_values_is_refused_before_it_is_installed(bundle: Path) -> None:
    package = read_package(bundle)

    def negative(table: pa.Table) -> pa.Table:
        column = table.column_names.index("latency_us")
        return table.set_column(column, table.schema.field(column), pa.array([-1.0] * len(table)))

    forge(bundle, "cost", "step", negative)
    with pytest.raises(BundleError, match="allowed are more than 0"):
        read_package(bundle)
    data = {path.name: path.read_bytes() for path in bundle.rglob("*.parquet")}
    from hybridspec.artifacts.manifest import parse_manifest
    from hybridspec.artifacts.transport import Package, Payload

    manifest = parse_manifest((bundle / "manifest.json").read_bytes(), path="m")
    payloads = tuple(Payload(e, data[Path(e.path).name]) for e in manifest.entries())
    with pytest.raises(BundleError, match="allowed are more than 0") as refusal:
        check_package(Package(manifest, payloads, {}))
    assert "/tmp" not in str(refusal.value)
    check_package(package)


@pytest.mark.parametrize("place", ["plots", "cost"])
def test_links_in_the_way_are_refused(bundle: Path, tmp_path: Path, place: str) -> None:
    (bundle / "plots").mkdir()
    (bundle / "plots" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / place).symlink_to(elsewhere)
    with pytest.raises(BundleError, match="is a link"):
        install(out, read_package(bundle))
    assert list(elsewhere.iterdir()) == []


def test_copied_calibration_keeps_its_id_and_the_other_cost(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_cost(out, **cost_arguments(step=make_step(factor=3.0), throughput=None))
    before = load_bundle(out).cost
    copy_calibration(bundle, out, provenance={"trace": "elsewhere"})
    loaded, source = load_bundle(out), load_bundle(bundle)
    assert loaded.calibration is not None
    assert source.calibration is not None
    assert loaded.calibration.content_id == source.calibration.content_id
    assert loaded.calibration.provenance == {"trace": "elsewhere"}
    assert before is not None
    assert loaded.cost is not None
    assert loaded.cost.content_id == before.content_id
    write_cost(tmp_path / "cost-only", **cost_arguments(throughput=None))
    with pytest.raises(BundleError, match="no calibration part"):
        copy_calibration(tmp_path / "cost-only", out, provenance={})


def _install_often(arguments: tuple[str, str]) -> int:
    package = read_package(Path(arguments[0]))
    return sum(install(Path(arguments[1]), package, replace=True) for _ in range(8))


def test_many_writers_leave_one_whole_bundle(tmp_path: Path) -> None:
    sources = []
    for number in range(3):
        source = make_bundle(tmp_path / f"source{number}")
        write_calibration(source, **calibration_arguments(scale=1.0 + number))
        sources.append(source)
    out = tmp_path / "out"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.map(_install_often, [(str(source), str(out)) for source in sources])
    ids = {load_bundle(source).content_id for source in sources}
    assert load_bundle(out).content_id in ids
    named = {entry.path for entry in load_bundle(out).manifest.entries()}
    assert {p.relative_to(out).as_posix() for p in out.rglob("*.parquet")} == named


def test_names_are_plain(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    assert bundle_name(loaded) == (
        f"some-cpu--tp1--float32--reference-0.1.0--{loaded.content_id[:8]}"
    )


def test_content_id_ignores_the_parquet_writer(bundle: Path) -> None:
    """Other compression, row groups, chunks and statistics: another file, the same content."""
    import io

    import pyarrow.parquet as pq

    from hybridspec.artifacts.digest import table_digest
    from hybridspec.artifacts.store import decode_table

    raw: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    for part in ("calibration", "cost"):
        for entry in raw["parts"][part]["files"]:
            table = decode_table((bundle / entry["path"]).read_bytes(), path="t")
            buffer = io.BytesIO()
            pq.write_table(
                table.replace_schema_metadata({b"host": b"x"}),
                buffer,
                compression="snappy",
                row_group_size=max(1, len(table) // 3),
                use_dictionary=False,
                version="1.0" if part == "cost" else "2.6",
            )
            again = decode_table(buffer.getvalue(), path="t").cast(table.schema)
            assert table_digest(again) == entry["digest"]
