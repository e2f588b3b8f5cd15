"""The round's forward pass in fp32 from the same state and tokens: what bf16 rounds are off from.

Two geometries of a round are two bf16 roundings of one function: cuBLAS sums 4 rows in another
order than 16, and GDN has another form. How far they are from each other says little (about the
root of two times what each is off, whatever the model's scale); how far each is from fp32 says
whether one of them is worse. Random weights make logits nearly flat, so the largest one is compared
only where fp32 leaves no doubt about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.heads import place_heads
from hybridspec.reference.gpu.target import TargetPass
from hybridspec.reference.gpu.weights import AttentionWeights, MoeWeights, TargetWeights

# Errors of two roundings of one function are alike within this factor: norms over a whole
# vocabulary vary by far less, and a wrong row, length or state is off by far more.
ALIKE = 1.5


class _Widened:
    """Experts in bf16 of which those that are picked come out in fp32: all of them do not fit."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self.shape = values, values.shape

    def __getitem__(self, experts: torch.Tensor) -> torch.Tensor:
        return self._values[experts].float()


def widened(weights: TargetWeights) -> TargetWeights:
    """The same weights in fp32; routed experts are widened when they are read."""

    def all_of(part: Any, kept: Sequence[str] = ()) -> Any:
        wide = {
            name: _Widened(value) if name in kept else value.float()
            for name, value in vars(part).items()
        }
        return type(part)(**wide)

    experts = ("gate_up_EFH", "down_EHI")
    blocks: list[MoeWeights] = [all_of(block, experts) for block in weights.blocks]
    return dataclasses.replace(
        weights,
        dtype=torch.float32,
        embedding_VH=weights.embedding_VH.float(),
        lm_head_VH=weights.lm_head_VH.float(),
        mixers=[all_of(mixer) for mixer in weights.mixers],
        blocks=blocks,
    )


class WideTarget(TargetPass):
    """A target in fp32 whose attention is plain PyTorch, of one request."""

    def _attend(
        self,
        weights: AttentionWeights,
        index: int,
        rows: int,
        hidden: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> torch.Tensor:
        del lengths_B
        config, count = self.config, hidden.shape[0]
        front, q = self._attention_RF[:count], self._q_RHD[:count]
        torch.mm(hidden, weights.front_FH.t(), out=front)
        place_heads(
            front,
            weights.norm_2D,
            self._rotary,
            self.starts_B,
            config.rms_norm_eps,
            rows=rows,
            q_RHD=q,
            keys_BCGD=self.keys_XBCGD[index],
            values_BCGD=self.values_XBCGD[index],
        )
        start = int(self.starts_B[0])
        group = config.num_heads // config.num_kv_heads
        keys, values = (
            cache[index, 0, : start + rows].repeat_interleave(group, dim=1)
            for cache in (self.keys_XBCGD, self.values_XBCGD)
        )
        # The scale is in the queries.
        score = torch.einsum("rhd,chd->hrc", q, keys)
        place = torch.arange(start + rows, device=q.device)
        unseen = place[None, :] > start + torch.arange(rows, device=q.device)[:, None]
        shares = score.masked_fill(unseen, float("-inf")).softmax(-1)
        out = torch.einsum("hrc,chd->rhd", shares, values).flatten(1)
        return out * torch.sigmoid(front[:, front.shape[1] - out.shape[1] :])


def reference_logits(
    engine: GpuEngine, context: int, forced_XRK: torch.Tensor | None
) -> torch.Tensor:
    """Logits fp32 [16, V] of the engine's drafts from its state, which stays as it is.

    Args:
        engine: of one request, placed; its drafts are those to verify.
        context: tokens before the anchor.
        forced_XRK: routes of all layers, or None for the routers' own.
    """
    ours = engine.target
    wide = WideTarget(widened(ours.weights), batch=1, max_context=context + 2 * BLOCK_ROWS)
    wide.forced_XRK = forced_XRK
    wide.gdn.state_XSHVK.copy_(ours.gdn.state_XSHVK)
    wide.gdn.windows_XSCW.copy_(ours.gdn.windows_XSCW)
    wide.keys_XBCGD[:, :, :context].copy_(ours.keys_XBCGD[:, :, :context])
    wide.values_XBCGD[:, :, :context].copy_(ours.values_XBCGD[:, :, :context])
    for name in ("starts_B", "anchors_B", "drafts_BD"):
        getattr(wide, name).copy_(getattr(ours, name))
    lengths_B = torch.full_like(wide.starts_B, BLOCK_ROWS)
    wide.embed(BLOCK_ROWS)
    wide.mix(0, BLOCK_ROWS, lengths_B)
    wide.router(0, BLOCK_ROWS, lengths_B)
    wide.rest_of_layers(BLOCK_ROWS, lengths_B)
    return wide.head(BLOCK_ROWS).clone()


@dataclass(frozen=True)
class Closeness:
    """Two bf16 results of the same rows against fp32.

    Attributes:
        error, masked_error: relative, of the result and of the masked graph's.
        decisive: rows whose largest logit in fp32 is farther ahead than either result is off.
        agreeing: those of them where the result has the same largest logit.
    """

    error: float
    masked_error: float
    decisive: int
    agreeing: int

    @property
    def alike(self) -> bool:
        """Whether neither is clearly worse, and no clear choice differs."""
        low, high = self.masked_error / ALIKE, self.masked_error * ALIKE
        return low <= self.error <= high and self.agreeing == self.decisive


def compare(found: torch.Tensor, masked: torch.Tensor, exact: torch.Tensor) -> Closeness:
    """Compare logits [rows, V] of the same rows."""
    found, masked = found.float(), masked.float()
    best = exact.topk(2, dim=-1).values
    off = torch.maximum((found - exact).abs().amax(-1), (masked - exact).abs().amax(-1))
    decisive = best[:, 0] - best[:, 1] > 2.0 * off
    same = found.argmax(-1) == exact.argmax(-1)
    norm = exact.norm()
    return Closeness(
        float((found - exact).norm() / norm),
        float((masked - exact).norm() / norm),
        int(decisive.sum()),
        int((decisive & same).sum()),
    )
