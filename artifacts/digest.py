"""SHA-256 digests of content: canonical JSON, Arrow tables, files and model folders."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hybridspec.errors import BundleError, ModelError

WHOLE_FILE_BYTES = 1 << 30
WINDOW_BYTES = 1 << 20
NUM_WINDOWS = 64
PADDING_KEY = "hybridspec_padding"
"""Key of `config.json` under which a padded pair says what it was made from."""
_CHUNK_BYTES = 1 << 22
_VOLATILE_CONFIG_KEYS = frozenset({"transformers_version"})


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only and no NaN: equal values give equal bytes."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def json_digest(value: Any) -> str:
    """Digest of a JSON value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def bytes_digest(data: bytes) -> str:
    """Digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def table_digest(table: pa.Table) -> str:
    """Digest of a table's content: column names, types and values in row order.

    Independent of the Parquet writer, compression, chunks, schema metadata, host and time. Row
    order counts, because it means something in every table we write. Nulls are refused.
    """
    digest = hashlib.sha256()
    digest.update(f"rows {table.num_rows}\n".encode())
    for name in table.column_names:
        digest.update(f"column {name}\n".encode())
        column = table.column(name)
        chunk = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(chunk, pa.ChunkedArray):
            chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], chunk.type)
        _update(digest, chunk, name)
    return digest.hexdigest()


def _update(digest: Any, array: pa.Array, name: str) -> None:
    if array.null_count:
        raise BundleError(
            f"column {name!r} has {array.null_count} null value(s); none is allowed: "
            "fill or drop them"
        )
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        digest.update(b"list\n")
        digest.update(
            np.asarray(pc.call_function("list_value_length", [array])).astype("<i8").tobytes()
        )
        _update(digest, pc.call_function("list_flatten", [array]), name)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        digest.update(f"{kind}\n".encode())
        digest.update(
            np.asarray(pc.call_function("binary_length", [array])).astype("<i8").tobytes()
        )
        for value in array.cast(pa.binary()).to_pylist():
            digest.update(value)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        digest.update(f"{kind}\n".encode())
        values = array.to_numpy(zero_copy_only=False)
        digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes())
    else:
        raise BundleError(
            f"column {name!r} has type {kind}; a digest knows integers, floats, strings, binary "
            "and lists of them: convert the column"
        )


def config_digest(folder: Path) -> str:
    """Digest of the semantic fields of `config.json`: the architecture, without the weights.

    Left out: keys that begin with `_` and the version of the library that wrote the file.
    `torch_dtype` counts as `dtype`, its newer name.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} has no config.json; a model folder in Hugging Face layout is needed: "
            "check the path"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}; expected an object")
    return json_digest(_semantic(config))


def _semantic(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            ("dtype" if key == "torch_dtype" else key): _semantic(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in _VOLATILE_CONFIG_KEYS
        }
    return [_semantic(item) for item in value] if isinstance(value, list) else value


def model_digest(folder: Path) -> str:
    """Digest of a model folder: semantic config and the safetensors files with their names.

    Files are hashed whole while the folder holds at most 1 GiB of them. Above that each file
    counts with its size, its safetensors header and 64 windows of 1 MiB at evenly spaced offsets
    (first and last included): enough to tell checkpoints apart in seconds, not a proof against a
    planted change.
    The same tensors sharded differently have another digest. A padded pair without weight files
    (`hybridspec.demo.inflate --no-weights`) is told by its config alone.
    """
    files = sorted(folder.glob("*.safetensors"))
    entries: list[dict[str, Any]] = []
    try:
        sizes = {path.name: path.stat().st_size for path in files}
        whole = sum(sizes.values()) <= WHOLE_FILE_BYTES
        for path in files:
            digest = file_digest(path) if whole else _sampled_digest(path, sizes[path.name])
            entries.append({"name": path.name, "bytes": sizes[path.name], "sha256": digest})
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error
    config = config_digest(folder)
    if not files and PADDING_KEY in json.loads((folder / "config.json").read_bytes()):
        # Made while an engine loads, from a pair whose digests the config holds.
        return json_digest({"config": config, "whole": True, "files": []})
    if not files:
        raise ModelError(
            f"{folder} holds no *.safetensors file; weights in safetensors are needed: "
            "check the path"
        )
    return json_digest({"config": config, "whole": whole, "files": entries})


def _sampled_digest(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256(f"{num_bytes}\n".encode())
    with path.open("rb") as file:
        header_bytes = min(int.from_bytes(file.read(8), "little"), num_bytes, 100 << 20)
        digest.update(file.read(header_bytes))
        last = max(num_bytes - WINDOW_BYTES, 0)
        for index in range(NUM_WINDOWS):
            file.seek(last * index // (NUM_WINDOWS - 1), os.SEEK_SET)
            digest.update(file.read(WINDOW_BYTES))
    return digest.hexdigest()
