"""Faults that engines of this kind have had, each planted in a real component of this one.

Every plant replaces one function by a version that goes wrong where the fault would. Plain decoding
has rows, pools and caches of its own, so a plant is in the engine under test alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

import hybridspec.reference.engine as engine_module
from hybridspec.acceptance import Verdict
from hybridspec.reference.engine import Engine, Request
from hybridspec.reference.gdn_layer import GdnFactors, GdnLayer
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache, StatePool
from hybridspec.request import Round

STATES = frozenset({"conv_window", "recurrent_state"})
KV = frozenset({"kv_keys", "kv_values"})
TEXT = frozenset({"token", "logits", "accepted"})


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        plant: puts it in place.
        kinds: violations that may show it first.
        operations: more than a minimal history needs.
        long: takes a text over a page, so finding and shrinking it takes a minute.
    """

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    kinds: frozenset[str]
    operations: int
    long: bool = False


def _commit_with(
    change: Callable[[RowLayout, Sequence[int]], tuple[RowLayout, Sequence[int]]],
) -> Callable[[pytest.MonkeyPatch], None]:
    real = engine_module.commit

    def wrong(
        pool: StatePool, factors: Sequence[GdnFactors], layout: RowLayout, committed: Sequence[int]
    ) -> None:
        real(pool, factors, *change(layout, committed))

    return lambda patch: patch.setattr(engine_module, "commit", wrong)


def one_row_too_few(layout: RowLayout, committed: Sequence[int]) -> tuple[RowLayout, Sequence[int]]:
    return layout, [max(n - 1, 0) for n in committed]


def one_row_too_many(
    layout: RowLayout, committed: Sequence[int]
) -> tuple[RowLayout, Sequence[int]]:
    pairs = zip(committed, layout.lengths, strict=True)
    return layout, [min(n + 1, length) for n, length in pairs]


def nothing_for_plain_rows(
    layout: RowLayout, committed: Sequence[int]
) -> tuple[RowLayout, Sequence[int]]:
    """A request without drafts in a batch that drafts keeps its old state."""
    pairs = zip(committed, layout.lengths, strict=True)
    return layout, [0 if length == 1 else n for n, length in pairs]


def neighbour_slots(layout: RowLayout, committed: Sequence[int]) -> tuple[RowLayout, Sequence[int]]:
    slots = [*layout.slots[1:], layout.slots[0]]
    return RowLayout(slots, layout.starts, layout.lengths, layout.device), committed


def stale_after_plain_rounds(patch: pytest.MonkeyPatch) -> None:
    """A round without any draft computes from the state and does not write it back."""
    real = GdnLayer.advance

    def wrong(
        self: GdnLayer, hidden_RH: torch.Tensor, layout: RowLayout, pool: StatePool
    ) -> torch.Tensor:
        prefill = layout.widest > 1 or layout.starts[0] == 0
        if prefill or len(pool.conv_SXWC) == 1:  # a single slot is plain decoding's own
            return real(self, hidden_RH, layout, pool)
        states = pool.recurrent_SXHVK.clone(), pool.conv_SXWC.clone()
        out = real(self, hidden_RH, layout, pool)
        pool.recurrent_SXHVK.copy_(states[0])
        pool.conv_SXWC.copy_(states[1])
        return out

    patch.setattr(GdnLayer, "advance", wrong)


def conv_window_of_the_whole_block(patch: pytest.MonkeyPatch) -> None:
    """Recurrent states go back to the accepted rows, conv windows do not."""
    real = engine_module.commit

    def wrong(
        pool: StatePool, factors: Sequence[GdnFactors], layout: RowLayout, committed: Sequence[int]
    ) -> None:
        real(pool, factors, layout, committed)
        taps = pool.conv_SXWC.shape[2]
        for i, (slot, length) in enumerate(zip(layout.slots, layout.lengths, strict=True)):
            for layer, part in enumerate(factors):
                pool.conv_SXWC[slot, layer] = part.conv_BTC[i, length : length + taps]

    patch.setattr(engine_module, "commit", wrong)


def shared_kv(patch: pytest.MonkeyPatch) -> None:
    """Every second request is given the KV memory of the one before, gone or not."""
    made: list[KVCache] = []

    def wrong(*shape: object) -> KVCache:
        made.append(made[-1] if len(made) % 2 else KVCache(*shape))  # type: ignore[arg-type]
        return made[-1]

    patch.setattr(engine_module, "KVCache", wrong)


