"""What GDN kernels are timed and checked on: distinct random inputs for each layer and slot set.

Tensor names end in their axes: N slot set, X layer, B request, T token, C channel, H key head or
(for `a`, `b`, gates and outputs) value head, V value dim, K key dim, S slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

GATES = ("normal", "no-decay", "strong", "strong-then-gentle", "repeated-keys")


@dataclass(frozen=True)
class Shape:
    """GDN layers of a model; the defaults are those of Qwen3.6-35B-A3B."""

    layers: int = 30
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128

    @property
    def channels(self) -> int:
        """Channels of the mixed query, key and value after the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Case:
    """One column of the table.

    Attributes:
        tokens: rows verified for each request, 1..16.
        sets: slot sets that a graph rotates through, one round each.
        gates: regime of the decay, one of `GATES`.
    """

    shape: Shape
    batch: int
    tokens: int
    sets: int
    state_dtype: torch.dtype = torch.float32
    gates: str = "normal"

    @property
    def slots(self) -> int:
        return self.sets * self.batch

    def smaller(self, layers: int) -> Case:
        """The same with fewer layers: its kernels specialise in the same way."""
        return replace(self, shape=replace(self.shape, layers=layers))


@dataclass
class Workload:
    """Inputs, state pool and cursors of a case.

    Attributes:
        mixed_NXBTC: query, key and value after the convolution, bf16.
        a_NXBTH, b_NXBTH: decay and beta logits, bf16, strided slices of one projection.
        A_log_XH, dt_bias_XH: gate parameters, fp32.
        state_XSHVK: state pool, as every method finds and leaves it.
        slots_NB: slot of each request, int32; no slot twice.
        lengths_B: rows to verify, int32; all `tokens`.
        accepted_B: rows to commit, int32; `last_step_B` is one less.
    """

    case: Case
    mixed_NXBTC: torch.Tensor
    a_NXBTH: torch.Tensor
    b_NXBTH: torch.Tensor
    A_log_XH: torch.Tensor
    dt_bias_XH: torch.Tensor
    state_XSHVK: torch.Tensor
    slots_NB: torch.Tensor
    lengths_B: torch.Tensor
    accepted_B: torch.Tensor
    last_step_B: torch.Tensor
    _first_state_XSHVK: torch.Tensor = field(repr=False)

    @property
    def device(self) -> torch.device:
        return self.state_XSHVK.device

    @property
    def first_state_XSHVK(self) -> torch.Tensor:
        """The state pool as it was drawn."""
        return self._first_state_XSHVK

    def restore(self) -> None:
        self.state_XSHVK.copy_(self._first_state_XSHVK)

    def set_accepted(self, counts: Sequence[int]) -> None:
        accepted = torch.tensor(list(counts), dtype=torch.int32, device=self.device)
        self.accepted_B.copy_(accepted)
        self.last_step_B.copy_(accepted - 1)

    def split(
        self, index: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q, k `[B*T, H, K]`, v `[B*T, HV, V]`, a, b `[B*T, HV]` of one layer."""
        shape = self.case.shape
        keys = shape.key_heads * shape.key_dim
        rows = self.mixed_NXBTC[index, layer].flatten(0, 1)
        query, key, value = rows.split([keys, keys, shape.channels - 2 * keys], dim=-1)
        return (
            query.unflatten(-1, (shape.key_heads, shape.key_dim)),
            key.unflatten(-1, (shape.key_heads, shape.key_dim)),
            value.unflatten(-1, (shape.value_heads, shape.value_dim)),
            self.a_NXBTH[index, layer].flatten(0, 1),
            self.b_NXBTH[index, layer].flatten(0, 1),
        )


def make_workload(case: Case, device: torch.device, seed: int) -> Workload:
    """Draw a workload; the same seed gives the same numbers on one kind of device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape, axes = case.shape, (case.sets, case.shape.layers, case.batch, case.tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(low: float, high: float) -> torch.Tensor:
        drawn = torch.empty(shape.layers, shape.value_heads, device=device)
        return drawn.uniform_(low, high, generator=generator)

    mixed = F.silu(normal(*axes, shape.channels))
    projected = normal(*axes, 2 * shape.value_heads)
    A_log = uniform(0.01, 16.0).log()
    step = uniform(-6.9, -2.3).exp()
    dt_bias = step + torch.log(-torch.expm1(-step))
    a, b = projected.split(shape.value_heads, dim=-1)
    if case.gates == "no-decay":
        dt_bias -= 12.0
    elif case.gates == "strong":
        a *= 6.0
        dt_bias += 3.0
    elif case.gates == "strong-then-gentle":
        dt_bias -= 8.0
        a[..., ::3, :] += 60.0
    elif case.gates == "repeated-keys":
        dt_bias -= 12.0
        b.fill_(9.0)
        keys = slice(shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim)
        mixed[..., keys] = mixed[..., :1, keys] + 1e-3 * mixed[..., keys]
    elif case.gates != "normal":
        raise ValueError(f"gates {case.gates!r} is none of {GATES}")
    projected = projected.to(torch.bfloat16)
    state = normal(
        shape.layers, case.slots, shape.value_heads, shape.value_dim, shape.key_dim
    ).mul_(0.3)
    state = state.to(case.state_dtype)
    # Slots of a request are nowhere near one another in a pool that has been in use.
    order = torch.randperm(case.slots, generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    return Workload(
        case,
        mixed.to(torch.bfloat16),
        projected[..., : shape.value_heads],
        projected[..., shape.value_heads :],
        A_log,
        dt_bias,
        state,
        order.to(torch.int32).reshape(case.sets, case.batch).to(device),
        lengths,
        lengths.clone(),
        lengths - 1,
        state.clone(),
    )
