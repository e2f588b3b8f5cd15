"""Tables of routes that requests force: how many experts, which rows, which layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.controls import LengthRequest
from hybridspec.sglang_plugin.target.forced_routes import ForcedRoutes

LAYERS, REQUESTS, ROWS, TOP_K, EXPERTS = 3, 2, 16, 4, 40


def table() -> torch.Tensor:
    return torch.full((LAYERS, REQUESTS * ROWS, TOP_K), -7, dtype=torch.int32)


@given(length=st.integers(1, 16), share=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_live_rows_take_as_many_experts_as_asked_for(length: int, share: float) -> None:
    most = min(EXPERTS, length * TOP_K)
    distinct = TOP_K + round(share * (most - TOP_K))
    forced = table()
    routes = ForcedRoutes(forced, EXPERTS)
    asked = LengthRequest(length, 16, distinct)
    routes.check(asked)
    routes.write([LengthRequest(5, 16), asked])
    assert forced.min() >= 0
    assert forced.max() < EXPERTS
    for layer in range(LAYERS):
        live = forced[layer, ROWS : ROWS + length]
        assert live.unique().numel() == distinct
        assert all(row.unique().numel() == TOP_K for row in forced[layer])
    assert forced[:, :ROWS].flatten(1).unique(dim=1).shape[1] == TOP_K
    choices = {tuple(forced[layer, ROWS:].unique().tolist()) for layer in range(LAYERS)}
    assert distinct == EXPERTS or len(choices) > 1


def test_rows_hold_routes_before_the_first_request_and_past_a_smaller_batch() -> None:
    forced = table()
    routes = ForcedRoutes(forced, EXPERTS)
    first = forced.clone()
    assert all(row.unique().numel() == TOP_K for row in first.flatten(0, 1))
    routes.write([LengthRequest(4, 16, 9)])
    assert torch.equal(forced[:, ROWS:], first[:, ROWS:])
    routes.write([])


@pytest.mark.parametrize(
    ("length", "cap", "distinct", "rows"),
    [(1, 16, 5, 1), (2, 16, 3, 2), (16, 16, 400, 16), (16, 16, 1, 16), (16, 2, 9, 2)],
)
def test_what_routing_cannot_reach_is_refused_and_routed_as_nothing(
    length: int, cap: int, distinct: int, rows: int
) -> None:
    forced = table()
    routes = ForcedRoutes(forced, EXPERTS)
    asked = LengthRequest(length, cap, distinct)
    with pytest.raises(UsageError, match=rf"distinct_experts = {distinct}: {rows} rows of 4"):
        routes.check(asked)
    routes.write([asked])
    for layer in range(LAYERS):
        assert forced[layer, :ROWS].unique().numel() == TOP_K


def test_requests_without_a_word_are_fine() -> None:
    ForcedRoutes(table(), EXPERTS).check(LengthRequest())
