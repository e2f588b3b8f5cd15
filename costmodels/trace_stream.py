"""Reading a trace piece by piece, whole prompts at a time, so that its size does not matter.

Two layouts are read: traces of `hybridspec calibrate` (a folder of parts or one Parquet file), and
recordings in older column names (`calibrate/recording.py`).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridspec.artifacts.schemas import TRACE_SCHEMA, schema_id
from hybridspec.artifacts.store import MAX_MANIFEST_BYTES, read_file
from hybridspec.artifacts.tables import IntArray
from hybridspec.calibrate.consistency import check_consistency
from hybridspec.calibrate.recording import (
    is_recording,
    mark_loops,
    recording_identity,
    trace_from_recording,
)
from hybridspec.calibrate.rounds import (
    DIGEST_KEY,
    TraceIdentity,
    check_trace,
    trace_identity,
)
from hybridspec.calibrate.trace import RUN_NAME, read_trace
from hybridspec.errors import BundleError

ROWS_AT_ONCE = 16384
# A single file up to this size is read whole, so that its seal can be checked.
WHOLE_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class TraceStream:
    """A trace that is read as often as wanted, one piece after the other.

    Attributes:
        path: a folder of parts or a Parquet file.
        identity: what it was recorded with.
        is_recording: whether it has the older column names.
        num_rounds: rows of all parts.
    """

    path: Path
    identity: TraceIdentity
    is_recording: bool
    num_rounds: int

    def pieces(self, *, rows: int = ROWS_AT_ONCE) -> Iterator[pa.Table]:
        """Yields checked trace tables of whole prompts, rows by prompt, then round.

        Args:
            rows: rows to read at once; a piece has about as many, or one prompt.

        Raises:
            BundleError: damaged or impossible values, rounds that do not follow each other or are
                there twice, rounds of a prompt that lie far apart, or parts of two recordings.
        """
        done: set[str] = set()
        pending: pa.Table | None = None
        for batch in self._batches(rows):
            names = set(batch.column("prompt_id").unique().to_pylist())
            again = sorted(names & done)
            if again:
                raise BundleError(
                    f"{self.path}: rounds of prompt {again[0]!r} lie more than {rows} rows apart "
                    "(or the trace holds it twice): sort the trace by prompt and round"
                )
            if pending is not None:
                complete, pending = _split(pending, names)
                if complete.num_rows:
                    done |= set(complete.column("prompt_id").unique().to_pylist())
                    yield self._checked(complete)
            pending = batch if pending is None else pa.concat_tables([pending, batch])
        if pending is not None and pending.num_rows:
            yield self._checked(pending)

    def _checked(self, piece: pa.Table) -> pa.Table:
        # Parts of a folder were checked as they were read.
        if not self.path.is_dir():
            check_consistency(piece, path=self.path)
        ordered = _ordered(piece)
        return mark_loops(ordered) if self.is_recording else ordered

    def _batches(self, rows: int) -> Iterator[pa.Table]:
        if self.path.is_dir():
            yield from _part_batches(self.path, self.identity, rows)
            return
        with _refusing(self.path):
            file = _parquet(self.path)
        batches = file.iter_batches(batch_size=rows, use_threads=False)
        while True:
            with _refusing(self.path):
                batch = next(batches, None)
            if batch is None:
                return
            table = pa.Table.from_batches([batch])
            if self.is_recording:
                yield trace_from_recording(table, self.identity, path=self.path)
            else:
                yield check_trace(_unsealed(table), path=self.path)


def open_trace(path: Path) -> TraceStream:
    """Returns the trace at a path, its kind and identity checked.

    Raises:
        BundleError: missing, truncated, foreign, or without an identity.
    """
    path = Path(path)
    if path.is_dir():
        _check_complete(path)
        first = next(_part_batches(path, None, 1), None)
        if first is None:
            raise BundleError(
                f"{path} holds no part-*.parquet, so no trace of `hybridspec calibrate`: give a "
                "folder that it recorded, or a Parquet file"
            )
        with _refusing(path):
            rows = sum(_parquet(part).metadata.num_rows for part in _parts(path))
        return TraceStream(path, trace_identity(first, path=path), False, rows)
    _require_regular(path)
    with _refusing(path):
        file = _parquet(path)
        schema, num_rounds = file.schema_arrow, file.metadata.num_rows
    names = set(schema.names)
    recording = is_recording(names)
    if not recording and schema_id(schema).split("/")[0] != schema_id(TRACE_SCHEMA).split("/")[0]:
        missing = sorted(set(TRACE_SCHEMA.names) - names)
        lacks = repr(missing[0]) if missing else "a schema id"
        raise BundleError(
            f"{path} is Parquet, but no trace: it lacks {lacks}: record one with `hybridspec "
            "calibrate`"
        )
    if num_rounds == 0:
        raise BundleError(f"{path} holds no round: record more prompts")
    if recording:
        return TraceStream(path, recording_identity(schema, path=path), True, num_rounds)
    if path.stat().st_size <= WHOLE_FILE_BYTES:
        read_trace(path)
    empty = schema.empty_table().replace_schema_metadata(schema.metadata)
    return TraceStream(path, trace_identity(empty, path=path), False, num_rounds)


def _part_batches(folder: Path, identity: TraceIdentity | None, rows: int) -> Iterator[pa.Table]:
    """Yields whole parts, several together until they have `rows` rounds."""
    held: list[pa.Table] = []
    for part in _parts(folder):
        table = read_trace(part)
        found = trace_identity(table, path=part)
        identity = identity or found
        if found != identity:
            raise BundleError(
                f"{part} was recorded with something else than the parts before it: keep traces of "
                "different pairs or settings in folders of their own"
            )
        held.append(table)
        if sum(t.num_rows for t in held) >= rows:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _check_complete(folder: Path) -> None:
    """Refuse a folder whose recording was interrupted: its prompts are the first ones only."""
    run = folder / RUN_NAME
    if not run.exists():
        return
    try:
        wanted = json.loads(read_file(run, max_bytes=MAX_MANIFEST_BYTES))["num_groups"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f"{run} is damaged: record the trace again") from error
    found = len(_parts(folder))
    if not isinstance(wanted, int) or found < wanted:
        raise BundleError(
            f"{folder} has {found} of {wanted} groups of prompts; a complete trace is needed: go "
            "on recording it with --resume"
        )


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _parquet(path: Path) -> pq.ParquetFile:
    # A small buffer: else whole column chunks of a row group are held in memory.
    return pq.ParquetFile(
        path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
    )


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns whatever Arrow makes of damaged bytes into a refusal."""
    try:
        yield
    except (BundleError, KeyboardInterrupt):
        raise
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BundleError(
            f"{path} is not a readable Parquet file ({detail}): it is truncated, damaged or "
            "another kind of file; fetch or record it again"
        ) from error


def _require_regular(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}); a trace is a Parquet file or a folder of "
            "them: check the path"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is neither a file nor a folder: check the path")


def _unsealed(table: pa.Table) -> pa.Table:
    """The table without the digest of the whole file, which a piece cannot have."""
    metadata = dict(table.schema.metadata or {})
    metadata.pop(DIGEST_KEY, None)
    return table.replace_schema_metadata(metadata)


def _split(table: pa.Table, going_on: set[str]) -> tuple[pa.Table, pa.Table]:
    encoded = table.column("prompt_id").combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    open_code = np.asarray([name in going_on for name in encoded.dictionary.to_pylist()])
    goes_on = open_code[np.asarray(encoded.indices)]
    return table.filter(pa.array(~goes_on)), table.filter(pa.array(goes_on))


def _ordered(table: pa.Table) -> pa.Table:
    """The piece by prompt, then round."""
    encoded = table.column("prompt_id").combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    prompt = np.asarray(encoded.indices).astype(np.int64)
    number = table.column("round").to_numpy().astype(np.int64)
    order: IntArray = np.lexsort((number, prompt))
    if np.all(order[1:] > order[:-1]):
        return table
    return table.take(pa.array(order))
