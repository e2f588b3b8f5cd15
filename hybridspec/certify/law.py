"""The joint law of several sampled tokens of an engine with drafts, against plain decoding's.

A vocabulary to the power of several tokens is too large to count. So texts are binned by a tree:
a token gets a branch of its own where the text so far is probable enough, all others of that place
share one bin. The probability of every bin is an exact product of plain decoding's conditionals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridspec.acceptance import distribution
from hybridspec.certify.engine_arms import EngineArms
from hybridspec.certify.statistics import LEAST_EXPECTED, Fit, fit_to_law
from hybridspec.certify.texts import Task
from hybridspec.request import SamplingParams

DEPTH = 4
MAX_PROMPT_TOKENS = 24
LEVEL = 1e-3
_REST = -1


@dataclass(frozen=True)
class Tree:
    """Bins of texts.

    Attributes:
        bins: paths to their probabilities; a path that ends in -1 is "any other token here".
        inner: paths that have branches.
    """

    bins: dict[tuple[int, ...], float]
    inner: frozenset[tuple[int, ...]]

    def bin_of(self, text: Sequence[int]) -> tuple[int, ...]:
        """The bin of a text: as far along the branches as it goes."""
        path: tuple[int, ...] = ()
        for token in text:
            longer = (*path, token)
            if longer in self.bins:
                return longer
            if longer not in self.inner:
                return (*path, _REST)
            path = longer
        raise ValueError(f"text {tuple(text)} is too short for its bin")


def build_tree(arms: EngineArms, task: Task, *, samples: int, depth: int = DEPTH) -> Tree:
    """Bins of the first `depth` tokens behind a prompt at temperature 1.

    A token has a branch where at least `LEAST_EXPECTED` of the samples are expected.
    """
    params = SamplingParams(temperature=1.0)
    least = LEAST_EXPECTED / samples
    ends = frozenset(arms.engine.target_config.eos_token_ids)
    bins: dict[tuple[int, ...], float] = {}
    inner: set[tuple[int, ...]] = set()
    places: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while places:
        path, chance = places.pop()
        inner.add(path)
        logits = arms.logits_behind([*task.token_ids, *path])
        row = distribution(logits[None], params)[0].cpu().numpy() * chance
        branches = np.flatnonzero(row >= least).tolist()
        bins[(*path, _REST)] = max(chance - float(row[branches].sum()), 0.0)
        for token in branches:
            longer = (*path, token)
            if len(longer) == depth or token in ends:
                bins[longer] = float(row[token])
            else:
                places.append((longer, float(row[token])))
    return Tree(bins, frozenset(inner))


def law_fit(
    arms: EngineArms,
    task: Task,
    *,
    samples: int,
    batch: int,
    level: float,
    seed: int,
    done: Callable[[int], None],
) -> Fit:
    """Sample texts with drafts and test their counts against the law.

    Args:
        task: its prompt is cut to the last `MAX_PROMPT_TOKENS` tokens.
        samples: texts, each with a seed of its own. batch: of them together.
        done: is told the texts of each batch.
    """
    short = Task(task.prompt_id, task.category, task.text, task.token_ids[-MAX_PROMPT_TOKENS:])
    tree = build_tree(arms, short, samples=samples)
    names = list(tree.bins)
    index = {name: number for number, name in enumerate(names)}
    counts = np.zeros(len(names), dtype=np.int64)
    for start in range(0, samples, batch):
        seeds = range(seed + start, seed + min(start + batch, samples))
        sampling = [SamplingParams(temperature=1.0, seed=value) for value in seeds]
        for text in arms.sample(short, sampling=sampling, tokens=DEPTH):
            counts[index[tree.bin_of(text)]] += 1
        done(len(sampling))
    law = np.array([tree.bins[name] for name in names])
    return fit_to_law(counts, law, level=level, seed=seed)
