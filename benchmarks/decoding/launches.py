"""Dependent launches of a round against plain ones: bits, time in turns, and which are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decoding.costs import launcher, replays_us

from hybridspec.reference.gpu.engine import GpuEngine, Snapshot
from hybridspec.reference.gpu.launching import allow_dependent_launch
from hybridspec.reference.gpu.round import RoundRules

LENGTHS = (1, 4, 16)
SWEEPS = 5
# Replays of a kind before the other's turn.
REPEATS = 5


def keep_faster(
    engine: GpuEngine, saved: Snapshot, dependent: Callable[[], None]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Measure both kinds of launch on the fixed round and leave the faster one switched on.

    Args:
        saved: where every replay begins.
        dependent: the captured round with dependent launches.

    Returns:
        facts for the result file, and the captured round of the faster kind.
    """
    allow_dependent_launch(False)
    replays = {"dependent": dependent, "plain": launcher(engine, engine.round(RoundRules("fixed")))}
    times: dict[tuple[str, int], list[float]] = {}
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in replays}
    for sweep in range(SWEEPS):
        for length in LENGTHS:
            engine.buffers.fixed_B.fill_(length)
            for name, replay in list(replays.items())[:: -1 if sweep % 2 else 1]:
                took_us = replays_us(replay, lambda: engine.restore(saved), REPEATS)
                times.setdefault((name, length), []).append(took_us)
                if sweep == 0:
                    outputs[name].append(engine.target.logits_RV[:length].clone())
    medians = {
        key: float(torch.tensor(values, dtype=torch.float64).median())
        for key, values in times.items()
    }
    # The lengths weigh alike: what counts is the share of a round.
    ratio = sum(medians["plain", n] / medians["dependent", n] for n in LENGTHS) / len(LENGTHS)
    kept = "plain" if ratio < 1.0 else "dependent"
    allow_dependent_launch(kept == "dependent")
    return {
        **{f"{name}_launch_us_L{length}": round(us, 1) for (name, length), us in medians.items()},
        "plain_over_dependent_launch": round(ratio, 4),
        "launches": kept,
        "dependent_launch_bitwise_equal": all(
            torch.equal(one, other)
            for one, other in zip(outputs["dependent"], outputs["plain"], strict=True)
        ),
    }, replays[kept]
