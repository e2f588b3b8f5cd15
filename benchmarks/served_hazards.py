"""Host time of the policy's select stage a round, by hazard table and by trees, recorded rounds.

    python benchmarks/served_hazards.py [--trace PATH] [--rounds N] [--out DIR]

Requests of the lab recording run side by side as an engine would run them: signals in, lengths out,
history observed. Also counts how often the served lengths differ from a replay's with the same
trees; a single one would be a fault. Times are medians over rounds, in us.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from replay_lab import CURVE, TRACE
from results_file import machine, write_results

from hybridspec.artifacts.tables import TABLE, TREES, StepCostTable, ThroughputTable
from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.context import context_features
from hybridspec.calibrate.distilled import DistilledTable
from hybridspec.calibrate.features import TraceArrays, list_column
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.calibrate.served import HazardFunction
from hybridspec.costmodels.policies import Dinkelbach
from hybridspec.costmodels.prediction import load_price
from hybridspec.costmodels.recorded import fit_rounds, of_split, round_set
from hybridspec.costmodels.throughput import fit_batch
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.hazards import RequestHistory, ServedHazards, TableHazards, TreeHazards
from hybridspec.policy import Policy

BATCHES = (1, 4, 8)


def main() -> None:
    """Measure and write `results/served_hazards.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded rounds of the lab pair")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds served, at most")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    options = parser.parse_args()
    where = machine()
    torch.set_num_threads(1)
    stream = open_trace(options.trace)
    fitted_on = fit_rounds(stream)
    boosted = BoostedHazard().fit(fitted_on.arrays)
    table = DistilledTable(teacher=boosted).fit(fitted_on.arrays).table_
    test = of_split(next(stream.pieces(rows=stream.num_rounds)), "test").slice(0, options.rounds)

    def by_trees(rounds: TraceArrays) -> np.ndarray:
        features = context_features(rounds)
        return boosted.trees_.predict(features.reshape(-1, features.shape[-1])).reshape(-1, 15)

    kinds: list[tuple[ServedHazards, HazardFunction]] = [
        (TableHazards(table), lambda rounds: predict_hazards(table, rounds.features_RDF)),
        (TreeHazards(boosted.trees_), by_trees),
    ]
    rows: list[dict[str, Any]] = []
    for model, predict in kinds:
        calibration = fitted_on.rounds(predict)
        assert calibration.distinct_total_NL is not None
        mean = calibration.distinct_total_NL.mean(axis=0) * 40 / stream.identity.layers
        cost = load_price(CURVE).table(mean, topk=stream.identity.topk)
        lam = fit_batch(calibration, cost, batch=1).tokens_per_us
        rounds = round_set(test, predict)
        plain = np.broadcast_to(cost.latency_us[0, 0], (len(rounds), 17))
        expected = Dinkelbach(lam).lengths(rounds, plain)
        policy = make_policy(model, table, cost, lam)
        for batch in BATCHES:
            lengths, times = serve(policy, test, lam, batch=batch)
            rows.append(
                {
                    "hazards": model.kind,
                    "model": model.describe(),
                    "requests": batch,
                    "rounds": len(lengths),
                    "steps": len(times["select"]),
                    "select_us": round(float(np.median(times["select"])), 1),
                    "select_p90_us": round(float(np.quantile(times["select"], 0.9)), 1),
                    "observe_us": round(float(np.median(times["observe"])), 1),
                    "lengths_that_differ_from_replay": int((lengths != expected).sum()),
                }
            )
            print(rows[-1], flush=True)
    summary = {
        "trees_select_us_1_request": pick(rows, TREES, 1)["select_us"],
        "table_select_us_1_request": pick(rows, TABLE, 1)["select_us"],
        "trees_observe_us_1_request": pick(rows, TREES, 1)["observe_us"],
        "trees_select_us_8_requests": pick(rows, TREES, 8)["select_us"],
        "lengths_that_differ_from_replay": sum(
            row["lengths_that_differ_from_replay"] for row in rows
        ),
    }
    path = write_results(
        "served_hazards",
        rows=rows,
        summary=summary,
        seed=0,
        where=where,
        packages=("torch", "numpy", "scikit-learn"),
        out=options.out,
    )
    print(f"{path.name}: {summary}")


def pick(rows: list[dict[str, Any]], kind: str, requests: int) -> dict[str, Any]:
    """The row of one model and batch size."""
    return next(r for r in rows if (r["hazards"], r["requests"]) == (kind, requests))


def make_policy(model: ServedHazards, table: Any, cost: StepCostTable, lam: float) -> Policy:
    """A policy of one cost at one batch size."""
    throughput = ThroughputTable(
        cost.batch_sizes, np.full(cost.batch_sizes.size, lam), np.full(cost.batch_sizes.size, 8)
    )
    return Policy(table, cost, throughput, hazard_model=model)


def serve(
    policy: Policy, test: Any, lam: float, *, batch: int
) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Lengths of all rounds, requests `batch` at a time, and times of the steps in us."""
    p1, p2, entropy = (
        torch.tensor(list_column(test, name)) for name in ("p1", "p2", "entropy_nats")
    )
    drafts = torch.tensor(list_column(test, "draft_tokens").astype(np.int64))
    target = list_column(test, "target_tokens")
    anchor, accepted, context = (
        test.column(name).to_numpy() for name in ("anchor", "accepted", "context_tokens")
    )
    names = np.asarray(test.column("prompt_id").to_pylist())
    first = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    waiting = [list(rows) for rows in np.split(np.arange(len(names)), first[1:])]
    running: list[tuple[list[int], RequestHistory | None]] = []
    lengths = np.zeros(len(names), dtype=np.int64)
    times: dict[str, list[float]] = {"select": [], "observe": []}
    while waiting or running:
        while waiting and len(running) < batch:
            rows = waiting.pop(0)
            running.append((rows, policy.hazard_model.start([int(anchor[rows[0]])])))
        now = [int(rows[0]) for rows, _ in running]
        signals = (p1[now], p2[now], entropy[now], [int(context[row]) for row in now])
        began = time.perf_counter()
        chosen = policy.select(
            *signals,
            [lam] * len(now),
            [16] * len(now),
            1,
            draft_tokens_BD=drafts[now],
            histories=[history for _, history in running],
        )
        times["select"].append((time.perf_counter() - began) * 1e6)
        lengths[now] = chosen.lengths
        emitted = [target[row, : accepted[row] + 1].tolist() for row in now]
        began = time.perf_counter()
        for (_, history), tokens in zip(running, emitted, strict=True):
            if history is not None:
                # Verified in full, as in the recording that the replay reads.
                history.observe(tokens, accepted=len(tokens) - 1, verify_length=16)
        times["observe"].append((time.perf_counter() - began) * 1e6)
        for rows, _ in running:
            rows.pop(0)
        running = [entry for entry in running if entry[0]]
    return lengths, times


if __name__ == "__main__":
    main()
