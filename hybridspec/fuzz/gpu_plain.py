"""Plain decoding in a captured engine of one slot: rounds of one row, no drafts, no commits.

It shares the weights with the engine under test and nothing else. Texts take turns in the slot;
what they leave there is kept aside and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hybridspec.fuzz.plain import CONV, KEYS, RECURRENT, VALUES, DecodedText
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import GpuRound, RoundRules
from hybridspec.reference.gpu.weights import TargetWeights

# No divisor of the engine's blocks of 16 rows, so that prompts are cut elsewhere.
PREFILL_TOKENS = 13


def launcher(round: GpuRound) -> Callable[[], None]:
    """What runs a round: a captured graph on a GPU, its launches one by one elsewhere."""
    if round.target.device.type != "cuda":
        return torch.inference_mode()(round.run)
    from hybridspec.reference.gpu.control_masked import MaskedControl

    control = MaskedControl()
    with torch.inference_mode():
        control.capture(round)
    return control.replay


class PlainSlot:
    """The engine of one slot, and whose text is in it.

    Args:
        target: weights. max_context: longest text, tokens.
    """

    def __init__(self, target: TargetWeights, *, max_context: int) -> None:
        self.engine = GpuEngine(target, None, batch=1, max_context=max_context)
        self._step = launcher(self.engine.round(RoundRules("plain")))
        self._block = launcher(self.engine.round(RoundRules("prefill")))
        self.engine.reset()
        self.engine.buffers.limits_B.fill_(BLOCK_ROWS)
        self.owner: GpuPlainText | None = None

    @torch.inference_mode()
    def process(self, tokens: Sequence[int]) -> torch.Tensor:
        """Process 1..16 tokens at the cursor; logits [vocabulary] behind the last."""
        target = self.engine.target
        target.anchors_B.fill_(tokens[0])
        if len(tokens) == 1:
            self._step()
            return target.logits_RV[0].clone()
        rest = torch.zeros(BLOCK_ROWS - 1, dtype=torch.int32)
        rest[: len(tokens) - 1] = torch.tensor(tokens[1:], dtype=torch.int32)
        target.drafts_BD[0].copy_(rest)
        self.engine.buffers.report.lengths_B.fill_(len(tokens))
        self._block()
        return target.logits_RV[len(tokens) - 1].clone()


class GpuPlainText(DecodedText):
    """One text of a `PlainSlot`.

    Args:
        prompt: token ids, at least one.
    """

    def __init__(self, slot: PlainSlot, prompt: Sequence[int]) -> None:
        target = slot.engine.target
        super().__init__(prompt, max_context=target.max_context)
        self._slot = slot
        self._keys = torch.zeros_like(target.keys_XBCGD[:, 0])
        self._values = torch.zeros_like(target.values_XBCGD[:, 0])
        self._states = torch.zeros_like(target.gdn.state_XSHVK[:, 0])
        self._windows = torch.zeros_like(target.gdn.windows_XSCW[:, 0])
        self._prefill(PREFILL_TOKENS)

    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is kept aside, with its place in the slot."""
        target = self._slot.engine.target
        return [
            (self._keys, target.keys_XBCGD[:, 0]),
            (self._values, target.values_XBCGD[:, 0]),
            (self._states, target.gdn.state_XSHVK[:, 0]),
            (self._windows, target.gdn.windows_XSCW[:, 0]),
        ]

    @torch.inference_mode()
    def _enter(self) -> None:
        if self._slot.owner is self:
            return
        if self._slot.owner is not None:
            for aside, place in self._slot.owner._parts():
                aside.copy_(place)
        for aside, place in self._parts():
            place.copy_(aside)
        self._slot.engine.target.starts_B.fill_(self._context)
        self._slot.owner = self

    def _process(self, rows: int) -> None:
        self._enter()
        gdn = self._slot.engine.target.gdn
        stop = self._context + rows
        logits_V = self._slot.process(self._text[self._context : stop])
        self._keep(stop, logits_V, gdn.state_XSHVK[:, 0].clone(), gdn.windows_XSCW[:, 0].clone())

    @torch.inference_mode()
    def _put_back(self, recurrent: torch.Tensor, conv: torch.Tensor, context: int) -> None:
        self._enter()
        target = self._slot.engine.target
        target.gdn.state_XSHVK[:, 0].copy_(recurrent)
        target.gdn.windows_XSCW[:, 0].copy_(conv)
        target.starts_B.fill_(context)

    def memory(self, context_tokens: int) -> Mapping[str, torch.Tensor]:
        """KV, conv windows and recurrent states behind the first `context_tokens` tokens."""
        self._enter()
        target = self._slot.engine.target
        _, recurrent, conv = self._behind[context_tokens]
        return {
            KEYS: target.keys_XBCGD[:, 0, :context_tokens],
            VALUES: target.values_XBCGD[:, 0, :context_tokens],
            CONV: conv,
            RECURRENT: recurrent,
        }
