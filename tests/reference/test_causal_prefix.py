"""Rows of a block depend neither on the rows behind them nor on how many there are, bit by bit
where the backend allows.

A pass of the same shape gives the same bits: up to the first router whatever the later tokens are,
and to the end where the routes are given. With routes of its own a later token brings experts into
the sum over a block's experts, with weight zero for the other rows: the order of sums changes, not
their value. `test_first_router_stop.py` holds that up to rounding for all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_kit import new_kv_cache, random_tokens, trained_pair

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.reference.commit import commit
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache

CONTEXT = 250
KEEPS = (1, 2, 7, 15)
DTYPES = [torch.float32, torch.float64]


@dataclass(repr=False)
class Block:
    """What a pass over a block leaves behind.

    Attributes:
        residual: behind layer 0's GDN. experts: of the first router. logits, keys, values: of all
            rows. factors: of all GDN layers.
    """

    residual: torch.Tensor
    experts: torch.Tensor
    logits: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    factors: list[torch.Tensor]


class Runner:
    """Passes behind one prefilled context of the embedded pair; nothing is committed."""

    def __init__(self, dtype: torch.dtype) -> None:
        folder = trained_pair("bundled")
        self.engine: Engine = load_pair(
            folder / "target", folder / "drafter", dtype=dtype, max_batch=2, max_context=512
        )
        engine = self.engine
        self.slot = engine.pool.take()
        self.cache: KVCache = new_kv_cache(engine, CONTEXT + 64)
        tokens = self.tokens(CONTEXT, seed=1)
        layout = RowLayout([self.slot], [0], [CONTEXT], engine.device)
        with torch.inference_mode():
            state, routed = engine.target.first_router(
                torch.tensor(tokens), layout, engine.pool, in_place=True
            )
            engine.target.finish(state, routed, engine.pool, [self.cache])

    def tokens(self, count: int, seed: int) -> list[int]:
        return random_tokens(self.engine.target_config.vocab_size, count, seed)

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> Block:
        engine, rows = self.engine, len(tokens)
        layout = RowLayout([self.slot], [CONTEXT], [rows], engine.device)
        state, routed = engine.target.first_router(torch.tensor(tokens), layout, engine.pool)
        residual = state.residual_RH.clone()
        hidden = engine.target.finish(state, routed, engine.pool, [self.cache])
        span = slice(CONTEXT, CONTEXT + rows)
        return Block(
            residual,
            routed.experts_RK,
            engine.target.logits(hidden),
            self.cache.keys[:, :, span].clone(),
            self.cache.values[:, :, span].clone(),
            [part for f in state.factors for part in (f.update_NTV, f.gate_NT1)],
        )

    def force_routes(self, seed: int) -> None:
        """Every row of a block gets given experts, whatever its token."""
        config = self.engine.target_config
        generator = torch.Generator().manual_seed(seed)
        for block in self.engine.target.blocks:
            rows = [
                torch.randperm(config.num_experts, generator=generator)[: config.experts_per_token]
                for _ in range(BLOCK_SIZE)
            ]
            block.forced_experts_RK = torch.stack(rows)

    def free_routes(self) -> None:
        for block in self.engine.target.blocks:
            block.forced_experts_RK = None


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


@pytest.mark.parametrize("keep", KEEPS)
def test_later_tokens_change_no_bit_before_the_first_expert(runner: Runner, keep: int) -> None:
    for seed in range(5):
        tokens, others = (runner.tokens(BLOCK_SIZE, seed=s) for s in (seed, 100 + seed))
        first, second = runner.run(tokens), runner.run([*tokens[:keep], *others[keep:]])
        assert torch.equal(first.residual[:keep], second.residual[:keep])
        assert torch.equal(first.experts[:keep], second.experts[:keep])
        assert not torch.equal(first.residual[keep:], second.residual[keep:])


@pytest.mark.parametrize("keep", KEEPS)
def test_later_tokens_change_no_bit_where_routes_are_given(runner: Runner, keep: int) -> None:
    runner.force_routes(seed=keep)
    try:
        for seed in range(5):
            tokens, others = (runner.tokens(BLOCK_SIZE, seed=s) for s in (seed, 100 + seed))
            first, second = runner.run(tokens), runner.run([*tokens[:keep], *others[keep:]])
            assert torch.equal(first.logits[:keep], second.logits[:keep])
            assert torch.equal(first.keys[:, :, :keep], second.keys[:, :, :keep])
            assert torch.equal(first.values[:, :, :keep], second.values[:, :, :keep])
            for mine, other in zip(first.factors, second.factors, strict=True):
                assert torch.equal(mine[:, :keep], other[:, :keep])
            assert not torch.equal(first.logits[keep:], second.logits[keep:])
    finally:
        runner.free_routes()


def test_a_pass_writes_no_state_and_a_commit_of_nothing_changes_none(runner: Runner) -> None:
    """Rejected rows need no undoing: recurrent states and conv windows were never touched."""
    engine = runner.engine
    states = engine.pool.recurrent_SXHVK.clone(), engine.pool.conv_SXWC.clone()
    with torch.inference_mode():
        layout = RowLayout([runner.slot], [CONTEXT], [BLOCK_SIZE], engine.device)
        tokens = torch.tensor(runner.tokens(BLOCK_SIZE, seed=3))
        state, routed = engine.target.first_router(tokens, layout, engine.pool)
        engine.target.finish(state, routed, engine.pool, [runner.cache])
        assert torch.equal(engine.pool.recurrent_SXHVK, states[0])
        assert torch.equal(engine.pool.conv_SXWC, states[1])
        commit(engine.pool, state.factors, layout, [0])
        assert torch.equal(engine.pool.recurrent_SXHVK, states[0])
        assert torch.equal(engine.pool.conv_SXWC, states[1])


@pytest.mark.parametrize("count", [1, 2, 7, 15])
def test_states_of_a_prefix_do_not_know_the_rejected_tokens(runner: Runner, count: int) -> None:
    """Bit by bit: committing `count` rows of two blocks that differ behind them."""
    engine = runner.engine
    before = engine.pool.recurrent_SXHVK.clone(), engine.pool.conv_SXWC.clone()
    tokens, others = (runner.tokens(BLOCK_SIZE, seed=s) for s in (11, 12))
    layout = RowLayout([runner.slot], [CONTEXT], [BLOCK_SIZE], engine.device)
    runner.force_routes(seed=count)
    found = []
    try:
        for block in (tokens, [*tokens[:count], *others[count:]]):
            with torch.inference_mode():
                state, routed = engine.target.first_router(torch.tensor(block), layout, engine.pool)
                engine.target.finish(state, routed, engine.pool, [runner.cache])
                commit(engine.pool, state.factors, layout, [count])
                found.append((engine.pool.recurrent_SXHVK.clone(), engine.pool.conv_SXWC.clone()))
                engine.pool.recurrent_SXHVK.copy_(before[0])
                engine.pool.conv_SXWC.copy_(before[1])
    finally:
        runner.free_routes()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], before[0])
