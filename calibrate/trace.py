"""A trace on disk: a folder of numbered parts, written as recording goes, resumable after a "
"kill."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridspec.artifacts.atomic import remove_leftovers, write_json, write_parquet
from hybridspec.artifacts.lock import LOCK_NAME, FolderLock
from hybridspec.artifacts.store import MAX_MANIFEST_BYTES, decode_table, read_file
from hybridspec.calibrate.consistency import check_consistency
from hybridspec.calibrate.rounds import (
    RoundRow,
    TraceIdentity,
    check_trace,
    rows_to_table,
    sealed,
    trace_identity,
    with_identity,
)
from hybridspec.errors import BundleError, UsageError

RUN_NAME = "run.json"
RUN_SCHEMA = "hybridspec.trace.run/1"
MAX_PART_BYTES = 4 << 30
_PART = re.compile(r"part-([0-9]{5})\.parquet")


def _part_name(group: int) -> str:
    return f"part-{group:05d}.parquet"


class TraceWriter:
    """Writes a trace group by group; a killed run loses the group in flight and no more.

    Make one with `open`, use it as a context manager. A part file holds one fixed group of prompts,
    so a resumed run ends with the same rows in the same order as an unbroken one.

    Attributes:
        folder: of the trace.
        identity: of the run.
        num_groups: groups that make the trace complete.
    """

    def __init__(
        self, folder: Path, identity: TraceIdentity, *, num_groups: int, lock: FolderLock
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.num_groups = num_groups
        self._lock = lock

    @classmethod
    def open(
        cls, folder: Path, identity: TraceIdentity, *, num_groups: int, resume: bool = False
    ) -> TraceWriter:
        """Start a trace, or go on with one.

        Args:
            folder: created when missing; must be empty without `resume`.
            identity: must equal that of the trace to resume.
            num_groups: groups of prompts in the whole run.
            resume: keep the groups that are complete; an empty folder is started afresh.

        Raises:
            UsageError: the folder has content and `resume` is off.
            BundleError: the trace there was recorded with something else, or is damaged.
            EnvironmentMissing: another process writes it, or it cannot be written.
        """
        folder = Path(folder)
        if num_groups < 1:
            raise UsageError(f"num_groups = {num_groups}; a trace needs at least one group")
        lock = FolderLock(folder, wait=False)
        try:
            remove_leftovers(folder)
            content = [path.name for path in folder.iterdir() if path.name != LOCK_NAME]
            if content and not resume:
                raise UsageError(
                    f"{folder} is not empty ({len(content)} files); a new trace needs an empty "
                    "folder: add --resume to go on with the trace there, or choose another folder"
                )
            if RUN_NAME in content:
                _check_same_run(_read_run(folder), identity, num_groups, folder)
            elif content:
                raise BundleError(
                    f"{folder} has files but no {RUN_NAME}, so it is no trace to resume: choose an "
                    "empty folder"
                )
            else:
                run = {
                    "schema_id": RUN_SCHEMA,
                    "identity": identity.to_json(),
                    "num_groups": num_groups,
                }
                write_json(folder / RUN_NAME, run)
            writer = cls(folder, identity, num_groups=num_groups, lock=lock)
            for group in writer.completed:
                _read_part(folder / _part_name(group), identity)
        except BaseException:
            lock.release()
            raise
        return writer

    @property
    def completed(self) -> frozenset[int]:
        """Indices of the groups that are on disk."""
        return frozenset(_groups(self.folder))

    def write_group(self, group: int, rows: Sequence[RoundRow]) -> None:
        """Write one group's rounds, in the order given, atomically.

        Raises:
            UsageError: the index is out of range or already written.
            BundleError: a value that a trace cannot hold.
            EnvironmentMissing: full disk; the groups written before are kept.
        """
        if not 0 <= group < self.num_groups:
            raise UsageError(f"group {group} is not in 0..{self.num_groups - 1}")
        path = self.folder / _part_name(group)
        if path.exists():
            raise UsageError(f"{path} is already written; each group is written once")
        write_parquet(path, sealed(rows_to_table(rows, self.identity)))

    def close(self) -> None:
        """Let another writer in. Idempotent."""
        self._lock.release()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: Path, *, allow_partial: bool = False) -> pa.Table:
    """Read a trace folder or a single trace file and check it.

    Args:
        path: a folder that `TraceWriter` wrote, or one Parquet file of `TRACE_SCHEMA`.
        allow_partial: accept a folder with groups missing.

    Returns:
        a table of `TRACE_SCHEMA` with the identity in its metadata; rows in the order of an
        unbroken run.

    Raises:
        BundleError: missing, damaged, of another version, incomplete, or of rounds that do not
            belong together.
    """
    path = Path(path)
    if not path.is_dir():
        table = decode_table(read_file(path, max_bytes=MAX_PART_BYTES), path=path)
        return check_consistency(check_trace(table, path=path), path=path)
    identity, num_groups = _read_run(path)
    groups = _groups(path)
    unknown = sorted(set(groups) - set(range(num_groups)))
    if unknown:
        raise BundleError(
            f"{path} has a part {unknown[0]}, but {RUN_NAME} says {num_groups} groups: delete that "
            "part"
        )
    if not groups or (len(groups) < num_groups and not allow_partial):
        raise BundleError(
            f"{path} has {len(groups)} of {num_groups} groups of prompts; a complete trace is "
            "needed: go on recording it with --resume"
        )
    parts = [_read_part(path / _part_name(group), identity) for group in groups]
    table = pa.concat_tables([part.replace_schema_metadata(None) for part in parts])
    table = table.replace_schema_metadata(parts[0].schema.metadata)
    return check_consistency(check_trace(with_identity(table, identity), path=path), path=path)


def _groups(folder: Path) -> list[int]:
    matches = (_PART.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def _read_part(path: Path, identity: TraceIdentity) -> pa.Table:
    table = check_trace(
        decode_table(read_file(path, max_bytes=MAX_PART_BYTES), path=path), path=path
    )
    if trace_identity(table, path=path) != identity:
        raise BundleError(
            f"{path} was recorded with something else than {RUN_NAME} says: delete that part and "
            "go on with --resume"
        )
    return table


def _read_run(folder: Path) -> tuple[TraceIdentity, int]:
    path = folder / RUN_NAME
    try:
        raw: Any = json.loads(read_file(path, max_bytes=MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not valid JSON: record the trace again") from error
    if not isinstance(raw, dict) or raw.get("schema_id") != RUN_SCHEMA:
        found = raw.get("schema_id") if isinstance(raw, dict) else type(raw).__name__
        raise BundleError(
            f"{path} has schema {found!r}; this version reads {RUN_SCHEMA!r}: record the trace "
            "again"
        )
    num_groups = raw.get("num_groups")
    if type(num_groups) is not int or num_groups < 1:
        raise BundleError(f"{path} has num_groups = {num_groups!r}; need >= 1: record it again")
    return TraceIdentity.from_json(raw.get("identity"), path=path), num_groups


def _check_same_run(
    saved: tuple[TraceIdentity, int], identity: TraceIdentity, num_groups: int, folder: Path
) -> None:
    before = {**saved[0].to_json(), "num_groups": saved[1]}
    now = {**identity.to_json(), "num_groups": num_groups}
    for name, value in before.items():
        if value != now[name]:
            if name == "prompts_digest":  # nobody can type the old value of a digest
                raise BundleError(
                    f"{folder}: the trace there was recorded on other prompts "
                    f"({_groups_of(before)} then, {_groups_of(now)} now); a resumed run must be "
                    "the same: give the same --prompts, --max-prompts, --test-fraction and --chat, "
                    "or use another folder"
                )
            raise BundleError(
                f"{folder}: the trace there was recorded with {name} = {value!r}, now it is "
                f"{now[name]!r}; a resumed run must be the same: use the old value or another "
                "folder"
            )


def _groups_of(run: dict[str, Any]) -> str:
    most = run["num_groups"] * run["group_size"]
    return f"{run['num_groups']} groups, at most {most} prompts"
