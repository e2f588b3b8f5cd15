"""Pairs to pad, and the shapes to pad them to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hybridspec.demo.padded_pair import PaddedPair
from hybridspec.demo.padded_shape import PaddedShape
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import PairShape, write_random_pair

SMALL = PaddedShape(
    layers=8, hidden=512, vocab=700, heads=4, kv_heads=2, head_dim=32,
    gdn_key_heads=2, gdn_value_heads=8, gdn_key_dim=16, gdn_value_dim=16,
    experts=8, experts_per_token=2, expert_width=40, shared_width=48,
    draft_layers=3, draft_heads=6, draft_kv_heads=2, draft_head_dim=32, draft_width=96,
    draft_target_layers=4, max_positions=512,
)  # fmt: skip
# Several heads a group on both sides, an LM head of its own, and layers that alternate.
GROUPED_SOURCE = PairShape(
    vocab_size=203, hidden_size=72, num_layers=6, full_attention_interval=2,
    num_heads=4, num_kv_heads=2, head_dim=24, partial_rotary_factor=0.5,
    gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=24, gdn_value_dim=8,
    num_experts=16, experts_per_token=4, expert_width=12, shared_width=20, tied_embeddings=False,
    drafter_layers=2, drafter_heads=4, drafter_kv_heads=2, drafter_head_dim=16,
    target_layer_ids=(1, 2, 5),
)  # fmt: skip
# 7 = 4 + 1 + 1 + 1 copies, three query heads a group, key heads added as well.
GROUPED = PaddedShape(
    layers=13, hidden=504, vocab=204, heads=9, kv_heads=3, head_dim=24,
    gdn_key_heads=3, gdn_value_heads=9, gdn_key_dim=24, gdn_value_dim=8,
    experts=16, experts_per_token=4, expert_width=13, shared_width=21,
    draft_layers=2, draft_heads=9, draft_kv_heads=3, draft_head_dim=16, draft_width=65,
    draft_target_layers=4, max_positions=512,
)  # fmt: skip
# One copy times one and no spare dimension: only layers, heads and experts grow.
SAME_WIDTH = replace(SMALL, hidden=64, vocab=320)

SHAPES: dict[str, tuple[PairShape, PaddedShape]] = {
    "small": (PairShape(), SMALL),
    "grouped": (GROUPED_SOURCE, GROUPED),
    "same-width": (PairShape(), SAME_WIDTH),
}


def write_source(folder: Path, shape: PairShape | None = None, *, seed: int = 3) -> Path:
    """A pair of random weights in fp32."""
    write_random_pair(folder, shape or PairShape(), seed=seed)
    return folder


def open_pair(folder: Path, shape: PaddedShape) -> PaddedPair:
    """Its padding, in fp32."""
    return PaddedPair.open(folder, shape, dtype=torch.float32)


def engine_of(folder: Path, dtype: torch.dtype = torch.float32) -> Engine:
    """An engine over a pair's folder."""
    return load_pair(
        folder / "target", folder / "drafter", dtype=dtype, max_batch=2, max_context=256
    )


def sizes_of(shape: PaddedShape) -> list[str]:
    """Command line flags that ask for a shape."""
    import dataclasses

    return [f"--set={name}={value}" for name, value in dataclasses.asdict(shape).items()]


def tokens_of(vocab: int, count: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()
