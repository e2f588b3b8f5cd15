"""Verify calls in which whatever must not be read or written is poison, and their check.

Every form of verification is tested through `FORMS`; a new one is one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gdn_kit import Inputs, make_inputs, poisoned_factors

from hybridspec.kernels.gdn.block import verify_block
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.naive import log_decay, naive_commit, normalise, split_mixed
from hybridspec.kernels.gdn.sequential import verify_sequential
from hybridspec.reference import gdn as reference

FORMS: dict[str, Callable[..., None]] = {"block": verify_block, "sequential": verify_sequential}

BF16, FP32 = torch.bfloat16, torch.float32
# (rows of V a program holds, its warps).
VARIANTS = ((16, 1), (32, 2), (64, 4))
# Of one head, relative in the Frobenius norm: no head may be worse; half of them must be as good.
GATE, TYPICAL = 3e-5, 3e-6
# A quiet NaN with a payload: arithmetic, and even a conversion, would change its bits.
PAYLOAD = {FP32: 0x7FC12345, BF16: 0x7FD3}
INTEGER = {FP32: torch.int32, BF16: torch.int16}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(INTEGER[x.dtype])


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit by bit, NaN payloads and signs of zeros included."""
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


def poison(x: torch.Tensor) -> torch.Tensor:
    """`x` overwritten by NaNs with a payload."""
    value = torch.tensor(PAYLOAD[x.dtype], dtype=INTEGER[x.dtype], device=x.device)
    return x.copy_(value.view(x.dtype))


def quick(device: torch.device) -> dict[str, Any]:
    """Options for tests that do not care: few programs and steps in the interpreter."""
    return {} if device.type == "cuda" else {"value_block": 64, "warps": 16}


def rounding(x: torch.Tensor) -> float:
    """Largest relative error of a cast to bf16; the interpreter truncates."""
    return 2.0**-8 if x.is_cuda else 2.0**-7


def int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def pool_of(
    generator: torch.Generator,
    shape: Sequence[int],
    live: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    other_heads: int = 1,
) -> torch.Tensor:
    """State pool [..., slots, HV, V, K] inside a larger one; all but the `live` slots poison."""
    *layers, slots, heads, value_dim, key_dim = shape
    wide = torch.empty(*layers, slots + 1, heads + other_heads, value_dim, key_dim, dtype=dtype)
    pool = poison(wide).to(device)[..., :slots, :heads, :, :]
    for slot in sorted(set(live) - {-1}):
        values = torch.randn(*layers, heads, value_dim, key_dim, generator=generator) / 4
        pool[..., slot, :, :, :] = values.to(device, dtype)
    return pool


def head_errors(found: torch.Tensor, expected: torch.Tensor, dims: int = 2) -> torch.Tensor:
    """Relative errors in the Frobenius norm over the last `dims` dimensions; NaN is infinite."""
    axes = tuple(range(-dims, 0))
    found, expected = found.double(), expected.double()
    difference = torch.linalg.vector_norm(found - expected, dim=axes)
    scale = torch.linalg.vector_norm(expected, dim=axes).clamp_min(1e-30)
    return (difference / scale).nan_to_num(torch.inf).flatten()


def assert_accurate(errors: torch.Tensor, cast: float = 0.0) -> None:
    """Errors of heads in fp32 arithmetic; `cast` is the largest that a cast of results adds."""
    assert errors.max() <= GATE + cast, f"worst {errors.max():.2e}"
    assert errors.median() <= TYPICAL + cast / 2, f"median {errors.median():.2e}"


