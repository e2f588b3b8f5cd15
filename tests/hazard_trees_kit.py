"""Random ensembles and rounds for the tests of hazard trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridspec.artifacts.trees import CONTEXT_FEATURES, LEAF, TreeTable
from hybridspec.kernels.hazard_trees import naive
from hybridspec.kernels.hazard_trees.ensemble import DeviceTrees, pack_trees
from hybridspec.kernels.hazard_trees.state import HistoryState

# About where the values of each feature lie, so that comparisons go both ways.
SPREAD = {"entropy": 3.0, "position": 15.0, "repeat_distance": 16.0, "seen_length": 3.0}
SPREAD |= {"min_seen_length": 3.0, "rounds_before": 8.0, "generated_tokens": 60.0}


def random_trees(seed: int, *, trees: int = 6, depth: int = 4) -> TreeTable:
    """Trees of random shape over all features."""
    g = np.random.default_rng(seed)
    roots: list[int] = []
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    value: list[float] = []
    for _ in range(trees):
        roots.append(len(feature))
        levels, child = [0], len(feature) + 1
        for level in levels:
            if level == depth or (level and g.uniform() < 0.2):
                feature.append(LEAF)
                threshold.append(0.0)
                left.append(LEAF)
                value.append(g.normal())
                continue
            feature.append(int(g.integers(len(CONTEXT_FEATURES))))
            spread = SPREAD.get(CONTEXT_FEATURES[feature[-1]], 1.0)
            threshold.append(float(np.float32(g.uniform() * spread)))
            left.append(child)
            value.append(0.0)
            levels += [level + 1] * 2
            child += 2
    return TreeTable(
        feature_names=CONTEXT_FEATURES,
        baseline=float(g.normal()),
        root_T=np.array(roots),
        feature_K=np.array(feature),
        threshold_K=np.array(threshold),
        left_K=np.array(left),
        value_K=np.array(value),
    )


def packed(table: TreeTable, device: torch.device | str = "cpu") -> DeviceTrees:
    """A table as the kernel takes it."""
    names = ("baseline", "root_T", "feature_K", "threshold_K", "left_K", "value_K", "depth")
    return pack_trees(**{name: getattr(table, name) for name in names}, device=device)


@dataclass(frozen=True)
class Round:
    """Arguments of one launch on a host."""

    p1: torch.Tensor
    p2: torch.Tensor
    entropy: torch.Tensor
    drafts: torch.Tensor
    emitted: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor

    def on(self, device: torch.device | str) -> list[torch.Tensor]:
        """In the order of the kernel's arguments; signals and drafts in strided rows."""
        found = []
        for name, values in vars(self).items():
            if name in ("p1", "p2", "entropy", "drafts"):
                wide = torch.full((len(values), 19), -7, dtype=values.dtype, device=device)
                wide[:, :15] = values.to(device)
                found.append(wide[:, :15])
            else:
                found.append(values.to(device))
        return found


def random_round(
    g: np.random.Generator, batch: int, slots: int, *, first: bool, vocab: int = 12
) -> Round:
    """A round of requests in random slots; some are padding, some drafted nothing before."""
    p1 = torch.tensor(g.beta(2.0, 0.7, (batch, 15)), dtype=torch.float32)
    lengths = g.integers(0, 17, batch)
    counts = np.where(lengths > 0, g.integers(0, 17, batch) % np.maximum(lengths, 1) + 1, 1)
    counts = np.where(g.uniform(size=batch) < 0.15, 0, counts)
    if first:
        lengths, counts = np.zeros(batch, dtype=int), np.ones(batch, dtype=int)
    emitted = g.integers(0, vocab, (batch, 16))
    emitted[np.arange(16) >= counts[:, None]] = -1
    return Round(
        p1,
        (1 - p1) * torch.tensor(g.uniform(size=(batch, 15)), dtype=torch.float32),
        torch.tensor(g.gamma(1.0, 1.0, (batch, 15)), dtype=torch.float32),
        torch.tensor(g.integers(0, vocab, (batch, 15))),
        torch.tensor(emitted),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(g.permutation(slots)[:batch], dtype=torch.int32),
    )


def naive_round(
    state: HistoryState, trees: DeviceTrees, r: Round
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hazards [B, 15] and features [B, 15, 16] of the oracle; moves the state."""
    hazards, features = [], []
    for row, slot in enumerate(r.slots.tolist()):
        count = int(r.counts[row])
        tokens = r.emitted[row, :count].tolist()
        length = int(r.lengths[row])
        naive.observe(state, slot, tokens, accepted=count - 1, length=length)
        signals: list[Any] = [r.p1[row], r.p2[row], r.entropy[row], r.drafts[row].tolist()]
        features.append(naive.features(state, slot, *signals))
        hazards.append(naive.walk(trees, features[-1]))
    return torch.stack(hazards), torch.stack(features)


def equal_states(one: HistoryState, other: HistoryState) -> bool:
    """Whether both hold the same bits."""
    return all(
        torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu()) for name in vars(one)
    )
