"""Append to the caches of all layers: exactly the committed rows, nothing beside them."""

from __future__ import annotations

import pytest
import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.kv_append import naive
from hybridspec.kernels.kv_append.append import Caches, append

SLOTS = 90
POISON = -1.5e4


def caches_of(layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
    # Separate allocations, as an engine has, and slots further apart than a row is wide.
    return [
        torch.full((SLOTS, heads, dim), POISON, dtype=dtype, device=device) for _ in range(layers)
    ]


@pytest.mark.parametrize("commit_rows", [[16], [1], [0], [5, 0, 16], [3, 20]], ids=str)
@pytest.mark.parametrize(
    ("layers", "heads", "dim", "dtype"),
    [(1, 1, 8, torch.bfloat16), (3, 2, 24, torch.float16), (8, 2, 64, torch.bfloat16)],
    ids=str,
)
def test_committed_rows_of_every_layer(
    layers: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    commit_rows: list[int],
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(layers)
    blocks = len(commit_rows)
    # As a workspace that was made for more rows: layers further apart than their rows.
    shape = (layers, blocks * 16 + 5, heads, dim)
    keys, values = (
        torch.randn(shape, generator=generator).to(dtype)[:, : blocks * 16].to(device)
        for _ in range(2)
    )
    places = torch.randperm(SLOTS, generator=generator)[: blocks * 16].view(blocks, 16)
    key_caches = caches_of(layers, heads, dim, dtype, device)
    value_caches = caches_of(layers, heads, dim, dtype, device)
    expected = [[c.clone() for c in caches] for caches in (key_caches, value_caches)]
    naive.append(keys, values, expected[0], expected[1], places.tolist(), commit_rows)

    table = places.clone()
    for block, count in enumerate(commit_rows):
        table[block, count:] = 1 << 40  # the slots of rows that are not written may be anything
    append(
        keys,
        values,
        Caches.of(key_caches, value_caches),
        table.to(device),
        torch.tensor(commit_rows, dtype=torch.int32, device=device),
    )
    for found, wanted in zip((key_caches, value_caches), expected, strict=True):
        for layer in range(layers):
            assert torch.equal(found[layer], wanted[layer])


def test_workspace_that_is_strided_by_layer(device: torch.device) -> None:
    workspace = torch.randn(2, 40, 1, 8).to(torch.bfloat16).to(device)
    keys = workspace[:, :16]
    caches = caches_of(4, 1, 8, torch.bfloat16, device)
    places = torch.arange(16, device=device).view(1, 16)
    rows = torch.tensor([16], dtype=torch.int32, device=device)
    append(keys, keys, Caches.of(caches[:2], caches[2:]), places, rows)
    assert torch.equal(torch.stack(caches[:2])[:, :16], keys)
    assert torch.equal(torch.stack(caches[2:])[:, :16], keys)


def test_refusals(device: torch.device) -> None:
    good = caches_of(2, 2, 8, torch.bfloat16, device)
    bad = [
        good[0].float(),
        good[0].view(torch.uint8)[..., :8],
        good[0].transpose(0, 1),
        good[0][:, :1],
    ]
    for cache in bad:
        with pytest.raises(UsageError, match="a cache is"):
            Caches.of([good[0]], [cache])
    with pytest.raises(UsageError, match="1 key caches and 2 value caches"):
        Caches.of(good[:1], good)
    caches = Caches.of(good[:1], good[1:])
    places = torch.zeros(1, 16, dtype=torch.int64, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    keys = torch.zeros(1, 16, 2, 8, dtype=torch.bfloat16, device=device)
    for wrong in (keys.float(), keys[:, :15], keys.transpose(1, 2)):
        with pytest.raises(UsageError, match="keys are"):
            append(wrong, keys, caches, places, rows)
    with pytest.raises(UsageError, match="places are"):
        append(keys, keys, caches, places.int(), rows)
    with pytest.raises(UsageError, match="commit rows"):
        append(keys, keys, caches, places, rows.long())