@dataclass
class Case:
    """One verify call. `run` poisons all outputs, `check` holds them against float64."""

    inputs: Inputs
    state_SHVK: torch.Tensor
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    factors: Factors
    out_BTHV: torch.Tensor
    layer: int = 1

    @classmethod
    def make(
        cls,
        device: torch.device,
        rows: int,
        lengths: Sequence[int],
        *,
        key_heads: int = 1,
        value_heads: int = 1,
        key_dim: int = 64,
        value_dim: int = 64,
        regime: str = "normal",
        state: torch.dtype = FP32,
        out: torch.dtype = FP32,
        slots: Sequence[int] | None = None,
        seed: int = 0,
        nonfinite: bool = True,
    ) -> Case:
        """Slot 0 is never live by default: it is where a -1 would be clamped to.

        Args:
            lengths: rows of each request; what lies past them is NaN and inf in all inputs, where
                `nonfinite`.
        """
        generator = torch.Generator().manual_seed(seed)
        batch = len(lengths)
        inputs = make_inputs(
            generator,
            batch,
            rows,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            regime,
            device,
        )
        if slots is None:
            slots = [int(i) + 1 for i in torch.randperm(batch + 2, generator=generator)[:batch]]
        for i, length in enumerate(lengths):
            for x in (inputs.mixed_BTC, inputs.a_BTH, inputs.b_BTH):
                if nonfinite:
                    x[i, max(length, 0) :: 2] = torch.nan
                    x[i, max(length, 0) + 1 :: 2] = torch.inf
        wide = torch.empty(batch, rows, value_heads + 1, value_dim, dtype=out, device=device)
        return cls(
            inputs,
            pool_of(
                generator,
                (batch + 4, value_heads, value_dim, key_dim),
                slots,
                state,
                device,
            ),
            int32(slots, device),
            int32(lengths, device),
            poisoned_factors(3, batch + 1, key_heads, value_heads, key_dim, value_dim, device),
            wide[:, :, :value_heads],
        )

    @property
    def rows(self) -> int:
        return self.inputs.mixed_BTC.shape[1]

    def live_rows(self) -> list[int]:
        """Rows of each request that count."""
        return [
            min(max(length, 0), self.rows) if slot >= 0 else 0
            for slot, length in zip(self.slots_B.tolist(), self.lengths_B.tolist(), strict=True)
        ]

    def run(self, verify: Callable[..., None], **options: Any) -> tuple[torch.Tensor, ...]:
        """Copies of the output and of this layer's keys, updates and decays; all else checked."""
        poison(self.out_BTHV)
        held = (self.factors.key_XRHTK, self.factors.update_XRHTV, self.factors.decay_XRHT)
        for x in held:
            poison(x)
        before = [x.clone() for x in (self.state_SHVK, self.slots_B, self.lengths_B)]
        verify(
            *self.inputs.tensors(),
            self.state_SHVK,
            self.slots_B,
            self.lengths_B,
            self.factors,
            self.layer,
            self.out_BTHV,
            key_heads=self.inputs.key_heads,
            **options,
        )
        assert_bits(self.state_SHVK, before[0])
        assert torch.equal(self.slots_B, before[1])
        assert torch.equal(self.lengths_B, before[2])
        for x in held:
            untouched = poison(torch.empty_like(x))
            for i, live in enumerate(self.live_rows()):
                untouched[self.layer, i, :, :live] = x[self.layer, i, :, :live]
            assert_bits(x, untouched)
        for i, live in enumerate(self.live_rows()):
            assert self.out_BTHV[i, live:].eq(0).all(), f"request {i} past its {live} rows"
        return tuple(x.clone() for x in (self.out_BTHV, *(x[self.layer] for x in held)))

    def check(self, verify: Callable[..., None], **options: Any) -> None:
        """Outputs, factors and the states that every prefix of them gives, against float64."""
        out_BTHV, key_RHTK, update_RHTV, decay_RHT = self.run(verify, **options)
        x = self.inputs
        _, value_heads, value_dim, key_dim = self.state_SHVK.shape
        _, keys, _ = split_mixed(x.mixed_BTC, x.key_heads, value_heads, key_dim, value_dim)
        output_errors, state_errors = [], []
        for i, live in enumerate(self.live_rows()):
            if live == 0:
                continue
            state_HVK = self.state_SHVK[self.slots_B[i]].double()
            outputs_THV, states_NHVK = x.reference(i, live, state_HVK)
            output_errors.append(
                head_errors(out_BTHV[i, :live].transpose(0, 1), outputs_THV.transpose(0, 1))
            )
            assert_bits(key_RHTK[i, :, :live].transpose(0, 1), keys[i, :live])
            for n in range(1, live + 1):
                state = naive_commit(
                    state_HVK,
                    keys[i, :n],
                    update_RHTV[i, :, :n],
                    decay_RHT[i, :, :n],
                )
                state_errors.append(head_errors(state, states_NHVK[n]))
        if output_errors:
            cast = rounding(self.out_BTHV) if self.out_BTHV.dtype == BF16 else 0.0
            assert_accurate(torch.cat(output_errors), cast)
            assert_accurate(torch.cat(state_errors))


def reference_factors(
    inputs: Inputs, state_BHVK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [B, T, HV, V] and factors of every request by `hybridspec/reference/gdn.py`.

    In the dtype of the state. The factors come in the layout of `Factors`: raw keys
    [B, H, T, K], updates over the norms of their keys [B, HV, T, V], log decays [B, HV, T].
    """
    dtype = state_BHVK.dtype
    batch, value_heads, value_dim, key_dim = state_BHVK.shape
    q, k, v = (
        x.to(dtype).transpose(1, 2)
        for x in split_mixed(inputs.mixed_BTC, inputs.key_heads, value_heads, key_dim, value_dim)
    )
    repeat = value_heads // inputs.key_heads
    gate = log_decay(inputs.a_BTH.to(dtype), inputs.A_log_H.to(dtype), inputs.dt_bias_H.to(dtype))
    qk = torch.cat([normalise(q), normalise(k)], 2).repeat_interleave(repeat, 1)
    gate_BHT = gate.transpose(1, 2)
    rows = v.shape[2]
    outputs, updates = reference.verify_block(
        qk.flatten(0, 1),
        v.flatten(0, 1),
        gate_BHT.flatten(0, 1).unsqueeze(2),
        inputs.b_BTH.to(dtype).sigmoid().transpose(1, 2).flatten(0, 1).unsqueeze(2),
        state_BHVK.flatten(0, 1),
        reference.decay_mask(rows, dtype, v.device),
    )
    norms = (k.square().sum(-1, keepdim=True) + 1e-6).sqrt().repeat_interleave(repeat, 1)
    outputs_BHTV = outputs.unflatten(0, (batch, value_heads)) * key_dim**-0.5
    updates_BHTV = updates.unflatten(0, (batch, value_heads)) / norms
    return outputs_BHTV.transpose(1, 2), k, updates_BHTV, gate_BHT
