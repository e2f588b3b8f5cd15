"""Digests follow the content and nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hybridspec.artifacts import digest
from hybridspec.artifacts.digest import (
    canonical_json,
    config_digest,
    json_digest,
    model_digest,
    table_digest,
)
from hybridspec.errors import BundleError, ModelError

rows_of = st.lists(
    st.tuples(
        st.integers(-(2**31), 2**31 - 1),
        st.floats(allow_nan=False, width=32),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.lists(st.integers(0, 255), max_size=4),
    ),
    max_size=12,
)


def build(rows: list[tuple[Any, ...]]) -> pa.Table:
    kinds = [pa.int32(), pa.float32(), pa.string(), pa.binary(), pa.list_(pa.uint8())]
    columns = list(zip(*rows, strict=True)) or [()] * 5
    names = ["i", "f", "s", "b", "l"]
    return pa.table({n: pa.array(c, k) for n, c, k in zip(names, columns, kinds, strict=True)})


@settings(max_examples=60, deadline=None)
@given(rows_of, st.integers(0, 12), st.sampled_from(["none", "zstd", "snappy"]))
def test_table_digest_ignores_chunks_writer_and_metadata(
    rows: list[tuple[Any, ...]], cut: int, compression: str
) -> None:
    table = build(rows)
    pieces = pa.concat_tables([table.slice(0, cut), table.slice(min(cut, table.num_rows))])
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"a": "b"}), buffer, compression=compression)
    expected = table_digest(table)
    assert table_digest(pieces) == expected
    assert table_digest(pq.read_table(pa.BufferReader(buffer.getvalue()))) == expected


@settings(max_examples=60, deadline=None)
@given(rows_of, rows_of)
def test_table_digest_tells_contents_apart(
    left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]
) -> None:
    one, other = build(left), build(right)
    # Bits count: 0.0 and -0.0 are equal to Arrow and different to a digest.
    same_bits = one.equals(other) and repr(left) == repr(right)
    assert (table_digest(one) == table_digest(other)) == same_bits


def test_table_digest_separates_neighbouring_values() -> None:
    assert table_digest(pa.table({"s": ["ab", "c"]})) != table_digest(pa.table({"s": ["a", "bc"]}))
    assert table_digest(pa.table({"a": [1]})) != table_digest(pa.table({"b": [1]}))
    wide = pa.table({"a": pa.array([1], pa.int64())})
    narrow = pa.table({"a": pa.array([1], pa.int32())})
    assert table_digest(wide) != table_digest(narrow)


def test_table_digest_is_stable_across_versions() -> None:
    table = pa.table({"x": pa.array([1.5, -2.0]), "s": ["a", "é"]})
    assert table_digest(table)[:16] == "1d5ceb4743a136ef"


def test_table_digest_refuses_nulls_and_unknown_types() -> None:
    with pytest.raises(BundleError, match="1 null"):
        table_digest(pa.table({"x": pa.array([1, None])}))
    with pytest.raises(BundleError, match="type timestamp"):
        table_digest(pa.table({"x": pa.array([0], pa.timestamp("s"))}))


def test_canonical_json_ignores_key_order_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'
    assert json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": float("nan")})


def make_model(folder: Path, *, config: dict[str, Any] | None = None, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    value = {"hidden_size": 8, "dtype": "float32", "text_config": {"layers": 2}}
    (folder / "config.json").write_text(json.dumps(value | (config or {})))
    weights = np.random.default_rng(seed).normal(size=(64, 8)).astype(np.float32)
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


def test_model_digest_counts_weights_and_semantic_config_only(tmp_path: Path) -> None:
    base = model_digest(make_model(tmp_path / "a"))
    note = {"transformers_version": "9", "_name_or_path": "/somewhere"}
    assert model_digest(make_model(tmp_path / "b", config=note)) == base
    assert model_digest(make_model(tmp_path / "c", seed=1)) != base
    assert model_digest(make_model(tmp_path / "d", config={"hidden_size": 9})) != base
    (tmp_path / "a" / "README.md").write_text("x")
    assert model_digest(tmp_path / "a") == base


def test_config_digest_reads_the_old_name_of_dtype(tmp_path: Path) -> None:
    new = make_model(tmp_path / "a")
    old = make_model(tmp_path / "b")
    config = json.loads((old / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (old / "config.json").write_text(json.dumps(config))
    assert config_digest(new) == config_digest(old)


def test_large_models_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "a")
    whole = model_digest(folder)
    monkeypatch.setattr(digest, "WHOLE_FILE_BYTES", 100)
    sampled = model_digest(folder)
    assert sampled not in (whole, "")
    assert model_digest(folder) == sampled
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert model_digest(folder) != sampled


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[1]", "holds a list"),
        ("model.safetensors", None, r"no \*.safetensors"),
    ],
)
def test_model_digest_refuses(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        model_digest(folder)
