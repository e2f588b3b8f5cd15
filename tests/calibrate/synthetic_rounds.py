"""Rounds drawn from known hazards, so that a fit can be compared with the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.calibrate.features import position_features
from hybridspec.calibrate.rounds import TraceIdentity, check_trace, with_identity

Floats = npt.NDArray[np.float64]
CATEGORIES = ("code", "prose", "chat")


def make_identity(**changes: Any) -> TraceIdentity:
    fields: dict[str, Any] = {
        "target_digest": "a" * 64,
        "drafter_digest": "b" * 64,
        "layers": 0,
        "topk": 0,
        "experts": 0,
        "vocab_size": 4096,
        "temperature": 0.0,
        "max_new_tokens": 96,
        "prompts_digest": "c" * 64,
    }
    return TraceIdentity(**{**fields, **changes})


def true_hazards(features_RDF: Floats) -> Floats:
    """Under-confident drafter with a position effect, inside the family that is fitted."""
    weights = np.array([0.8, 0.9, 0.0, 0.0, 0.1])
    bias = 0.3 + 0.05 * np.arange(15)
    return 1.0 / (1.0 + np.exp(-(features_RDF @ weights + bias)))


def synthetic_trace(
    *, prompts: int = 60, rounds: int = 20, seed: int = 0, splits: bool = True, loops: bool = False
) -> pa.Table:
    """A trace of `prompts * rounds` rounds; every third prompt is a test prompt if `splits`."""
    rng = np.random.default_rng(seed)
    total = prompts * rounds
    p1 = np.clip(rng.beta(2.0, 1.2, (total, 15)), 0.02, 0.999).astype(np.float32)
    p2 = np.minimum((1 - p1) * rng.uniform(0.2, 0.8, p1.shape), p1).astype(np.float32)
    entropy = rng.uniform(0.0, 3.0, p1.shape).astype(np.float32)
    prompt = np.repeat(np.arange(prompts), rounds)
    step = np.tile(np.arange(rounds), prompts)
    generated = np.zeros(total, dtype=np.int64)
    accepted = np.zeros(total, dtype=np.int64)
    anchor = rng.integers(0, 99, total)
    draws = rng.uniform(size=p1.shape)
    drafts = rng.integers(0, 99, (total, 15))
    targets = rng.integers(0, 99, (total, 16))
    for now in range(rounds):
        rows = np.flatnonzero(step == now)
        if now:
            before = rows - 1
            generated[rows] = generated[before] + accepted[before] + 1
            anchor[rows] = targets[before, accepted[before]]
        features = position_features(p1[rows], p2[rows], entropy[rows], 40 + generated[rows])
        hazards = true_hazards(features)
        accepted[rows] = np.cumprod(draws[rows] < hazards, axis=1).sum(axis=1)
        # The target agrees with the accepted drafts and with no draft after them.
        taken = np.arange(15) < accepted[rows][:, None]
        other = (drafts[rows] + 1 + targets[rows, :15] % 97) % 99
        targets[rows, :15] = np.where(taken, drafts[rows], other)
    context = 40 + generated
    columns = {
        "prompt_id": [f"p{i:03d}" for i in prompt],
        "category": [CATEGORIES[i % 3] for i in prompt // 3],
        "split": ["test" if splits and i % 3 == 0 else "calibration" for i in prompt],
        "round": step,
        "generated_tokens": generated,
        "context_tokens": context,
        "loop_period": np.where(loops & (step % 7 == 6), 5, 0),
        "accepted": accepted,
        "anchor": anchor,
        "draft_tokens": drafts,
        "target_tokens": targets,
        "p1": p1,
        "p2": p2,
        "entropy_nats": entropy,
        "target_p1": rng.uniform(0, 1, (total, 16)),
        "routes": [b""] * total,
    }
    table = with_identity(table_from(columns, TRACE_SCHEMA), make_identity())
    return check_trace(table, path="synthetic")
