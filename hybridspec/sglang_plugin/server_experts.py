"""What a distinct expert costs in a SGLang server: rounds of one request with forced routes.

The server is one that was started for this, with `LaunchOptions.force_routes`: its graphs take
routes from a table, a launch or two a layer more than a serving one, which no difference between
rounds of one length contains. Answers are no text; how many drafts of it are right nobody knows, so
answers are long enough for rounds that emit all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from hybridspec.costmodels.measure import measure_interleaved
from hybridspec.costmodels.sweep import ExpertCase, Progress, Timed, check_rows, expert_samples
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_rounds import (
    FEWEST_ROUNDS,
    SPARE_ROUNDS,
    TIMED_ROUNDS,
    WARMUP_ROUNDS,
    Grid,
    read_rounds,
)


def forced_tokens(verify_length: int) -> int:
    """Tokens that a reading asks for: of the rounds that are timed at two a round, and no fewer
    rounds than a reading needs where every round emits all its rows.
    """
    rounds = WARMUP_ROUNDS + TIMED_ROUNDS + SPARE_ROUNDS
    return max(2 * rounds, verify_length * (WARMUP_ROUNDS + FEWEST_ROUNDS + 2))


def measure_server_experts(
    api: ServerApi,
    grid: Grid,
    pairs: Sequence[tuple[int, int]],
    *,
    budget_s: float,
    progress: Progress | None = None,
) -> pa.Table:
    """Rounds of one request at the smallest context.

    Args:
        pairs: (verify length, distinct experts of every layer), as `expert_grid` gives them.
        budget_s: measuring stops after the first sweep that ends past this time.

    Returns:
        A table of `EXPERT_SAMPLES_SCHEMA`. What ran is not read back from the server: a table that
        the graphs did not take shows as a slope of no use.

    Raises:
        EnvironmentMissing: the server's routers choose experts themselves.
        QualityGate: other rows than asked for, or too few rounds or sweeps.
        Interrupted: Ctrl-C, from `costmodels.measure`.
    """
    context = min(grid.contexts)
    prompts = grid.prompts(1, context)

    def case(key: ExpertCase) -> Callable[[], Timed]:
        def run() -> Timed:
            reading = read_rounds(
                api,
                prompts,
                key.verify_length,
                new_tokens=forced_tokens(key.verify_length),
                distinct_experts=key.distinct_experts,
            )
            check_rows(key.verify_length, reading.rows_run, case=key)
            return reading

        return run

    keys = [ExpertCase(1, context, length, distinct) for length, distinct in pairs]
    measured = measure_interleaved(
        {key: case(key) for key in keys},
        repeats=grid.repeats,
        budget_s=budget_s,
        seed=grid.seed,
        progress=progress,
    )
    return expert_samples(measured)
