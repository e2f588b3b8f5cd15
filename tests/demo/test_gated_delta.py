from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.demo.gated_delta import (
    UnitLowerInverse,
    chunk_gated_delta,
    recurrent_gated_delta,
)

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


def inputs(tokens: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(2, tokens, KEY_HEADS, KEY_DIM),
        "k": normal(2, tokens, KEY_HEADS, KEY_DIM),
        "v": normal(2, tokens, VALUE_HEADS, VALUE_DIM),
        "log_decay": -normal(2, tokens, VALUE_HEADS).exp(),
        "beta": normal(2, tokens, VALUE_HEADS).sigmoid(),
        "state": normal(2, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    }


def naive(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence, one token, head and sequence at a time."""
    state, out = x["state"].clone(), torch.zeros_like(x["v"])
    for b in range(2):
        for head in range(VALUE_HEADS):
            source = head * KEY_HEADS // VALUE_HEADS
            for t in range(x["q"].shape[1]):
                q, k = x["q"][b, t, source], x["k"][b, t, source]
                q = q / (q.square().sum() + 1e-6).sqrt() / KEY_DIM**0.5
                k = k / (k.square().sum() + 1e-6).sqrt()
                s = state[b, head] * x["log_decay"][b, t, head].exp()
                s = s + torch.outer(k, x["beta"][b, t, head] * (x["v"][b, t, head] - s.T @ k))
                state[b, head] = s
                out[b, t, head] = s.T @ q
    return out, state


@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 37), log_chunk=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_chunk_form_equals_the_recurrence(tokens: int, log_chunk: int, seed: int) -> None:
    x = inputs(tokens, seed)
    out, state = chunk_gated_delta(**x, chunk=1 << log_chunk)
    expected_out, expected_state = naive(x)
    torch.testing.assert_close(out, expected_out, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-10)


def test_single_token_form_equals_the_recurrence() -> None:
    x = inputs(1, 3)
    out, state = recurrent_gated_delta(**x)
    expected_out, expected_state = naive(x)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_inverse_is_exact_and_has_the_right_gradient(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(3, n, n, generator=generator, dtype=torch.float64).tril(-1).requires_grad_()
    inverse = UnitLowerInverse.apply(a)
    unit = torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(inverse @ (unit + a), unit.expand(3, n, n))
    # The gradient is defined on the strictly lower part only.
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), (a,))
