"""Recorded rounds of trained pairs, which lie beside the repository, as traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.calibrate.loops import round_loop_periods
from hybridspec.calibrate.rounds import TraceIdentity, check_trace, with_identity
from hybridspec.errors import EnvironmentMissing

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
# The recordings do not keep prompt lengths; their prompts are about this long.
PROMPT_TOKENS = 160


def recorded_trace(name: str) -> pa.Table:
    """The trace of a pair, rounds sorted by prompt.

    Raises:
        EnvironmentMissing: it is not there.
    """
    path = TRACES / f"{name}-rounds.parquet"
    if not path.exists():
        raise EnvironmentMissing(
            f"recorded rounds of the {name} pair are not beside the repository: put "
            f"{path.name} into ../shared/traces"
        )
    old = pq.read_table(path).sort_by([("seq", "ascending"), ("round", "ascending")])
    metadata = {key.decode(): value.decode() for key, value in old.schema.metadata.items()}
    draft, target, p1, p2, entropy, target_p1 = (
        np.asarray(old.column(column).combine_chunks().flatten()).reshape(old.num_rows, -1)
        for column in ("draft", "target", "p1", "p2", "ent", "tp1")
    )
    accepted, anchor = old.column("n_acc").to_numpy(), old.column("anchor").to_numpy()
    prompt = old.column("seq").to_numpy()
    loop_period = np.zeros(old.num_rows, dtype=np.int64)
    for rows in np.split(np.arange(old.num_rows), np.flatnonzero(np.diff(prompt)) + 1):
        tokens, starts = [int(anchor[rows[0]])], []
        for row in rows:
            starts.append(len(tokens))
            tokens += [*draft[row, : accepted[row]].tolist(), int(target[row, accepted[row]])]
        stops = [*starts[1:], len(tokens)]
        loop_period[rows] = round_loop_periods(tokens, starts=starts, stops=stops)
    generated = old.column("gen_pos").to_numpy()
    columns = {
        "prompt_id": [str(value) for value in prompt],
        "category": old.column("cat").to_pylist(),
        "split": ["test" if s == "test" else "calibration" for s in old["split"].to_pylist()],
        "round": old.column("round").to_numpy(),
        "generated_tokens": generated,
        "context_tokens": generated + PROMPT_TOKENS,
        "loop_period": loop_period,
        "accepted": accepted,
        "anchor": anchor,
        "draft_tokens": draft,
        "target_tokens": target,
        "p1": p1,
        "p2": p2,
        "entropy_nats": entropy,
        "target_p1": target_p1,
        "routes": old.column("routes").to_pylist(),
    }
    identity = TraceIdentity(
        target_digest=f"{name}-target",
        drafter_digest=f"{name}-drafter",
        layers=int(metadata["layers"]),
        topk=int(metadata["topk"]),
        experts=int(metadata["experts"]),
        vocab_size=int(max(draft.max(), target.max())) + 1,
        temperature=0.0,
        max_new_tokens=int(generated.max()) + 1,
        prompts_digest=f"{name}-prompts",
    )
    return check_trace(with_identity(table_from(columns, TRACE_SCHEMA), identity), path=path)
