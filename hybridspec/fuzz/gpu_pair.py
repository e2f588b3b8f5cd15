"""A pair of random weights to fuzz the captured engine with, where none is named.

Shapes are what the kernels take: GDN heads of 64, experts in whole tiles. Every token takes all
experts. Where it took some, rounding would now and then choose others, which changes what is
remembered by more than one token's worth: nothing could be told from that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridspec.reference.random_pair import PairShape, write_random_pair

SEED = 7
SHAPE = PairShape(
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    full_attention_interval=4,
    gdn_key_dim=64,
    gdn_value_dim=64,
    num_experts=8,
    experts_per_token=8,
    expert_width=64,
    target_layer_ids=(0, 2),
    tied_embeddings=False,
)


@contextmanager
def random_pair() -> Iterator[tuple[Path, Path]]:
    """Folders of target and drafter, the same weights every time, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="hybridspec-fuzz-") as folder:
        yield write_random_pair(Path(folder), SHAPE, seed=SEED)
