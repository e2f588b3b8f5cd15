"""One recorded round, and a trace of many: rows, identity, and the checks on their values."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hybridspec.artifacts.digest import canonical_json, table_digest
from hybridspec.artifacts.schemas import TRACE_SCHEMA, check_table, table_from
from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.calibrate.prompts import SPLITS
from hybridspec.errors import BundleError

IDENTITY_KEY = b"identity"
DIGEST_KEY = b"content_digest"


@dataclass(frozen=True)
class TraceIdentity:
    """What a trace was recorded with; equal identities give equal rounds.

    Attributes:
        target_digest: `artifacts.digest.model_digest` of the target folder.
        drafter_digest: the same of the drafter folder.
        layers: target layers with routed experts; 0 of a dense target.
        topk: experts a token and layer.
        experts: experts a layer.
        max_new_tokens: emitted for a prompt at most.
        prompts_digest: `calibrate.prompts.prompts_digest`.
        seed: of the sampling; without effect at temperature 0.
        group_size: prompts recorded together, one part file a group.
    """

    target_digest: str
    drafter_digest: str
    layers: int
    topk: int
    experts: int
    vocab_size: int
    temperature: float
    max_new_tokens: int
    prompts_digest: str
    dtype: str = "float32"
    top_p: float = 1.0
    seed: int = 0
    group_size: int = 8

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
            if not math.isfinite(getattr(self, name)):
                raise BundleError(f"trace identity: {name} must be finite")
        for name in ("layers", "topk", "experts"):
            if getattr(self, name) < 0:
                raise BundleError(f"trace identity: {name} = {getattr(self, name)}; need >= 0")

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: object, *, path: object) -> TraceIdentity:
        """Inverse of `to_json`.

        Raises:
            BundleError: not an object of exactly these fields and types.
        """
        kinds = {"str": str, "int": int, "float": float}
        names = {field.name: kinds[str(field.type)] for field in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != set(names):
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise BundleError(
                f"{path}: the trace's identity has {found}; expected {sorted(names)}: record it "
                "again"
            )
        for name, kind in names.items():
            good = type(raw[name]) is kind or (kind is float and type(raw[name]) is int)
            if not good:
                raise BundleError(
                    f"{path}: identity field {name} = {raw[name]!r}; expected a {kind.__name__}: "
                    "record the trace again"
                )
        return cls(**raw)

    def bytes_per_expert(self) -> int:
        """Bytes of one expert id in `routes`: uint8 up to 256 experts, else uint16."""
        return 1 if self.experts <= 256 else 2

    def route_bytes(self) -> int:
        """Bytes of a round's `routes` if they are recorded."""
        return self.layers * BLOCK_SIZE * self.topk * self.bytes_per_expert()


@dataclass(frozen=True)
class RoundRow:
    """One round that was verified in full: a row of `TRACE_SCHEMA`, in whose words the fields are.

    Attributes:
        routes: expert ids [layers, 16, topk] in C order, uint8 or little-endian uint16; empty if
            not recorded.
    """

    prompt_id: str
    category: str
    split: str
    round: int
    generated_tokens: int
    context_tokens: int
    accepted: int
    anchor: int
    draft_tokens: Sequence[int]  # [15]
    target_tokens: Sequence[int]  # [16]
    p1: Sequence[float]  # [15]
    p2: Sequence[float]  # [15]
    entropy_nats: Sequence[float]  # [15]
    target_p1: Sequence[float]  # [16]
    routes: bytes = b""
    loop_period: int = 0

    def __post_init__(self) -> None:
        for name, length in (
            ("draft_tokens", NUM_DRAFTS),
            ("target_tokens", BLOCK_SIZE),
            ("p1", NUM_DRAFTS),
            ("p2", NUM_DRAFTS),
            ("entropy_nats", NUM_DRAFTS),
            ("target_p1", BLOCK_SIZE),
        ):
            if len(getattr(self, name)) != length:
                raise BundleError(
                    f"round {self.round} of {self.prompt_id}: {name} has "
                    f"{len(getattr(self, name))} values; expected {length}"
                )


