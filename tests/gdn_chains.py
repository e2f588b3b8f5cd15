"""Rounds of verify and commit behind one another, next to the same rounds in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gdn_cases import GATE, TYPICAL, head_errors, int32, pool_of
from gdn_kit import REGIMES, make_inputs, poisoned_factors

from hybridspec.kernels.gdn.commit import commit
from hybridspec.kernels.gdn.pending import Pending, advance, flush


@dataclass
class Chain:
    """Requests of several layers; every round has its own gate regime, lengths and acceptance.

    A fifth of the rounds of a request verify nothing, and a round may accept nothing. States of
    slots that no request owns are NaN, and so are factors at the start.

    Attributes:
        beside_plain: follow the accepted rows in plain fp32 too, one row after the other.
        plain_errors: of those states, one a round.
    """

    device: torch.device
    verify: Callable[..., None]
    batch: int = 1
    layers: int = 1
    rows: int = 16
    key_heads: int = 1
    value_heads: int = 2
    dim: int = 64
    regime: str | None = None
    state: torch.dtype = torch.float32
    lazy: bool = False
    verify_options: dict[str, Any] = field(default_factory=dict)
    commit_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    beside_plain: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.slots = [2 * i + 1 for i in range(self.batch)]
        self.shape = (self.key_heads, self.value_heads, self.dim, self.dim)
        self.state_XSHVK = pool_of(
            self.generator,
            (self.layers, 2 * self.batch + 1, self.value_heads, self.dim, self.dim),
            self.slots,
            self.state,
            self.device,
            other_heads=0,
        )
        self.exact_XBHVK = self.state_XSHVK[:, self.slots].double()
        factor_rows = 2 * self.batch if self.lazy else self.batch
        self.factors = poisoned_factors(self.layers, factor_rows, *self.shape, self.device)
        self.pending = Pending.allocate(self.batch, device=self.device)
        self.output_errors: list[float] = []
        self.state_errors: list[float] = []
        self.plain_errors: list[float] = []
        self.plain_XBHVK = self.exact_XBHVK.float()

    def _draw(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def round(self) -> None:
        """Verify every layer, accept at random, commit; float64 follows with the same rows."""
        lengths = [0 if self._draw(5) == 0 else self._draw(self.rows) + 1 for _ in self.slots]
        accepted = [self._draw(length + 1) for length in lengths]
        slots_B, lengths_B = int32(self.slots, self.device), int32(lengths, self.device)
        accepted_B = int32(accepted, self.device)
        output_errors, state_errors = [], []
        for x in range(self.layers):
            inputs = make_inputs(
                self.generator,
                self.batch,
                self.rows,
                *self.shape,
                self.regime or REGIMES[self._draw(len(REGIMES))],
                self.device,
            )
            out = torch.full(
                (self.batch, self.rows, self.value_heads, self.dim),
                torch.nan,
                device=self.device,
            )
            self.verify(
                *inputs.tensors(),
                self.state_XSHVK[x],
                slots_B,
                lengths_B,
                self.factors,
                x,
                out,
                key_heads=self.key_heads,
                **({"pending": self.pending} if self.lazy else {}),
                **self.verify_options,
            )
            for i, (length, count) in enumerate(zip(lengths, accepted, strict=True)):
                outputs, states = inputs.reference(i, length, self.exact_XBHVK[x, i])
                if length:
                    found = out[i, :length].transpose(0, 1)
                    output_errors.append(head_errors(found, outputs.transpose(0, 1)).max())
                assert out[i, length:].eq(0).all()
                self.exact_XBHVK[x, i] = states[count]
                if self.beside_plain:
                    plain = inputs.plain_states(i, count, self.plain_XBHVK[x, i])
                    self.plain_XBHVK[x, i] = plain[count]
        if self.lazy:
            advance(self.pending, slots_B, accepted_B)
        else:
            commit(
                self.state_XSHVK,
                slots_B,
                accepted_B,
                self.factors,
                **self.commit_options,
            )
            state_errors = [head_errors(self.state_XSHVK[:, self.slots], self.exact_XBHVK).max()]
        self.output_errors += [float(error) for error in output_errors]
        self.state_errors += [float(error) for error in state_errors]
        if self.beside_plain:
            self.plain_errors.append(float(head_errors(self.plain_XBHVK, self.exact_XBHVK).max()))

    def finish(self) -> float:
        """Worst error of the states with everything folded in."""
        if self.lazy:
            flush(self.state_XSHVK, int32(self.slots, self.device), self.factors, self.pending)
        others = [s for s in range(self.state_XSHVK.shape[1]) if s not in self.slots]
        assert self.state_XSHVK[:, others].isnan().all()
        return float(head_errors(self.state_XSHVK[:, self.slots], self.exact_XBHVK).max())


def assert_no_drift(errors: list[float]) -> None:
    """Errors stay within the gate, and their last quarter is no worse than their second."""
    values = torch.tensor(errors, dtype=torch.float64)
    quarter = len(errors) // 4
    second, last = values[quarter : 2 * quarter].median(), values[-quarter:].median()
    assert values.max() <= GATE, f"worst {values.max():.2e}"
    assert values.median() <= TYPICAL, f"median {values.median():.2e}"
    assert last <= 1.5 * second, f"second quarter {second:.2e}, last {last:.2e}"


def assert_no_worse_than_plain(errors: list[float], plain: list[float]) -> None:
    """Errors stay within the gate, and in every quarter near plain fp32 decoding's of these rows.

    For rows that hardly forget: rounding errors pile up there in whatever arithmetic, as a random
    walk by the square root of 7 / 3 from the second quarter to the last.
    """
    values = torch.tensor(errors, dtype=torch.float64)
    assert values.max() <= GATE, f"worst {values.max():.2e}"
    assert values.median() <= TYPICAL, f"median {values.median():.2e}"
    ours, others = (
        [float(part.median()) for part in torch.tensor(e, dtype=torch.float64).chunk(4)]
        for e in (errors, plain)
    )
    assert all(a <= 1.5 * b for a, b in zip(ours, others, strict=True)), f"{ours} beside {others}"
