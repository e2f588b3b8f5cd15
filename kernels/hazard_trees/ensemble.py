"""An ensemble of trees packed for the device: one word a node, leaves as fixed-point numbers.

| bits of a node's word | content |
|---|---|
| 0..31 | threshold, fp32; infinity in a leaf |
| 32..39 | feature |
| 40..62 | left child, the right one is the next; a leaf points at itself |

A leaf leads to itself, so every way is as long as the longest and no lane branches. Leaves are
integers in units of 2^-44, so their sum does not depend on its order: the same bits on every
device, whatever the layout of the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybridspec.errors import UsageError

# Order of the features, as the kernel writes them.
FEATURES = (
    "p1",
    "margin",
    "entropy",
    "position",
    "min_p1",
    "product_p1",
    "previous_p1",
    "next_p1",
    "repeat_distance",
    "seen_length",
    "min_seen_length",
    "successor",
    "mean_surprise",
    "rounds_before",
    "generated_tokens",
)
# Features of a row in memory: one more, never written, for alignment.
FEATURE_STRIDE = 16
VALUE_BITS = 44
VALUE_SCALE = float(1 << VALUE_BITS)
# The sum of 256 leaves must fit: |leaf| < 2^10.
MAX_LEAF = 1024.0
LEAF = -1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DeviceTrees:
    """Packed trees.

    Attributes:
        words_K: int64 [K + 1], nodes and one empty leaf.
        values_K: int64 [K + 1], leaves in units of 2^-44, those of the first tree with the
            baseline.
        roots_T: int32 [T], T a power of two; trees that are only padding start at the empty leaf.
        depth: comparisons of the longest way.
    """

    words_K: torch.Tensor
    values_K: torch.Tensor
    roots_T: torch.Tensor
    depth: int


def pack_trees(
    *,
    baseline: float,
    root_T: Ints,
    feature_K: Ints,
    threshold_K: Floats,
    left_K: Ints,
    value_K: Floats,
    depth: int,
    device: torch.device | str = "cpu",
) -> DeviceTrees:
    """Pack the arrays of a bundle's tree table, whose features are `FEATURES`.

    Args:
        baseline, root_T, feature_K, threshold_K, left_K, value_K: as in `TreeTable`; thresholds
            are fp32 values, the right child of a node is the one after the left.
        depth: comparisons of the longest way.

    Raises:
        UsageError: a feature or leaf that does not fit its bits.
    """
    nodes = feature_K.size
    leaf = feature_K == LEAF
    if np.any(feature_K >= len(FEATURES)) or nodes >= 1 << 22:
        raise UsageError(f"{nodes} nodes over features up to {feature_K.max()}: too many to pack")
    values = np.append(value_K, 0.0)
    first_tree = np.arange(nodes + 1) < (root_T[1] if root_T.size > 1 else nodes)
    values = np.where(first_tree & np.append(leaf, False), values + baseline, values)
    if np.abs(values).max() >= MAX_LEAF:
        raise UsageError(f"a leaf of {np.abs(values).max():g} logits; below {MAX_LEAF:g} are taken")
    threshold = np.append(np.where(leaf, np.inf, threshold_K), np.inf).astype(np.float32)
    child = np.append(np.where(leaf, np.arange(nodes), left_K), nodes)
    feature = np.append(np.where(leaf, 0, feature_K), 0)
    words = (child << 40) | (feature << 32) | threshold.view(np.uint32).astype(np.int64)
    trees = max(16, 1 << (root_T.size - 1).bit_length())
    roots = np.full(trees, nodes)
    roots[: root_T.size] = root_T
    return DeviceTrees(
        torch.as_tensor(words, device=device),
        torch.as_tensor(np.rint(values * VALUE_SCALE).astype(np.int64), device=device),
        torch.as_tensor(roots, dtype=torch.int32, device=device),
        depth,
    )
