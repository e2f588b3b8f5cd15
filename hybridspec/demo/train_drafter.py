"""Drafter stage: on-policy text of the target, then position-weighted block prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.demo.drafter_module import (
    Drafter,
    block_embeddings,
    block_mask,
    block_positions,
)
from hybridspec.demo.generation import Continuation, mixed_precision
from hybridspec.demo.optim import Muon, StageClock
from hybridspec.demo.presets import PairPreset
from hybridspec.demo.stage import Progress, say
from hybridspec.demo.stepping import Stepper
from hybridspec.demo.streams import TokenStreams
from hybridspec.demo.target_module import Target

_FEATURES_AT_ONCE = 65_536
_JOLT_EVERY = 48
_SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Pool:
    """Sequences that the drafter learns from, with the target's view of them.

    Attributes:
        tokens: int32 [sequences, length].
        forced: bool, like tokens; drawn at random where the target would have said otherwise.
        features: [sequences, length, taps * hidden], the layers that the drafter sees.
        hidden: [sequences, length, hidden], final states, from which the target's logits follow.
        first_anchor: int64 [sequences], earliest position at which a block may start.
        generated: number of on-policy sequences; the others are corpus text.
    """

    tokens: Tensor
    forced: Tensor
    features: Tensor
    hidden: Tensor
    first_anchor: Tensor
    generated: int


def _noise_scales(preset: PairPreset, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields noise scales of rows for one token after another.

    Most rows are greedy with a rare draw, which leads them out of repetition into new contexts
    while nearly every label stays the target's first choice. The other rows are sampled.
    """
    device = generator.device
    sampled = torch.rand(batch, generator=generator, device=device) < preset.sampled_fraction
    steady = sampled.float() * _SAMPLE_TEMPERATURE
    while True:
        jolt = torch.rand(batch, generator=generator, device=device) < 1.0 / _JOLT_EVERY
        yield torch.where(jolt & ~sampled, 1.0, steady)


