"""Distinct experts and tokens against plain sets; the routing line against numpy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rounds import make_identity, synthetic_trace

from hybridspec.calibrate.rounds import with_identity
from hybridspec.calibrate.routing import distinct_experts, distinct_tokens, fit_routing
from hybridspec.errors import BundleError


def with_routes(routes: np.ndarray, experts: int) -> pa.Table:
    rounds, layers, _, topk = routes.shape
    table = synthetic_trace(prompts=rounds, rounds=1)
    kind = np.uint8 if experts <= 256 else np.dtype("<u2")
    values = [routes[i].astype(kind).tobytes() for i in range(rounds)]
    index = table.column_names.index("routes")
    table = table.set_column(index, table.schema.field("routes"), pa.array(values, pa.binary()))
    return with_identity(table, make_identity(layers=layers, topk=topk, experts=experts))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 256, 300]), st.integers(0, 99))
def test_distinct_experts_count_like_sets(layers: int, topk: int, experts: int, seed: int) -> None:
    routes = np.random.default_rng(seed).integers(0, experts, (3, layers, 16, topk))
    counts = distinct_experts(with_routes(routes, experts))
    assert counts is not None
    for index in np.ndindex(3, layers, 16):
        seen = set(routes[index[0], index[1], : index[2] + 1].ravel().tolist())
        assert counts[index] == len(seen)


def test_routes_may_be_absent_but_not_out_of_range() -> None:
    assert distinct_experts(synthetic_trace(prompts=2, rounds=1)) is None
    routes = np.full((2, 1, 16, 1), 7)
    with pytest.raises(BundleError, match="name expert 7; the target has 7"):
        distinct_experts(with_routes(routes, 7))


def test_distinct_tokens_count_the_anchor_too() -> None:
    table = synthetic_trace(prompts=4, rounds=3)
    counts = distinct_tokens(table)
    for row, (anchor, drafts) in enumerate(
        zip(table["anchor"].to_pylist(), table["draft_tokens"].to_pylist(), strict=True)
    ):
        block = [anchor, *drafts]
        assert counts[row].tolist() == [len(set(block[: k + 1])) for k in range(16)]


def test_line_is_least_squares_and_scored_on_held_out_rounds() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(2, 20, (400, 16))
    others = 3 * first + rng.integers(-2, 3, first.shape)
    counts = np.stack([first, others], axis=1)
    tokens = rng.integers(1, 17, first.shape)
    fit_rows = np.arange(400) < 200
    report = fit_routing(counts, tokens, fit_rows=fit_rows, held_out=~fit_rows)
    for length in range(16):
        slope, intercept = np.polyfit(first[:200, length], counts[:200].sum(axis=1)[:, length], 1)
        table = report.table
        assert table.slope_L[length] == pytest.approx(slope)
        line = table.total_mean_L[length] - slope * table.first_mean_L[length]
        assert line == pytest.approx(intercept)
    assert (report.first_router_r2_L > 0.98).all()
    assert (report.other_layers_r2_L > 0.98).all()
    assert (np.abs(report.distinct_tokens_r2_L) < 0.2).all()
    assert report.table.num_layers == 2


def test_constant_counts_give_a_flat_line() -> None:
    counts = np.full((10, 3, 16), 4)
    rows = np.ones(10, dtype=bool)
    report = fit_routing(counts, counts[:, 0], fit_rows=rows, held_out=~rows)
    assert report.table.slope_L.tolist() == [0.0] * 16
    assert report.first_router_r2_L.tolist() == [0.0] * 16
