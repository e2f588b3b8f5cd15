"""A round of a few matrix products and one kernel, whose every number is known exactly."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WIDTH = 64
MAX_ROWS = 16
LOG_ROUNDS = 256


@triton.jit
def choose_lengths(p_schedule, p_round, p_lengths, ROUNDS, BATCH: tl.constexpr):
    """Lengths of this round from a table, and the round's number one up: all on the device."""
    number = tl.load(p_round)
    for request in tl.static_range(BATCH):
        length = tl.load(p_schedule + (number % ROUNDS) * BATCH + request)
        tl.store(p_lengths + request, length)
    tl.store(p_round, number + 1)


@triton.jit
def finish_rows(p_h, p_out, p_lengths, p_round, p_log, ROWS, MAX: tl.constexpr, D: tl.constexpr,
                DEPENDENT: tl.constexpr):  # fmt: skip
    """out = 2 h + 1 on live rows, nothing on others; logs the geometry that ran."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    request, row = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, D)
    if row < tl.load(p_lengths + request):
        h = tl.load(p_h + (request * ROWS + row) * D + o_d)
        tl.store(p_out + (request * MAX + row) * D + o_d, 2.0 * h + 1.0)
    if row == 0 and request == 0:
        tl.store(p_log + tl.load(p_round) - 1, ROWS)


class ToyRound:
    """Implements `SplitRound`. Inputs are small integers, so that sums have one value only.

    Args:
        batch: requests.
        dependent: launch the kernel dependently (compute capability 9 and later).
    """

    max_rows = MAX_ROWS

    def __init__(
        self, device: torch.device, *, batch: int = 1, dependent: bool = False, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> torch.Tensor:
            values = torch.randint(-3, 4, shape, generator=generator)
            return values.float().to(device)

        self.batch, self.dependent = batch, dependent
        self.x_BTD = integers(batch, MAX_ROWS, WIDTH)
        self.first_DD, self.second_DD = integers(WIDTH, WIDTH), integers(WIDTH, WIDTH)
        self.out_BTD = torch.empty(batch, MAX_ROWS, WIDTH, device=device)
        self.lengths_B = torch.ones(batch, dtype=torch.int32, device=device)
        self.schedule_NB = torch.ones(LOG_ROUNDS, batch, dtype=torch.int32, device=device)
        self.round = torch.zeros(1, dtype=torch.int32, device=device)
        self.log_N = torch.zeros(LOG_ROUNDS, dtype=torch.int32, device=device)
        wanted = (self.x_BTD.double() @ self.first_DD.double()).relu() @ self.second_DD.double()
        self.wanted_BTD = (2.0 * wanted + 1.0).float()

    def prefix(self) -> None:
        """Chooses lengths."""
        choose_lengths[(1,)](
            self.schedule_NB, self.round, self.lengths_B, LOG_ROUNDS, self.batch, num_warps=1
        )

    def rest(self, rows: int) -> None:
        """Everything else, with temporaries of its own."""
        h = (self.x_BTD[:, :rows].reshape(-1, WIDTH) @ self.first_DD).relu()
        h = h @ self.second_DD
        options = {"launch_pdl": True} if self.dependent else {}
        finish_rows[(self.batch, rows)](
            h, self.out_BTD, self.lengths_B, self.round, self.log_N, rows, MAX_ROWS, WIDTH,
            self.dependent, **options,
        )  # fmt: skip

    def plan(self, schedule_NB: Sequence[Sequence[int]]) -> None:
        """Sets the lengths of the next rounds and poisons the outputs."""
        rows = torch.tensor(schedule_NB, dtype=torch.int32)
        self.schedule_NB[: len(rows)] = rows.to(self.schedule_NB.device)
        self.round.zero_()
        self.log_N.fill_(-1)
        self.poison()

    def poison(self) -> None:
        """Makes every output row NaN."""
        self.out_BTD.fill_(float("nan"))

    def check(self, lengths: Sequence[int]) -> None:
        """Rows below each length are exact; the others were not touched."""
        out = self.out_BTD.cpu()
        wanted = self.wanted_BTD.cpu()
        for request, length in enumerate(lengths):
            live = min(max(length, 0), MAX_ROWS)
            torch.testing.assert_close(
                out[request, :live], wanted[request, :live], rtol=0.0, atol=0.0
            )
            assert out[request, live:].isnan().all(), f"a row past {live} was written"
