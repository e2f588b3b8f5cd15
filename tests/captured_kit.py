"""A tiny pair as the captured engine and as the eager one, and rounds whose drafts are scripted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.engine import Engine
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import GpuRound, RoundRules
from hybridspec.reference.gpu.weights import folder_tensors, load_drafter, load_target
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import PairShape, write_random_pair
from hybridspec.request import LengthRule

# What the kernels take: GDN heads of 64, experts in whole tiles; one attention layer in the middle.
SHAPE = PairShape(
    hidden_size=128,
    num_layers=3,
    full_attention_interval=2,
    gdn_key_dim=64,
    gdn_value_dim=64,
    expert_width=64,
    tied_embeddings=False,
    target_layer_ids=(0, 1),
)
MAX_CONTEXT = 96
# Kernels run where there is a GPU, else in the interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = [5, 17, 99, 200, 31, 7, 12, 301, 44]


@dataclass(frozen=True)
class Pair:
    """Folders of a written pair."""

    target: Path
    drafter: Path

    def captured(
        self, dtype: torch.dtype, *, batch: int = 1, device: str | torch.device = DEVICE
    ) -> GpuEngine:
        """The engine under test."""
        where = torch.device(device)
        return GpuEngine(
            load_target(
                load_target_config(self.target),
                folder_tensors(self.target, where),
                dtype=dtype,
                device=where,
            ),
            load_drafter(
                load_drafter_config(self.drafter),
                folder_tensors(self.drafter, where),
                dtype=dtype,
                device=where,
            ),
            batch=batch,
            max_context=MAX_CONTEXT,
        )

    def eager(self) -> Engine:
        """The oracle, fp32."""
        return load_pair(self.target, self.drafter, max_context=MAX_CONTEXT)


def make_pair(folder: Path) -> Pair:
    """Write the pair."""
    return Pair(*write_random_pair(folder, SHAPE, seed=3))


def plain_text(engine: Engine, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy continuation by plain decoding in the eager engine."""
    request = engine.add(prompt, length_rule=LengthRule("none"))
    while request.num_emitted < tokens:
        engine.step([request])
    text = request.tokens[len(prompt) :]
    engine.remove(request)
    return text


class ScriptedRound(GpuRound):
    """Fixed lengths, and drafts that are given: the drafter runs and its drafts are replaced."""

    def __init__(self, engine: GpuEngine) -> None:
        super().__init__(engine, RoundRules("fixed"))
        self.script_BD = torch.zeros_like(engine.target.drafts_BD)

    def _draft(self) -> None:
        super()._draft()
        self.target.drafts_BD.copy_(self.script_BD)

    def verify(self, drafts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """One round of these drafts cut to these lengths; returns what each request emits."""
        for row, tokens in zip(self.script_BD, drafts, strict=True):
            row.copy_(torch.tensor(tokens, dtype=torch.int32))
        self.buffers.fixed_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.run()
        report = self.buffers.report
        return [
            row[:count]
            for row, count in zip(
                report.emitted_BT.tolist(), report.commit_rows_B.tolist(), strict=True
            )
        ]


def drafts_with_error(text: Sequence[int], at: int, right: int, vocab: int) -> list[int]:
    """15 drafts from place `at` of a text on: the first `right` are its own, then a wrong one.

    Args:
        text: greedy continuation, at least `at + 15` tokens.
        at: place of the first draft.
    """
    drafts = list(text[at : at + 15])
    if right < 15:
        drafts[right] = (drafts[right] + 1) % vocab
    return drafts
