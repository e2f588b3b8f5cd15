"""Placement of a pair in a larger shape: copies, layers, routers, taps and heads."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.demo.padded_noise import Noise
from hybridspec.demo.padded_shape import (
    QWEN36_35B_A3B,
    borrow_routers,
    copy_scales,
    place_layers,
    place_taps,
    spread_heads,
)
from hybridspec.errors import ModelError

# Of the filler: engines on other machines make the same weights.
DIGEST = "b1c32b3a230f5ea1894bebef1acdcffda51f4c880642c22470f03c629c24f940"


@given(st.integers(1, 64), st.integers(1, 300))
def test_copies_keep_the_mean_square_and_fit(source_hidden: int, ratio: int) -> None:
    scales = copy_scales(source_hidden, source_hidden * ratio)
    assert sum(scale**2 for scale in scales) == ratio
    assert len(scales) <= ratio
    assert (len(scales) < ratio) == (ratio >= 4)
    assert all(float(scale).hex().startswith("0x1.0000000000000p") for scale in scales)


@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_layers_keep_kind_and_order_wherever_they_fit(
    source: list[bool], padded: list[bool]
) -> None:
    rest = iter(padded)
    fits = all(kind in rest for kind in source)  # `in` consumes: a subsequence test
    if not fits:
        with pytest.raises(ModelError, match="do not fit"):
            place_layers(source, padded)
        return
    placed = place_layers(source, padded)
    assert list(placed) == sorted(set(placed))
    assert [padded[p] for p in placed] == source


def test_lab_layers_lie_evenly_in_the_full_shape() -> None:
    lab = [False, False, False, True] * 2
    live = place_layers(lab, QWEN36_35B_A3B.layer_is_attention)
    assert live == (0, 5, 10, 15, 20, 25, 30, 35)
    taps = place_taps((1, 3, 5, 6), live, QWEN36_35B_A3B)
    assert taps == ((5, 0), (15, 1), (25, 2), (30, 3), (38, None))


@given(st.sets(st.integers(1, 40), max_size=9), st.integers(41, 60))
def test_live_layers_keep_their_router_and_neighbours_differ(
    positions: set[int], layers: int
) -> None:
    live = [0, *sorted(positions)]
    routers = borrow_routers(live, layers)
    assert [routers[p] for p in live] == list(range(len(live)))
    for first in range(len(live)):
        start, stop = live[first] + 1, [*live[1:], layers][first]
        gap = routers[start:stop]
        assert len(set(gap)) == min(len(gap), len(live))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_heads_keep_the_key_head_they_share(
    groups: int, per_group: int, more_groups: int, more_per_group: int
) -> None:
    padded_groups, padded_per_group = groups + more_groups, per_group + more_per_group
    places = spread_heads(
        groups * per_group, groups, padded_groups * padded_per_group, padded_groups
    )
    assert len(set(places)) == groups * per_group
    assert [p // padded_per_group for p in places] == [
        h // per_group for h in range(groups * per_group)
    ]


def test_noise_has_the_same_bits_on_every_machine() -> None:
    noise = Noise(torch.device("cpu"))
    values = noise("layers.0.weight", (3000, 2048), torch.bfloat16)
    assert torch.equal(values.float(), noise("layers.0.weight", (3000, 2048), torch.float32))
    digest = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == DIGEST
    assert abs(float(values.float().std()) - 0.018) < 1e-4
    assert abs(float(values.float().mean())) < 5e-4
    assert len(values.unique(dim=0)) == 3000
    assert not torch.equal(values, noise("layers.1.weight", (3000, 2048), torch.bfloat16))