@torch.no_grad()
def build_pool(
    target: Target, streams: TokenStreams, *, sequences: int, seed: int, limit_s: float | None
) -> tuple[Pool, dict[str, Any]]:
    """Continues training text with the target and records what the target sees."""
    preset, device = target.preset, target.embed_tokens.weight.device
    length = preset.prompt_tokens + preset.generate_tokens
    batch = min(preset.generate_batch, sequences)
    windows = torch.Generator().manual_seed(seed + 1)
    noise = torch.Generator(device).manual_seed(seed + 2)
    clock = StageClock(max(1, -(-sequences // batch)), limit_s)
    progress = Progress("generation", clock, unit="tokens")
    continuation = Continuation(target, batch=batch, capacity=length)
    tokens, forced = [], []
    while clock.progress() < 1.0:
        prompts = streams.sample(batch, windows, length=preset.prompt_tokens)
        scales = _noise_scales(preset, batch, noise)
        out, drawn = continuation.run(prompts, scales, generator=noise)
        # A sampled row has no first choices to be measured against: all its tokens are labels.
        drawn &= drawn.float().mean(1, keepdim=True) < 0.1
        tokens.append(out.int())
        forced.append(drawn)
        clock.done += 1
        if progress.due():
            progress.line(clock.done * batch * preset.generate_tokens)
    generated = batch * clock.done
    extra = int(generated * preset.corpus_fraction)
    if extra:
        tokens.append(streams.sample(extra, windows, length=length).int())
        forced.append(torch.zeros(extra, length, dtype=torch.bool, device=device))
    captured = continuation.graph is not None
    del continuation
    joined = torch.cat(tokens)
    features, hidden = [], []
    for rows in joined.split(max(1, _FEATURES_AT_ONCE // length)):
        with mixed_precision(device):
            seen = target(rows.long(), features_of=preset.target_layer_ids)
        assert seen.features is not None
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        features.append(seen.features.to(dtype))
        hidden.append(seen.hidden.to(dtype))
    first = torch.full((len(joined),), preset.prompt_tokens - 1, dtype=torch.int64, device=device)
    first[generated:] = min(8, preset.prompt_tokens - 1)
    pool = Pool(
        tokens=joined, forced=torch.cat(forced), features=torch.cat(features),
        hidden=torch.cat(hidden), first_anchor=first, generated=generated,
    )  # fmt: skip
    say(f"pool: {generated} generated and {extra} corpus sequences of {length} tokens")
    return pool, {
        "sequences": generated,
        "tokens": generated * preset.generate_tokens,
        "seconds": round(clock.elapsed_s(), 1),
        "captured": captured,
    }


class DrafterTrainer:
    """Trains a drafter; call `train` once."""

    def __init__(
        self, target: Target, pool: Pool, *, mask_token: int, seed: int, compile_loss: bool
    ) -> None:
        self.preset = preset = target.preset
        self.pool, self.mask_token = pool, mask_token
        self.embedding = target.embed_tokens.weight.detach()
        self.device = self.embedding.device
        self.generator = torch.Generator().manual_seed(seed + 3)
        drafter = Drafter(preset)
        drafter.initialise(seed + 4)
        self.drafter = drafter.to(self.device).train()
        self.optimiser = Muon(
            self.drafter.named_parameters(), muon_lr=preset.draft_muon_lr,
            adam_lr=preset.draft_adam_lr, weight_decay=preset.weight_decay,
        )  # fmt: skip
        steps = torch.arange(NUM_DRAFTS, device=self.device)
        self.position_weight = torch.exp(-steps / preset.position_gamma)
        self.accepted = torch.zeros((), device=self.device)
        compiled = torch.compile(self._losses, dynamic=False) if compile_loss else self._losses
        self.losses: Any = compiled
        inputs = (
            torch.zeros(preset.draft_batch, dtype=torch.int64),
            torch.zeros(preset.draft_batch, preset.anchors),
        )
        self.stepper = Stepper(
            "drafter", self.drafter, self.optimiser, eager=self._eager_loss,
            compiled=self._compiled_loss if compile_loss else None, inputs=inputs,
            device=self.device,
        )  # fmt: skip

    def _losses(
        self, rows: Tensor, positions: Tensor, features: Tensor, mask: Tensor, labels: Tensor,
        alive: Tensor, teacher: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss and the accepted drafts of every block.

        Labels, alive [batch, blocks, 15]; teacher: final target states that predict the labels,
        [batch, blocks, 15, hidden].
        """
        hidden = self.drafter(rows, positions, features, mask)
        hidden = hidden.unflatten(1, (-1, BLOCK_SIZE))[:, :, 1:]
        embedding = self.embedding.to(hidden.dtype)
        logits = F.linear(hidden, embedding).float()
        # Logits are linear in the embedding, so labels and teacher are one vector each:
        # -sum_v p_v log q_v = logsumexp(logits) - hidden . (sum_v p_v embedding_v).
        with torch.no_grad():
            wanted = embedding[labels]
            distill = self.preset.distill_weight
            if distill > 0:
                p = F.linear(teacher, embedding).float().softmax(-1).to(embedding.dtype)
                wanted = torch.lerp(wanted, p @ embedding, distill)
        loss = logits.logsumexp(-1) - (hidden.float() * wanted.float()).sum(-1)
        with torch.no_grad():
            right = (logits.argmax(-1) == labels) & (alive > 0)
            prefix = right.float().cumprod(-1)
            # A draft counts only if those before it are accepted: part of the weight follows that.
            reached = F.pad(prefix[..., :-1], (1, 0), value=1.0)
            share = self.preset.at_risk_weight
            weight = self.position_weight * alive * (1.0 - share + share * reached)
        return (loss * weight).sum(-1).mean() / self.position_weight.sum(), prefix.sum(-1)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Returns sequences int64 [batch] and relative anchor positions fp32 [batch, anchors]."""
        preset = self.preset
        pick = torch.randint(len(self.pool.tokens), (preset.draft_batch,), generator=self.generator)
        where = torch.rand(preset.draft_batch, preset.anchors, generator=self.generator)
        return pick, where

    def _batch(self, pick: Tensor, where: Tensor) -> tuple[Tensor, ...]:
        """Returns the arguments of `_losses`."""
        preset, pool = self.preset, self.pool
        length = pool.tokens.shape[1]
        first = pool.first_anchor[pick].unsqueeze(1)
        anchors = first + (where * (length - BLOCK_SIZE + 1 - first)).long()
        anchors = anchors.clamp(max=length - BLOCK_SIZE)
        tokens = pool.tokens[pick].long()
        positions = block_positions(anchors)
        shape = (preset.draft_batch, preset.anchors, BLOCK_SIZE)
        labels = tokens.gather(1, positions).view(shape)[..., 1:]
        alive = (~pool.forced[pick]).float().gather(1, positions).view(shape)[..., 1:].cumprod(-1)
        before = positions.view(shape)[..., :-1].flatten(1)
        width = pool.hidden.shape[-1]
        teacher = pool.hidden[pick].gather(1, before.unsqueeze(-1).expand(-1, -1, width))
        rows = block_embeddings(self.embedding, tokens.gather(1, anchors), self.mask_token)
        return (
            rows.to(pool.features.dtype),
            positions,
            pool.features[pick],
            block_mask(anchors, length),
            labels,
            alive,
            teacher.view(*shape[:2], NUM_DRAFTS, width),
        )

    def _eager_loss(self, pick: Tensor, where: Tensor) -> Tensor:
        with mixed_precision(self.device):
            loss, accepted = self._losses(*self._batch(pick, where))
        self.accepted = accepted.mean()
        return loss

    def _compiled_loss(self, pick: Tensor, where: Tensor) -> Tensor:
        with mixed_precision(self.device):
            loss, accepted = self.losses(*self._batch(pick, where))
        self.accepted = accepted.mean()
        return loss

    def train(self, steps: int, *, limit_s: float | None) -> dict[str, Any]:
        """Trains and returns the figures for the log."""
        clock = StageClock(steps, limit_s)
        progress = Progress("drafter", clock, unit="blocks")
        blocks_a_step = self.preset.draft_batch * self.preset.anchors
        with self.stepper.running():
            while clock.progress() < 1.0:
                self.stepper.step(clock.rate(self.preset.decay_fraction), *self._draw())
                clock.done += 1
                if progress.due():
                    progress.line(
                        clock.done * blocks_a_step,
                        loss=float(self.stepper.loss),
                        tokens_a_round=float(self.accepted) + 1.0,
                    )
        say(f"drafter trained: {clock.done} steps, {float(self.accepted) + 1.0:.2f} tokens a round")
        return {
            "steps": clock.done,
            "blocks": clock.done * blocks_a_step,
            "seconds": round(clock.elapsed_s(), 1),
            "loss": round(float(self.stepper.loss), 4),
            "train_tokens_a_round": round(float(self.accepted) + 1.0, 3),
            "form": self.stepper.form,
        }
