"""Bytes that a round of GDN layers must move, whatever the kernel, and the time that takes.

A verify reads the state once and the inputs, and writes the outputs and what a commit needs: the
factors of every token or, as the default of SGLang 0.5.16 does, the whole state after every token.
A commit reads the factors and reads and writes the state, or copies the kept state.
"""

from __future__ import annotations

from typing import Literal

from gdn.workload import Shape

Form = Literal["factors", "states"]


def state_bytes(shape: Shape, state_bytes_per_value: int = 4) -> int:
    """State of one layer and request."""
    return shape.value_heads * shape.value_dim * shape.key_dim * state_bytes_per_value


def token_bytes(shape: Shape) -> int:
    """Inputs and outputs of one token and layer: mixed qkv, a, b in, one output row out; bf16."""
    return 2 * (shape.channels + 2 * shape.value_heads + shape.value_heads * shape.value_dim)


def factor_bytes(shape: Shape) -> int:
    """Factors of one token and layer: raw key in bf16, update and log decay in fp32."""
    update = shape.value_heads * shape.value_dim * 4
    return 2 * shape.key_heads * shape.key_dim + update + 4 * shape.value_heads


def verify_bytes(
    shape: Shape, tokens: int, form: Form = "factors", state_bytes_per_value: int = 4
) -> int:
    """Bytes of the verify of one layer and request."""
    state = state_bytes(shape, state_bytes_per_value)
    kept = factor_bytes(shape) if form == "factors" else state
    return state + tokens * (token_bytes(shape) + kept)


def commit_bytes(
    shape: Shape, accepted: int, form: Form = "factors", state_bytes_per_value: int = 4
) -> int:
    """Bytes of the commit of one layer and request; nothing accepted moves nothing."""
    if accepted == 0:
        return 0
    factors = accepted * factor_bytes(shape) if form == "factors" else 0
    return 2 * state_bytes(shape, state_bytes_per_value) + factors


def round_bytes(
    shape: Shape, batch: int, tokens: int, form: Form = "factors", state_bytes_per_value: int = 4
) -> int:
    """Bytes of one round of all layers and requests, every row accepted."""
    verify = verify_bytes(shape, tokens, form, state_bytes_per_value)
    commit = commit_bytes(shape, tokens, form, state_bytes_per_value)
    return shape.layers * batch * (verify + commit)


def microseconds(num_bytes: int, bytes_per_s: float) -> float:
    """Time to move that much at a measured bandwidth."""
    return 1e6 * num_bytes / bytes_per_s