def rows_to_table(rows: Sequence[RoundRow], identity: TraceIdentity) -> pa.Table:
    """Rows as a checked trace table, in their order.

    Raises:
        BundleError: a value that a trace cannot hold.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in TRACE_SCHEMA.names}
    return check_trace(with_identity(table_from(columns, TRACE_SCHEMA), identity), path="rounds")


def with_identity(table: pa.Table, identity: TraceIdentity) -> pa.Table:
    """The table with `identity` in its schema metadata."""
    metadata = {**(table.schema.metadata or {}), IDENTITY_KEY: canonical_json(identity.to_json())}
    return table.replace_schema_metadata(metadata)


def sealed(table: pa.Table) -> pa.Table:
    """The table with the digest of its content in its metadata; `check_trace` verifies it."""
    metadata = {**(table.schema.metadata or {}), DIGEST_KEY: table_digest(table).encode()}
    return table.replace_schema_metadata(metadata)


def trace_identity(table: pa.Table, *, path: object) -> TraceIdentity:
    """The identity in a trace's schema metadata."""
    raw = (table.schema.metadata or {}).get(IDENTITY_KEY)
    if raw is None:
        raise BundleError(f"{path}: the trace names no identity: record it again")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: the trace's identity is damaged: record it again") from error
    return TraceIdentity.from_json(value, path=path)


def check_trace(table: pa.Table, *, path: object) -> pa.Table:
    """Check a trace against its seal, schema, identity and ranges; columns in schema order.

    Raises:
        BundleError: with the column, the value, and what is allowed.
    """
    table = check_table(table, TRACE_SCHEMA, path=path)
    metadata = dict(table.schema.metadata)
    seal = metadata.pop(DIGEST_KEY, None)
    if seal is not None and seal != table_digest(table).encode():
        raise BundleError(
            f"{path}: its content is not what was written: it is damaged; record again"
        )
    table = table.replace_schema_metadata(metadata)
    identity = trace_identity(table, path=path)
    ranges: dict[str, tuple[float, float]] = {
        "round": (0, np.inf),
        "generated_tokens": (0, np.inf),
        "context_tokens": (0, np.inf),
        "loop_period": (0, np.inf),
        "accepted": (0, NUM_DRAFTS),
        "p1": (0, 1),
        "p2": (0, 1),
        # Sums of float32 logarithms: an entropy of 0 may come out a hair below.
        "entropy_nats": (-1e-3, np.inf),
        "target_p1": (0, 1 + 1e-5),
    }
    for name, (low, high) in ranges.items():
        column = table.column(name)
        values = np.asarray(
            (column.combine_chunks().flatten() if name in _ROWS else column).to_numpy()
        )
        bad = values[(values < low) | (values > high + (1e-5 if name in ("p1", "p2") else 0))]
        if bad.size:
            raise BundleError(
                f"{path}: column {name!r} has {bad.size} value(s) such as {bad[0]}; allowed are "
                f"{low:g} to {high:g}: record it again"
            )
    splits = set(table.column("split").unique().to_pylist()) - set(SPLITS)
    if splits:
        raise BundleError(
            f"{path}: column 'split' has {sorted(splits)[0]!r}; allowed are {' and '.join(SPLITS)}"
        )
    _check_routes(table, identity, path)
    return table


_ROWS = ("p1", "p2", "entropy_nats", "target_p1")


def _check_routes(table: pa.Table, identity: TraceIdentity, path: object) -> None:
    sizes = pc.call_function("binary_length", [table.column("routes")])
    lengths = set(sizes.unique().to_pylist())
    expected = identity.route_bytes()
    if lengths - {0, expected} or len(lengths) > 1:
        raise BundleError(
            f"{path}: routes have {sorted(lengths)} bytes; a round has {expected} "
            f"([{identity.layers}, {BLOCK_SIZE}, {identity.topk}]), or none in any round: record "
            "it again"
        )