def kv_lost_when_it_grows(patch: pytest.MonkeyPatch) -> None:
    """Half of the old page is not copied."""
    real = KVCache.reserve

    def wrong(self: KVCache, tokens: int) -> None:
        grows, used = tokens > self.capacity, self.capacity
        real(self, tokens)
        if grows:
            self.keys[:, :, used // 2 : used] = 0.0

    patch.setattr(KVCache, "reserve", wrong)


def cursor_behind_full_blocks(patch: pytest.MonkeyPatch) -> None:
    """Where every draft stands, the cursor stays one short."""
    real = Engine.step

    def wrong(self: Engine, requests: Sequence[Request], **options: bool) -> list[Round]:
        rounds = real(self, requests, **options)
        for request, outcome in zip(requests, rounds, strict=True):
            request.log.context_tokens -= outcome.accepted > 0 and (
                outcome.accepted == outcome.verify_length - 1
            )
        return rounds

    patch.setattr(Engine, "step", wrong)


def positions_not_advanced(patch: pytest.MonkeyPatch) -> None:
    """In a batch, rows are placed one position early."""

    def wrong(
        slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> RowLayout:
        late = [start - (len(starts) > 1) for start in starts]
        return RowLayout(slots, late, lengths, device)

    patch.setattr(engine_module, "RowLayout", wrong)


def slot_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """A new request starts from what the last one left in its slot."""
    patch.setattr(StatePool, "take", lambda self: self._free.pop())


def slot_never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "give_back", lambda _self, _slot: None)


def first_draft_always_stands(patch: pytest.MonkeyPatch) -> None:
    real = engine_module.accept_greedy

    def wrong(drafts: list[int], best_tokens: list[int]) -> Verdict:
        return real(drafts, [*drafts[:1], *best_tokens[1:]] if drafts else best_tokens)

    patch.setattr(engine_module, "accept_greedy", wrong)


def draft_lost_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """The last right draft is not counted: the text is right, only slower."""
    real = engine_module.accept_greedy

    def wrong(drafts: list[int], best_tokens: list[int]) -> Verdict:
        return real(drafts[:-1], best_tokens)

    patch.setattr(engine_module, "accept_greedy", wrong)


def rows_of_dropped_layout(patch: pytest.MonkeyPatch) -> None:
    """After a cut at the first router, layer 0's factors are not cut with the other rows."""
    real = GdnFactors.rows

    def wrong(self: GdnFactors, rows: int) -> GdnFactors:
        return real(self, rows)._replace(update_NTV=self.update_NTV[:, -rows:])

    patch.setattr(GdnFactors, "rows", wrong)


FAULTS = (
    Fault("commits one row too few", _commit_with(one_row_too_few), STATES, 3),
    Fault("commits one row too many", _commit_with(one_row_too_many), STATES, 3),
    Fault("stale state after a no-draft round", stale_after_plain_rounds, STATES, 3),
    Fault("no-draft row in a drafted batch", _commit_with(nothing_for_plain_rows), STATES, 4),
    Fault("conv window not rolled back", conv_window_of_the_whole_block, STATES, 3),
    Fault("KV slot reused", shared_kv, KV | TEXT, 5),
    Fault("KV lost when it grows", kv_lost_when_it_grows, KV | TEXT | STATES, 7, long=True),
    Fault("cursor not advanced", cursor_behind_full_blocks, frozenset({"cursor"}), 3),
    Fault("positions not advanced", positions_not_advanced, KV | TEXT | STATES, 4),
    Fault("wrong slot", _commit_with(neighbour_slots), STATES | TEXT, 4),
    Fault("slot not cleared", slot_not_cleared, STATES | TEXT, 5),
    Fault("slot never freed", slot_never_freed, frozenset({"slots"}), 3),
    Fault("wrong draft accepted", first_draft_always_stands, TEXT, 3),
    Fault("right draft not accepted", draft_lost_at_the_end, frozenset({"accepted"}), 3),
    Fault("factors of dropped rows", rows_of_dropped_layout, STATES | TEXT, 3),
)
