"""Whatever a user can do to a bundle ends in one clear refusal, never in a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bundle_kit import forge, make_bundle, sign
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.errors import BundleError


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("damage") / "bundle")


def content(bundle: Bundle) -> str:
    return f"{bundle.content_id} {bundle.calibration is None} {bundle.cost is None}"


def load_or_refusal(folder: Path) -> Bundle | str:
    """The bundle, or the refusal; anything else that is raised fails the test."""
    try:
        return load_bundle(folder)
    except BundleError as error:
        refusal = str(error)
    assert len(refusal) > 20
    assert "\n" not in refusal
    return refusal


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_damage_is_refused_or_harmless(shared: Path, data: st.DataObject) -> None:
    intact = content(load_bundle(shared))
    files = sorted(path for path in shared.rglob("*") if path.suffix in (".parquet", ".json"))
    # The manifest has the most ways to go wrong.
    path = data.draw(st.sampled_from([*files, *[shared / "manifest.json"] * len(files)]))
    original = path.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        at = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        if kind == "flip" and damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del damaged[at:]
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(max_size=6))
        else:
            del damaged[at : at + 3]
    try:
        path.write_bytes(damaged)
        loaded = load_or_refusal(shared)
        # Only what no digest covers may differ: spaces, provenance, a minor version.
        assert isinstance(loaded, str) or content(loaded) == intact
    finally:
        path.write_bytes(original)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_manifest_values_of_any_type_are_refused_or_harmless(
    shared: Path, data: st.DataObject
) -> None:
    manifest = shared / "manifest.json"
    original = manifest.read_text()
    raw = json.loads(original)
    node: Any = raw
    while True:
        key = data.draw(
            st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
        )
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
        else:
            break
    node[key] = data.draw(json_values)
    try:
        manifest.write_text(json.dumps(raw))
        load_or_refusal(shared)
    finally:
        manifest.write_text(original)


def set_column(name: str, value: Any, *, row: int = 0) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        index = table.column_names.index(name)
        values = table.column(name).to_pylist()
        values[row] = value
        field = table.schema.field(name)
        return table.set_column(index, field, pa.array(values, field.type))

    return change


@pytest.mark.parametrize(
    ("part", "name", "change", "message"),
    [
        ("cost", "step", set_column("latency_us", -5.0), "allowed are more than 0"),
        ("cost", "step", set_column("latency_us", float("nan")), "1 NaN or infinite"),
        ("cost", "step", set_column("verify_length", 3), "not a full grid"),
        ("cost", "step", set_column("draft_us", 1.0), "draft_us differs"),
        ("cost", "step", set_column("expert_slope_us", 9.0), "2 different values"),
        ("cost", "step", lambda table: table.slice(1), "not a full grid"),
        ("cost", "step", lambda table: table.slice(0, 0), "not a full grid"),
        ("cost", "step", lambda table: table.drop(["draft_us"]), "'draft_us' is missing"),
        ("cost", "samples", set_column("latency_us", -1.0), "'latency_us' has 1 value"),
        ("cost", "samples", set_column("verify_length", 17), "allowed are 0 to 16"),
        ("calibration", "knots", set_column("knot_x", 0.9), "strictly increasing"),
        ("calibration", "knots", set_column("knot_y", 1.5, row=2), "non-decreasing in"),
        ("calibration", "map", set_column("term", "mystery"), "rows are not log_p1"),
        ("calibration", "map", set_column("coefficient", float("inf")), "1 NaN or infinite"),
        ("calibration", "map", set_column("method", "other"), "2 different values"),
        ("calibration", "map", lambda table: table.slice(0, 0), "rows are not log_p1"),
        ("calibration", "routing", set_column("verify_length", 9), "must count 1..16"),
        ("calibration", "routing", set_column("num_layers", 9), "2 different values"),
        ("calibration", "reliability", set_column("mean_observed", 1.5), "allowed are 0 to 1"),
        (
            "calibration",
            "metrics",
            lambda table: table.replace_schema_metadata(
                {"schema_id": "hybridspec.calibration.metrics/2"}
            ),
            "upgrade hybridspec",
        ),
    ],
)
def test_values_are_checked_even_with_valid_digests(
    bundle: Path, part: str, name: str, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    forge(bundle, part, name, change)
    with pytest.raises(BundleError, match=message):
        load_bundle(bundle)


def step_file(bundle: Path) -> Path:
    return next((bundle / "cost").glob("step-*.parquet"))


def test_truncated_file_is_named_with_sizes(bundle: Path) -> None:
    path = step_file(bundle)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BundleError, match=r"step-.*\.parquet has \d+ bytes .*manifest says"):
        load_bundle(bundle)


def test_missing_files_are_named(bundle: Path) -> None:
    step_file(bundle).unlink()
    with pytest.raises(BundleError, match=r"step-.*does not exist"):
        load_bundle(bundle)
    (bundle / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"manifest.json does not exist.*hybridspec calibrate"):
        load_bundle(bundle)
    with pytest.raises(BundleError, match="does not exist"):
        load_bundle(bundle / "nowhere")


def test_a_file_for_a_folder_is_told_the_folder(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = re.escape(f"a bundle is a folder: name the one that it lies in, {bundle}")
    for path in (bundle / "manifest.json", step_file(bundle)):
        with pytest.raises(BundleError, match=f"^{re.escape(str(path))} is a file; {instead}$"):
            load_bundle(path)
    monkeypatch.chdir(bundle / "cost")
    with pytest.raises(BundleError, match=instead):
        load_bundle(Path(step_file(bundle).name))
    alone = tmp_path / "bundle.tar.gz"
    alone.write_bytes(b"")
    with pytest.raises(BundleError, match=r"bundle.tar.gz is a file; .* holds its manifest.json"):
        load_bundle(alone)
    with pytest.raises(BundleError, match="Not a directory"):
        load_bundle(alone / "below")


def test_links_and_special_files_are_refused(bundle: Path, tmp_path: Path) -> None:
    path = step_file(bundle)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="no link"):
        load_bundle(bundle)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="not a regular file"):
        load_bundle(bundle)
    path.unlink()
    path.mkdir()
    with pytest.raises(BundleError, match=r"cannot be read|not a regular file"):
        load_bundle(bundle)


def test_linked_part_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "cost", tmp_path / "cost")
    (bundle / "cost").symlink_to(tmp_path / "cost")
    with pytest.raises(BundleError, match="is a link"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    "path",
    [
        "../outside.parquet",
        "cost/../../outside.parquet",
        "/etc/hostname",
        "cost/./x",
        "cost//x",
        "~/x",
        "cost/x\x00",
        "cost/é",
        "",
    ],
)
def test_paths_outside_are_refused(bundle: Path, path: str) -> None:
    raw = json.loads((bundle / "manifest.json").read_text())
    raw["parts"]["cost"]["files"][0]["path"] = path
    (bundle / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=r"parts.cost.files.0.path.*pattern"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw.update(schema_version="2.0"),
            r"reads 1.0 to 1.2: use hybridspec 0\.[\w.]+, which wrote it",
        ),
        (lambda raw: raw.update(schema_version="0.9"), "make the bundle again"),
        (lambda raw: raw.update(schema_version=1), "schema_version 1; expected 1.2"),
        (lambda raw: raw["parts"].update(magic={}), "unknown part 'magic'"),
        (lambda raw: raw["parts"]["cost"]["identity"].update(device="x"), "content id"),
        (lambda raw: raw["parts"]["cost"]["identity"].pop("device"), "parts.cost.identity.device"),
        (lambda raw: raw["parts"]["cost"]["identity"].update(cores="2"), "valid integer"),
        (lambda raw: raw["parts"].pop("cost"), "does not belong to the parts"),
        (lambda raw: raw["parts"]["cost"]["files"].pop(), "does not belong to its"),
        (lambda raw: raw.update(content_id="0" * 64), "does not belong to the parts"),
    ],
)
def test_edited_manifest_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    raw = json.loads((bundle / "manifest.json").read_text())
    change(raw)
    (bundle / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=message):
        load_bundle(bundle)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"schema_version": NaN}', "[" * 100_000, "\xff", '"\ud800"'],
)
def test_manifest_that_is_no_manifest_is_refused(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BundleError):
        load_bundle(bundle)


def test_huge_manifest_is_refused_without_parsing(bundle: Path) -> None:
    with (bundle / "manifest.json").open("r+b") as file:
        file.truncate(5 << 20)
    with pytest.raises(BundleError, match="at most"):
        load_bundle(bundle)


def test_incomplete_part_is_refused(bundle: Path) -> None:
    raw = json.loads((bundle / "manifest.json").read_text())
    files = raw["parts"]["calibration"]["files"]
    raw["parts"]["calibration"]["files"] = [f for f in files if f["name"] != "knots"]
    sign(bundle, raw)
    with pytest.raises(BundleError, match="lists no file 'knots'"):
        load_bundle(bundle)
