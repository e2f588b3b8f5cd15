"""Damaged bundles and archives are refused in one line, or read as the very same numbers.

Bits are flipped, files cut, and files swapped with others of the same bundle and of another valid
one. What is read is compared number by number, not by its ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness_kit import bundle_kit

from hybridspec.artifacts.archive import read_archive, write_archive
from hybridspec.artifacts.bundle import Bundle, load_bundle, write_calibration, write_cost
from hybridspec.artifacts.transport import read_package
from hybridspec.cli.main import run
from hybridspec.errors import BundleError

pytestmark = pytest.mark.examples
EXAMPLES = int(os.environ.get("HYBRIDSPEC_TEST_EXAMPLES", "100"))
RULES = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A bundle to damage, and another whose files are put in its place."""

    bundle: Path
    other: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kit = bundle_kit()
    folder = tmp_path_factory.mktemp("reader")
    other = folder / "other"
    write_calibration(other, **kit.calibration_arguments(1.5))
    write_cost(other, **kit.cost_arguments(step=kit.make_step(2.0)))
    return Pair(kit.make_bundle(folder / "bundle"), other)


def numbers(value: Any) -> Any:
    """Everything that was read, as plain values; paths and warnings aside."""
    if isinstance(value, pa.Table):
        return value.to_pydict()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
        # Provenance is for people: no digest covers it, and nothing is computed from it.
        fields = [n for n in fields if n not in ("folder", "manifest", "warnings", "provenance")]
        return {name: numbers(getattr(value, name)) for name in fields}
    return value


def read(folder: Path) -> Any:
    """Numbers of a bundle, or None where it is refused in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bundle: Bundle = load_bundle(folder)
        except BundleError as error:
            refusal = str(error)
        else:
            return numbers(bundle)
    assert "\n" not in refusal
    assert len(refusal) > 20
    return None


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".parquet", ".json"))


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Bit flips, a cut, a hole, a repeated stretch, or zeros."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        length = draw(st.integers(1, 64))
        match draw(st.sampled_from(["bit", "cut", "hole", "repeat", "zeros", "append"])):
            case "bit" if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del found[at:]
            case "hole":
                del found[at : at + length]
            case "repeat":
                found[at:at] = found[at : at + length]
            case "zeros":
                found[at : at + length] = bytes(len(found[at : at + length]))
            case _:
                found += draw(st.binary(min_size=1, max_size=8))
    return bytes(found)


@contextlib.contextmanager
def put(path: Path, data: bytes) -> Iterator[None]:
    original = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(original)


@RULES
@given(data=st.data())
def test_damaged_file_is_refused_or_equal(pair: Pair, data: st.DataObject) -> None:
    intact = read(pair.bundle)
    path = data.draw(st.sampled_from(files_of(pair.bundle)))
    with put(path, data.draw(damage(path.read_bytes()))):
        assert read(pair.bundle) in (None, intact)


@RULES
@given(data=st.data())
def test_swapped_files_are_refused_or_equal(pair: Pair, data: st.DataObject) -> None:
    intact, other = read(pair.bundle), read(pair.other)
    mine = files_of(pair.bundle)
    path = data.draw(st.sampled_from(mine))
    donor = data.draw(st.sampled_from([*mine, *files_of(pair.other)]))
    with put(path, donor.read_bytes()):
        assert read(pair.bundle) in (None, intact, other)


def test_whole_part_of_another_bundle_is_refused(pair: Pair, tmp_path: Path) -> None:
    for part in ("cost", "calibration"):
        mixed = shutil.copytree(pair.bundle, tmp_path / part)
        shutil.rmtree(mixed / part)
        shutil.copytree(pair.other / part, mixed / part)
        assert read(mixed) is None


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_damaged_archive_is_refused_or_equal(pair: Pair, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"bundle{ending}"
    write_archive(path, read_package(pair.bundle), card="card\n")
    intact = read_archive(path)

    @RULES
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        with put(path, data.draw(damage(path.read_bytes()))):
            try:
                package = read_archive(path)
            except BundleError as error:
                refusal = str(error)
            else:
                assert package.payloads == intact.payloads
                assert package.manifest.content_id == intact.manifest.content_id
                return
        assert refusal

    one()


@settings(RULES, max_examples=max(20, EXAMPLES // 5))
@given(data=st.data())
def test_commands_never_fail_on_a_damaged_bundle(pair: Pair, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(pair.bundle)))
    words = data.draw(st.sampled_from([["show"], ["verify"], ["show", "--json"]]))
    with put(path, data.draw(damage(path.read_bytes()))), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(["bundle", words[0], str(pair.bundle), *words[1:]])
    assert code in (0, 3, 5), err.getvalue()
    assert "Traceback" not in err.getvalue()
