"""Rounds recorded at every token of a text: what any rule of lengths would have met there.

Each round drafts and verifies 16 rows, and commits one: the next one starts a token later. How many
drafts would have been accepted follows from the target's choices in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import torch
from decoding.costs import graph_of
from decoding.pair import Prompt

from hybridspec.calibrate.rounds import RoundRow, TraceIdentity, rows_to_table
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine, Snapshot
from hybridspec.reference.gpu.round import GpuRound, RoundRules


class EveryAnchor(GpuRound):
    """A round of 16 rows that commits its first row only, and keeps the routes of all layers."""

    def __init__(self, engine: GpuEngine) -> None:
        super().__init__(engine, RoundRules("fixed"))
        target = engine.target
        self.routes_XRK = torch.zeros(
            target.config.num_layers, *target.ids_RK.shape, dtype=torch.int32, device=target.device
        )

    def run(self) -> None:
        """See the class."""
        self.target.kept_XRK = self.routes_XRK
        try:
            super().run()
        finally:
            self.target.kept_XRK = None

    def _accept(self, rows: int) -> None:
        self.lengths_B.fill_(1)
        super()._accept(rows)


def identity_of(engine: GpuEngine, tokens: int) -> TraceIdentity:
    """Of the recorded table; it never leaves the run, so digests say nothing."""
    config = engine.target.config
    return TraceIdentity(
        target_digest="this run",
        drafter_digest="this run",
        layers=config.num_layers,
        topk=config.experts_per_token,
        experts=config.num_experts,
        vocab_size=config.vocab_size,
        temperature=0.0,
        max_new_tokens=tokens,
        prompts_digest="this run",
    )


class AnchorRecorder:
    """Records texts of one engine of a single request.

    Args:
        engine, decoder: as of the arms.
    """

    def __init__(self, engine: GpuEngine, decoder: Decoder) -> None:
        self.engine, self.decoder = engine, decoder
        self._round = EveryAnchor(engine)
        self._replay: Callable[[], None] = graph_of(engine, self._round.run)
        self._rows: list[RoundRow] = []

    def record(self, index: int, prompt: Prompt, first: int, saved: Snapshot, tokens: int) -> None:
        """One text, as long as the arms decode it."""
        engine, buffers = self.engine, self.engine.buffers
        engine.restore(saved)
        buffers.fixed_B.fill_(BLOCK_ROWS)
        taken: list[dict[str, Any]] = []

        def launch() -> None:
            taken.append({"context_tokens": int(engine.target.starts_B[0])})
            taken[-1]["anchor"] = int(engine.target.anchors_B[0])
            self._replay()
            taken[-1] |= self._signals()

        text = self.decoder.decode(launch, [first], max_new_tokens=tokens)[0]
        for place, (found, _) in enumerate(zip(taken, text.lines, strict=False)):
            self._rows.append(
                RoundRow(
                    prompt_id=str(index),
                    category=prompt.category,
                    split="test",
                    round=place,
                    generated_tokens=place + 1,
                    **found,
                )
            )

    def _signals(self) -> dict[str, Any]:
        """What the round that ran last leaves behind. Waits."""
        buffers, target = self.engine.buffers, self.engine.target
        signals = buffers.signals
        drafts = target.drafts_BD[0].tolist()
        chosen = buffers.tokens_BT(BLOCK_ROWS)[0, :BLOCK_ROWS].tolist()
        wrong = (i for i, token in enumerate(drafts) if token != chosen[i])
        # A byte names an expert up to 256 of them.
        wide = target.config.num_experts > 256
        routes = self._round.routes_XRK.to(torch.int16 if wide else torch.uint8)
        return {
            "accepted": next(wrong, len(drafts)),
            "draft_tokens": drafts,
            "target_tokens": chosen,
            "p1": signals.p1_R.tolist(),
            "p2": signals.p2_R.tolist(),
            "entropy_nats": signals.entropy_R.tolist(),
            "target_p1": self.engine.buffers.report.p1_R.tolist(),
            "routes": routes.cpu().numpy().tobytes(),
        }

    def table(self, tokens: int) -> pa.Table:
        """All texts as a trace table, a row an anchor."""
        return rows_to_table(self._rows, identity_of(self.engine, tokens))


def record_texts(
    engine: GpuEngine,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    tokens: int,
    allows: Callable[[], bool] = lambda: True,
) -> pa.Table:
    """Texts of prompts, prompt ids their places in the list, as far as there is time."""
    recorder = AnchorRecorder(engine, decoder)
    for index, prompt in enumerate(prompts):
        if index and not allows():
            break
        first = engine.prefill([prompt.ids])[0]
        recorder.record(index, prompt, first, engine.snapshot(), tokens)
    return recorder.table(tokens)
