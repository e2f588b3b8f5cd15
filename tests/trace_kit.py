"""Small traces with routes, written as files, for commands and replays that read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.calibrate.rounds import TraceIdentity, check_trace, with_identity

sys.path.insert(0, str(Path(__file__).parent / "artifacts"))
LAYERS, TOPK, EXPERTS = 2, 2, 16
CATEGORIES = ("code", "prose")
LATENCY_US = [4000.0, *(4800.0 + 300.0 * row for row in range(16))]


def make_identity(**changes: Any) -> TraceIdentity:
    fields: dict[str, Any] = {
        "target_digest": "a" * 64,
        "drafter_digest": "b" * 64,
        "layers": LAYERS,
        "topk": TOPK,
        "experts": EXPERTS,
        "vocab_size": 99,
        "temperature": 0.0,
        "max_new_tokens": 96,
        "prompts_digest": "c" * 64,
    }
    return TraceIdentity(**(fields | changes))


def make_trace(
    *,
    prompts: int = 48,
    rounds: int = 12,
    seed: int = 0,
    routes: bool = True,
    first_prompt: int = 0,
    identity: TraceIdentity | None = None,
) -> pa.Table:
    """Rounds whose drafts are accepted as often as p1 says; every third prompt is held out."""
    rng = np.random.default_rng(seed)
    total = prompts * rounds
    prompt = np.repeat(np.arange(prompts), rounds)
    step = np.tile(np.arange(rounds), prompts)
    ease = np.where(prompt // 3 % 2 == 0, 5.0, 1.5)[:, None]
    p1 = np.clip(rng.beta(ease, 1.2, (total, 15)), 0.02, 0.999).astype(np.float32)
    accepted = np.cumprod(rng.random(p1.shape) < p1, axis=1).sum(axis=1)
    emitted = (accepted + 1).reshape(prompts, rounds)
    generated = 1 + (np.cumsum(emitted, axis=1) - emitted).ravel()
    # A row's two experts differ.
    first = rng.integers(0, EXPERTS, (total, LAYERS, 16, 1))
    second = (first + rng.integers(1, EXPERTS, first.shape)) % EXPERTS
    experts = np.concatenate([first, second], axis=3).astype(np.uint8)
    drafts, targets = rng.integers(0, 99, (total, 15)), rng.integers(0, 99, (total, 16))
    # The target agrees with the accepted drafts and not with the one after them.
    taken = np.arange(15) < accepted[:, None]
    targets[:, :15] = np.where(taken, drafts, (drafts + 1 + targets[:, :15] % 97) % 99)
    ended = targets[np.arange(total), accepted]
    anchor = np.where(step == 0, ended[::-1], np.roll(ended, 1))
    columns = {
        "prompt_id": [f"p{i + first_prompt:06d}" for i in prompt],
        "category": [CATEGORIES[i // 3 % 2] for i in prompt],
        "split": ["test" if i % 3 == 0 else "calibration" for i in prompt],
        "round": step,
        "generated_tokens": generated,
        "context_tokens": 40 + generated,
        "loop_period": np.where(step == rounds - 1, 4, 0),
        "accepted": accepted,
        "anchor": anchor,
        "draft_tokens": drafts,
        "target_tokens": targets,
        "p1": p1,
        "p2": (np.minimum(p1, 1 - p1) / 2).astype(np.float32),
        "entropy_nats": rng.uniform(0.0, 3.0, p1.shape),
        "target_p1": rng.uniform(0, 1, (total, 16)),
        "routes": [block.tobytes() if routes else b"" for block in experts],
    }
    table = with_identity(table_from(columns, TRACE_SCHEMA), identity or make_identity())
    return check_trace(table, path="made")


def write_trace(path: Path, table: pa.Table | None = None, *, row_group: int = 200) -> Path:
    pq.write_table(make_trace() if table is None else table, path, row_group_size=row_group)
    return path


def as_recording(table: pa.Table) -> pa.Table:
    """The same rounds in the older column names, interleaved by round as they were decoded."""
    old = {
        "seq": [int(name[1:]) for name in table["prompt_id"].to_pylist()],
        "cat": table["category"],
        "split": ["calib" if s == "calibration" else "test" for s in table["split"].to_pylist()],
        "round": table["round"],
        "gen_pos": pa.array(table["generated_tokens"].to_numpy() - 1),
        "period": table["loop_period"],
        "n_acc": table["accepted"],
        "anchor": table["anchor"],
        "draft": table["draft_tokens"].cast(pa.list_(pa.int32())),
        "target": table["target_tokens"].cast(pa.list_(pa.int32())),
        "p1": table["p1"].cast(pa.list_(pa.float32())),
        "p2": table["p2"].cast(pa.list_(pa.float32())),
        "ent": table["entropy_nats"].cast(pa.list_(pa.float32())),
        "tp1": table["target_p1"].cast(pa.list_(pa.float32())),
        "routes": table["routes"],
    }
    metadata = {"layers": str(LAYERS), "topk": str(TOPK), "experts": str(EXPERTS)}
    recording = pa.table(old).sort_by([("round", "ascending"), ("seq", "ascending")])
    return recording.replace_schema_metadata(metadata)


def write_curve(path: Path, **changes: Any) -> Path:
    fields: dict[str, Any] = {
        "schema_id": "hybridspec.curve/1",
        "name": "made up",
        "draft_us": 800.0,
        "latency_us": LATENCY_US,
    }
    content = {key: value for key, value in (fields | changes).items() if value is not None}
    path.write_text(json.dumps(content))
    return path
