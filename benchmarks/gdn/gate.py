"""Correctness of a method on a workload, in front of every timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gdn.method import Round
from gdn.reference import Expected, expected_round
from gdn.workload import GATES, Workload

STATE_GATE = {torch.float32: 3e-5, torch.bfloat16: 1e-2}
# Outputs are cast to bf16, which alone is worth 2e-3 to 4e-3.
OUTPUT_GATE = 1e-2
GATES_CHECKED = tuple(gates for gates in GATES if gates != "normal")


@dataclass(frozen=True)
class Errors:
    """Worst relative error (Frobenius norm over one layer and request) against float64.

    Attributes:
        problem: what is wrong, or empty.
    """

    output: float
    state: float
    problem: str


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Buffers that a kernel's wrapper allocates start as NaN, torch's habit in this mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def acceptances(workload: Workload) -> list[tuple[int, list[int]]]:
    """Slot set and accepted counts: all rows in the first set, a mixture with 0 in the last."""
    case = workload.case
    mixture = [case.tokens // 2, 0, case.tokens, min(1, case.tokens)]
    return [
        (0, [case.tokens] * case.batch),
        (case.sets - 1, [mixture[i % 4] for i in range(case.batch)]),
    ]


def expectations(workload: Workload) -> list[Expected]:
    """Float64 rounds of `acceptances`, shared by all methods."""
    return [expected_round(workload, index, counts) for index, counts in acceptances(workload)]


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Worst over layers and requests (the two leading axes); NaN or infinity gives infinity."""
    difference = (found.double() - true).flatten(2).norm(dim=-1)
    scale = true.flatten(2).norm(dim=-1).clamp_min(1e-30)
    worst = (difference / scale).max()
    return float(worst) if bool(worst.isfinite()) else float("inf")


def check(round_: Round, expected: Sequence[Expected]) -> Errors:
    """Run a round a slot set from the first state and compare; a wrong number is no exception."""
    workload = round_.workload
    worst_output = worst_state = 0.0
    problems: list[str] = []
    for want in expected:
        workload.restore()
        workload.set_accepted(want.accepted)
        round_.poison()
        with uninitialised_is_nan():
            round_.verify(want.index)
        layers = range(workload.case.shape.layers)
        outputs = torch.stack([round_.output_BTHV(want.index, layer) for layer in layers])
        round_.commit(want.index)
        round_.settle(want.index)
        slots = workload.slots_NB[want.index].long()
        state = workload.state_XSHVK[:, slots]
        worst_output = max(worst_output, relative_error(outputs, want.outputs_XBTHV))
        worst_state = max(worst_state, relative_error(state, want.state_XBHVK))
        before = workload.first_state_XSHVK
        rejected = [i for i, count in enumerate(want.accepted) if count == 0]
        if not torch.equal(state[:, rejected], before[:, slots[rejected]]):
            problems.append("nothing accepted, yet the state moved")
        others = torch.ones(workload.case.slots, dtype=torch.bool, device=slots.device)
        others[slots] = False
        if not torch.equal(workload.state_XSHVK[:, others], before[:, others]):
            problems.append("a slot of another set changed")
    gate = STATE_GATE[workload.case.state_dtype]
    if not worst_state <= gate:
        problems.append(f"state error {worst_state:.1e} over {gate:.0e}")
    if not worst_output <= OUTPUT_GATE:
        problems.append(f"output error {worst_output:.1e} over {OUTPUT_GATE:.0e}")
    workload.set_accepted([workload.case.tokens] * workload.case.batch)
    return Errors(worst_output, worst_state, "; ".join(problems))
