"""Target stage: cross entropy with a balance loss on random windows of the corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.demo.generation import mixed_precision
from hybridspec.demo.optim import Muon, StageClock
from hybridspec.demo.presets import PairPreset
from hybridspec.demo.stage import Progress, say
from hybridspec.demo.stepping import Stepper
from hybridspec.demo.streams import TokenStreams
from hybridspec.demo.target_module import Target


def token_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of labels [...] under hidden states [..., hidden]."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@torch.no_grad()
def held_out_loss(target: Target, windows: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns cross entropy in nats a token for every category."""
    device = target.embed_tokens.weight.device
    losses = {}
    for category, tokens in windows.items():
        ids = tokens.to(device)
        with mixed_precision(device):
            hidden = target(ids[:, :-1]).hidden
        labels = ids[:, 1:].flatten()
        loss = F.cross_entropy(target.logits(hidden).flatten(0, 1), labels)
        losses[category] = round(float(loss), 4)
    return losses


class TargetTrainer:
    """Trains a target; call `train` once."""

    def __init__(
        self, preset: PairPreset, streams: TokenStreams, *, seed: int, device: torch.device,
        compile_layers: bool,
    ) -> None:  # fmt: skip
        self.preset, self.streams, self.device = preset, streams, device
        self.generator = torch.Generator().manual_seed(seed)
        target = Target(preset)
        target.initialise(seed)
        self.target = target.to(device).train()
        self.optimiser = Muon(
            self.target.named_parameters(), muon_lr=preset.muon_lr, adam_lr=preset.adam_lr,
            weight_decay=preset.weight_decay,
        )  # fmt: skip
        self.batch = max(1, preset.batch_tokens // preset.sequence)
        self.cross_entropy = torch.zeros((), device=device)
        self.balance = torch.zeros((), device=device)
        self.layers: list[Any] | None = None
        self.token_loss: Any = token_loss
        if compile_layers:
            self.layers = [torch.compile(layer, dynamic=False) for layer in self.target.layers]
            self.token_loss = torch.compile(token_loss, dynamic=False)
        self.stepper = Stepper(
            "target", self.target, self.optimiser, eager=self._eager_loss,
            compiled=self._compiled_loss if compile_layers else None,
            inputs=(torch.zeros(self.batch, dtype=torch.int64),), device=device,
        )  # fmt: skip

    def _objective(self, starts: Tensor, layers: list[Any] | None, token_loss: Any) -> Tensor:
        ids = self.streams.cut(starts, self.preset.sequence + 1)
        with mixed_precision(self.device):
            out = self.target(ids[:, :-1], layers=layers)
            loss = token_loss(out.hidden, self.target.embed_tokens.weight, ids[:, 1:])
        self.cross_entropy = loss.detach()
        self.balance = out.balance.detach()
        return loss + self.preset.balance_weight * out.balance

    def _eager_loss(self, starts: Tensor) -> Tensor:
        return self._objective(starts, None, token_loss)

    def _compiled_loss(self, starts: Tensor) -> Tensor:
        return self._objective(starts, self.layers, self.token_loss)

    def train(self, steps: int, *, limit_s: float | None) -> dict[str, Any]:
        """Trains and returns the figures for the log."""
        clock = StageClock(steps, limit_s)
        progress = Progress("target", clock, unit="tokens")
        tokens_a_step = self.batch * self.preset.sequence
        with self.stepper.running():
            while clock.progress() < 1.0:
                starts = self.streams.starts_of_windows(self.batch, self.generator)
                self.stepper.step(clock.rate(self.preset.decay_fraction), starts)
                clock.done += 1
                if progress.due():
                    progress.line(
                        clock.done * tokens_a_step,
                        cross_entropy=float(self.cross_entropy),
                        balance=float(self.balance),
                    )
        last = float(self.cross_entropy)
        say(f"target trained: {clock.done} steps, cross entropy {last:.3f}")
        return {
            "steps": clock.done,
            "tokens": clock.done * tokens_a_step,
            "seconds": round(clock.elapsed_s(), 1),
            "cross_entropy": round(last, 4),
            "balance": round(float(self.balance), 4),
            "form": self.stepper.form,
        }
