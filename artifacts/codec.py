"""Between the dataclasses of `tables.py` and the Arrow tables of `schemas.py`; exact both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.schemas import (
    KNOTS_SCHEMA,
    MAP_SCHEMA,
    ROUTING_SCHEMA,
    STEP_SCHEMA,
    TEMPERATURES_SCHEMA,
    THROUGHPUT_SCHEMA,
    TREES_SCHEMA,
    table_from,
)
from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    FEATURE_NAMES,
    NUM_DRAFTS,
    HazardTable,
    RoutingTable,
    StepCostTable,
    TemperatureTable,
    ThroughputTable,
)
from hybridspec.artifacts.trees import CONTEXT_FEATURES, LEAF, TreeTable
from hybridspec.errors import BundleError

_POSITION_TERM = "position_bias"
_LENGTHS = np.arange(1, BLOCK_SIZE + 1)
_SMALLEST = float(np.nextafter(0.0, 1.0))


def _column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    values = table.column(name).to_numpy()
    # Arrow memory is read-only and may go away with the file buffer.
    return np.array(values)


def _floats(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    return _column(table, name).astype(np.float64)


def _ints(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return _column(table, name).astype(np.int64)


def _constant(table: pa.Table, name: str, path: object) -> Any:
    values = np.unique(_column(table, name))
    if values.size != 1:
        raise BundleError(
            f"{path}: column {name!r} has {values.size} different values; it must have one: "
            "the file is damaged; make it again"
        )
    return values[0]


def hazard_tables(hazard: HazardTable) -> tuple[pa.Table, pa.Table]:
    """A hazard table as (map, knots)."""
    terms = [*FEATURE_NAMES, *([_POSITION_TERM] * NUM_DRAFTS)]
    map_table = table_from(
        {
            "method": [hazard.method] * len(terms),
            "term": terms,
            "position": [-1] * len(FEATURE_NAMES) + list(range(NUM_DRAFTS)),
            "coefficient": np.concatenate([hazard.weights_F, hazard.position_bias_D]),
        },
        MAP_SCHEMA,
    )
    knots = table_from({"knot_x": hazard.knots_x, "knot_y": hazard.knots_y}, KNOTS_SCHEMA)
    return map_table, knots


def hazard_from(map_table: pa.Table, knots: pa.Table, *, path: object) -> HazardTable:
    """Inverse of `hazard_tables`."""
    terms = [*FEATURE_NAMES, *([_POSITION_TERM] * NUM_DRAFTS)]
    positions = [-1] * len(FEATURE_NAMES) + list(range(NUM_DRAFTS))
    if (
        map_table.column("term").to_pylist() != terms
        or map_table.column("position").to_pylist() != positions
    ):
        raise BundleError(
            f"{path}: rows are not {', '.join(FEATURE_NAMES)} and {NUM_DRAFTS} positions in order: "
            "calibrate again"
        )
    coefficients = _floats(map_table, "coefficient")
    return HazardTable(
        method=str(_constant(map_table, "method", path)),
        weights_F=coefficients[: len(FEATURE_NAMES)],
        position_bias_D=coefficients[len(FEATURE_NAMES) :],
        knots_x=_floats(knots, "knot_x"),
        knots_y=_floats(knots, "knot_y"),
    )


def trees_table(trees: TreeTable) -> pa.Table:
    """Boosted trees, one row a node in their order."""
    nodes = trees.feature_K.size
    names = (*trees.feature_names, "")
    return table_from(
        {
            "tree": np.searchsorted(trees.root_T, np.arange(nodes), side="right") - 1,
            "feature": [names[feature] for feature in trees.feature_K],
            "threshold": trees.threshold_K,
            "left": trees.left_K,
            "value": trees.value_K,
            "baseline": np.full(nodes, trees.baseline),
        },
        TREES_SCHEMA,
    )


def trees_from(table: pa.Table, *, path: object) -> TreeTable:
    """Inverse of `trees_table`."""
    tree = _ints(table, "tree")
    if tree.size == 0 or tree[0] != 0 or np.any((np.diff(tree) != 0) & (np.diff(tree) != 1)):
        raise BundleError(
            f"{path}: trees must count 0, 1, 2, ... in order: the file is damaged; calibrate again"
        )
    index = {name: number for number, name in enumerate(CONTEXT_FEATURES)} | {"": LEAF}
    names = table.column("feature").to_pylist()
    unknown = sorted(set(names) - set(index))
    if unknown:
        raise BundleError(
            f"{path}: trees compare a feature {unknown[0]!r}; this version computes "
            f"{', '.join(CONTEXT_FEATURES)}: upgrade hybridspec, or calibrate again"
        )
    return TreeTable(
        feature_names=CONTEXT_FEATURES,
        baseline=float(_constant(table, "baseline", path)),
        root_T=np.flatnonzero(np.diff(tree, prepend=-1)),
        feature_K=np.array([index[name] for name in names], dtype=np.int64),
        threshold_K=_floats(table, "threshold"),
        left_K=_ints(table, "left"),
        value_K=_floats(table, "value"),
    )


def temperatures_table(temperatures: TemperatureTable) -> pa.Table:
    """Temperatures, one row a draft position."""
    return table_from(
        {
            "position": np.arange(NUM_DRAFTS),
            "temperature": temperatures.temperatures_D,
            "ece_before": temperatures.ece_before_D,
            "ece_after": temperatures.ece_after_D,
            "rounds": np.full(NUM_DRAFTS, temperatures.num_rounds),
        },
        TEMPERATURES_SCHEMA,
    )


def temperatures_from(table: pa.Table, *, path: object) -> TemperatureTable:
    """Inverse of `temperatures_table`."""
    if _ints(table, "position").tolist() != list(range(NUM_DRAFTS)):
        raise BundleError(
            f"{path}: positions must count 0 to {NUM_DRAFTS - 1} in order: the file is damaged; "
            "calibrate again"
        )
    return TemperatureTable(
        _floats(table, "temperature"),
        _floats(table, "ece_before"),
        _floats(table, "ece_after"),
        int(_constant(table, "rounds", path)),
    )


def routing_table(routing: RoutingTable) -> pa.Table:
    """A routing table, one row a verify length."""
    return table_from(
        {
            "verify_length": _LENGTHS,
            "num_layers": np.full(BLOCK_SIZE, routing.num_layers),
            "first_mean": routing.first_mean_L,
            "total_mean": routing.total_mean_L,
            "slope": routing.slope_L,
        },
        ROUTING_SCHEMA,
    )


def routing_from(table: pa.Table, *, path: object) -> RoutingTable:
    """Inverse of `routing_table`."""
    if not np.array_equal(_column(table, "verify_length"), _LENGTHS):
        raise BundleError(
            f"{path}: verify_length must count 1..{BLOCK_SIZE}: the file is damaged; "
            "calibrate again"
        )
    return RoutingTable(
        num_layers=int(_constant(table, "num_layers", path)),
        first_mean_L=_floats(table, "first_mean"),
        total_mean_L=_floats(table, "total_mean"),
        slope_L=_floats(table, "slope"),
    )


def step_table(step: StepCostTable) -> pa.Table:
    """A step cost table, one row a (batch, context, verify length) in that order."""
    shape = step.latency_us.shape
    index = np.indices(shape)
    return table_from(
        {
            "batch_size": step.batch_sizes[index[0]].ravel(),
            "context_tokens": step.context_tokens[index[1]].ravel(),
            "verify_length": index[2].ravel(),
            "latency_us": step.latency_us.ravel(),
            "latency_p10_us": step.latency_p10_us.ravel(),
            "latency_p90_us": step.latency_p90_us.ravel(),
            "draft_us": np.broadcast_to(step.draft_us[:, :, None], shape).ravel(),
            "expert_slope_us": np.full(step.latency_us.size, step.expert_slope_us),
            "expert_slope_r2": np.full(step.latency_us.size, step.expert_slope_r2),
        },
        STEP_SCHEMA,
    )


def step_from(table: pa.Table, *, path: object) -> StepCostTable:
    """Inverse of `step_table`."""
    batch_sizes = np.unique(_ints(table, "batch_size"))
    context_tokens = np.unique(_ints(table, "context_tokens"))
    shape = (batch_sizes.size, context_tokens.size, BLOCK_SIZE + 1)
    index = np.indices(shape)
    grid = (batch_sizes[index[0]], context_tokens[index[1]], index[2])
    names = ("batch_size", "context_tokens", "verify_length")
    if table.num_rows == 0 or not all(
        np.array_equal(_column(table, name), values.ravel())
        for name, values in zip(names, grid, strict=True)
    ):
        raise BundleError(
            f"{path}: {table.num_rows} rows are not a full grid of {shape[0]} batch sizes x "
            f"{shape[1]} contexts x lengths 0..{BLOCK_SIZE} in order: profile again"
        )
    draft_us = _floats(table, "draft_us").reshape(shape)
    if not np.array_equal(draft_us, np.broadcast_to(draft_us[:, :, :1], shape)):
        raise BundleError(
            f"{path}: draft_us differs between lengths of one batch size and context; the draft "
            "pass does not depend on the length: profile again"
        )
    return StepCostTable(
        batch_sizes=batch_sizes,
        context_tokens=context_tokens,
        latency_us=_floats(table, "latency_us").reshape(shape),
        latency_p10_us=_floats(table, "latency_p10_us").reshape(shape),
        latency_p90_us=_floats(table, "latency_p90_us").reshape(shape),
        draft_us=draft_us[:, :, 0].copy(),
        expert_slope_us=float(_constant(table, "expert_slope_us", path)),
        expert_slope_r2=float(_constant(table, "expert_slope_r2", path)),
    )


def throughput_table(throughput: ThroughputTable) -> pa.Table:
    """A throughput table, one row a batch size."""
    return table_from(
        {
            "batch_size": throughput.batch_sizes,
            "tokens_per_us": throughput.tokens_per_us,
            "best_fixed_length": throughput.best_fixed_length,
        },
        THROUGHPUT_SCHEMA,
    )


def throughput_from(table: pa.Table, *, path: object) -> ThroughputTable:
    """Inverse of `throughput_table`."""
    batch_sizes = _ints(table, "batch_size")
    if batch_sizes.size == 0 or batch_sizes[0] < 1 or np.any(np.diff(batch_sizes) <= 0):
        raise BundleError(
            f"{path}: batch sizes {batch_sizes.tolist()} must increase strictly from 1 or more: "
            "fit the throughput again"
        )
    return ThroughputTable(
        batch_sizes=batch_sizes,
        tokens_per_us=_floats(table, "tokens_per_us"),
        best_fixed_length=_ints(table, "best_fixed_length"),
    )


def check_reports(table: pa.Table, *, path: object) -> pa.Table:
    """Refuse impossible values in a reliability, metrics, samples or experts table."""
    rules: dict[str, tuple[float, float]] = {
        "mean_predicted": (0.0, 1.0),
        "mean_observed": (0.0, 1.0),
        "n": (0, np.inf),
        "bin": (0, np.inf),
        "batch_size": (1, np.inf),
        "context_tokens": (0, np.inf),
        "verify_length": (0, BLOCK_SIZE),
        "distinct_experts": (0, np.inf),
        "latency_us": (_SMALLEST, np.inf),
    }
    for name, (low, high) in rules.items():
        if name not in table.column_names or table.num_rows == 0:
            continue
        values = _column(table, name)
        bad = values[(values < low) | (values > high)]
        if bad.size:
            raise BundleError(
                f"{path}: column {name!r} has {bad.size} value(s) such as {bad[0]}; allowed are "
                f"{'more than 0' if low == _SMALLEST else f'{low:g} to {high:g}'}: "
                "make that part again"
            )
    return table
