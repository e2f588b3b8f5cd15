"""The delta rule in blocks against the recurrence row by row, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.reference.gdn import decay_mask, fold_factors, naive_recurrence, verify_block

F64 = torch.float64
TOLERANCE = 1e-11


@dataclass
class Block:
    """Inputs of one block: N rows of heads, T rows, and the state before them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    @property
    def rows(self) -> int:
        return self.v.shape[1]

    @property
    def qk(self) -> torch.Tensor:
        return torch.cat([self.q, self.k], 1)

    def naive(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rows == 0:
            return self.v[:, :0], self.state
        cut = self.with_rows(lambda _name, x: x[:, :rows])
        return naive_recurrence(cut.q, cut.k, cut.v, cut.gate, cut.beta, self.state)

    def with_rows(self, make: Callable[[str, torch.Tensor], torch.Tensor]) -> Block:
        """The same state before rows made from each input by its name."""
        rows = {name: make(name, getattr(self, name)) for name in ("q", "k", "v", "gate", "beta")}
        return replace(self, **rows)

    def verify(self) -> tuple[torch.Tensor, torch.Tensor]:
        return verify_block(
            self.qk,
            self.v,
            self.gate[..., None],
            self.beta[..., None],
            self.state,
            decay_mask(self.rows, self.v.dtype, self.v.device),
        )

    def fold(self, factors: torch.Tensor, committed: torch.Tensor | int) -> torch.Tensor:
        state = self.state.clone()
        fold_factors(state, self.qk, factors, self.gate[..., None], committed)
        return state


def random_block(
    seed: int, batch: int, rows: int, key: int, value: int, *, strength: str = "mixed"
) -> Block:
    """Unit keys, gates from 0 down to -50 and write strengths at both ends of (0, 1)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=F64)

    q, k = normal(batch, rows, key), normal(batch, rows, key)
    k = k / k.norm(dim=-1, keepdim=True)
    q = q / q.norm(dim=-1, keepdim=True)
    # Neighbours that repeat a key make the triangular system as hard as it gets.
    if rows > 2:
        k[:, 1] = k[:, 0]
    weak, strong = -0.1 * uniform(batch, rows), -50.0 * uniform(batch, rows)
    gate = {
        "weak": weak,
        "strong": strong,
        "mixed": torch.where(uniform(batch, rows) < 0.5, weak, strong),
        "none": torch.zeros(batch, rows, dtype=F64),
    }[strength]
    beta = uniform(batch, rows)
    beta = torch.where(uniform(batch, rows) < 0.3, 1.0 - 1e-9, beta)
    return Block(q, k, normal(batch, rows, value), gate, beta, normal(batch, value, key))


blocks = st.builds(
    random_block,
    st.integers(0, 2**20),
    st.integers(1, 5),
    st.integers(1, 16),
    st.sampled_from([1, 3, 8, 15, 33]),
    st.sampled_from([1, 2, 9, 32]),
    strength=st.sampled_from(["weak", "strong", "mixed", "none"]),
)


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(have).all()
    torch.testing.assert_close(have, want, atol=TOLERANCE, rtol=1e-11)


@settings(max_examples=60, deadline=None)
@given(blocks)
def test_outputs_and_every_prefix_equal_the_recurrence(block: Block) -> None:
    before = block.state.clone()
    outputs, factors = block.verify()
    assert torch.equal(block.state, before)
    close(outputs, block.naive(block.rows)[0])
    for committed in range(block.rows + 1):
        close(block.fold(factors, committed), block.naive(committed)[1])


@settings(max_examples=60, deadline=None)
@given(blocks, st.data())
def test_each_request_commits_its_own_prefix(block: Block, data: st.DataObject) -> None:
    _, factors = block.verify()
    counts = data.draw(
        st.lists(st.integers(0, block.rows), min_size=len(block.state), max_size=len(block.state))
    )
    new = block.fold(factors, torch.tensor(counts))
    for row, committed in enumerate(counts):
        close(new[row], block.naive(committed)[1][row])
        if committed == 0:
            assert torch.equal(new[row], block.state[row])


@pytest.mark.parametrize("committed", [0, torch.zeros(3, dtype=torch.int64)])
def test_no_rows_leave_the_state_bit_by_bit(committed: torch.Tensor | int) -> None:
    block = random_block(1, 3, 16, 8, 8)
    block.state = block.state.to(torch.float32) * 1e20
    block = block.with_rows(lambda _name, x: x.to(torch.float32))
    _, factors = block.verify()
    new = block.fold(factors, committed)
    assert torch.equal(new, block.state)
    assert new.data_ptr() != block.state.data_ptr()


@settings(max_examples=30, deadline=None)
@given(blocks, st.integers(0, 2**20))
def test_later_rows_change_no_earlier_row(block: Block, seed: int) -> None:
    keep = 1 + seed % block.rows
    other = random_block(seed, len(block.state), block.rows, block.q.shape[2], block.v.shape[2])
    outputs, factors = block.verify()
    changed = block.with_rows(
        lambda name, x: torch.cat([x[:, :keep], getattr(other, name)[:, keep:]], 1)
    )
    outputs_2, factors_2 = changed.verify()
    close(outputs_2[:, :keep], outputs[:, :keep])
    close(factors_2[:, :keep], factors[:, :keep])
    close(changed.fold(factors_2, keep), block.fold(factors, keep))


def test_padding_rows_do_nothing() -> None:
    """Rows of zeros with gate 0 and strength 0, as a ragged batch has them behind a short block."""
    block = random_block(4, 2, 5, 8, 8)
    padded = block.with_rows(lambda _name, x: torch.cat([x, x.new_zeros(2, 4, *x.shape[2:])], 1))
    outputs, factors = padded.verify()
    close(outputs[:, :5], block.verify()[0])
    close(padded.fold(factors, 9), block.naive(5)[1])


def test_recurrence_is_the_published_formula() -> None:
    """Two rows by hand: S = e^g S + beta (v - e^g S k) k', o = S q."""
    block = random_block(9, 1, 2, 3, 2)
    state, outputs = block.state[0], []
    for row in range(2):
        k, v, q = block.k[0, row], block.v[0, row], block.q[0, row]
        decayed = block.gate[0, row].exp() * state
        state = decayed + block.beta[0, row] * torch.outer(v - decayed @ k, k)
        outputs.append(state @ q)
    have, new = block.naive(2)
    close(have[0], torch.stack(outputs))
    close(new[0], state)
