"""The captured engine: a pair on a device, its caches, and prefill, for up to 8 requests.

A laboratory for kernels and policies, not a server: all requests of a batch start together, each in
its own slot. `rounds` makes rounds of any mode over the same buffers; `decode.Decoder` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridspec.errors import PromptError, UsageError
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.buffers import RoundBuffers, Sampling
from hybridspec.reference.gpu.capture import CapturedGraph
from hybridspec.reference.gpu.drafter import DrafterPass
from hybridspec.reference.gpu.history import TextHistory
from hybridspec.reference.gpu.round import GpuRound, RoundRules
from hybridspec.reference.gpu.target import MakeGdn, TargetPass
from hybridspec.reference.gpu.weights import DrafterWeights, TargetWeights


@dataclass(frozen=True)
class Snapshot:
    """State of all requests behind a prefill, to decode from it more than once."""

    tensors: tuple[torch.Tensor, ...]
    positions: int


class GpuEngine:
    """See the module's docstring.

    Args:
        target, drafter: weights of a pair; without a drafter only plain rounds.
        batch: requests, 1..8.
        max_context: tokens a request may hold.
        make_gdn: another form of the GDN layers, for comparison.
    """

    def __init__(
        self,
        target: TargetWeights,
        drafter: DrafterWeights | None,
        *,
        batch: int = 1,
        max_context: int = 4096,
        make_gdn: MakeGdn | None = None,
    ) -> None:
        limit = target.config.max_position_embeddings
        if not 2 <= max_context <= limit:
            raise UsageError(
                f"max_context {max_context} must lie in 2..{limit}, the target's limit"
            )
        features = drafter.config.target_layer_ids if drafter else ()
        self.target = TargetPass(
            target,
            batch=batch,
            max_context=max_context,
            feature_layers=features,
            make_gdn=make_gdn,
        )
        self.drafter = None if drafter is None else DrafterPass(drafter, self.target)
        self.buffers = RoundBuffers(self.target)
        self._sampling: Sampling | None = None
        self._prefill = GpuRound(self, RoundRules("prefill"))
        self._prefill_graph: CapturedGraph | None = None
        self._history: TextHistory | None = None

    @property
    def batch(self) -> int:
        """Requests."""
        return self.target.batch

    def round(self, rules: RoundRules) -> GpuRound:
        """A round over this engine's buffers."""
        return GpuRound(self, rules)

    def sampling_buffers(self) -> Sampling:
        """Buffers of sampled acceptance, made when first asked for (before any capture)."""
        if self._sampling is None:
            self._sampling = Sampling.allocate(
                self.batch, self.target.config.vocab_size, self.target.device
            )
        return self._sampling

    def history(self) -> TextHistory:
        """What trees remember of each request, made when first asked for (before any capture)."""
        if self._history is None:
            self._history = TextHistory(self.batch, self.target.device)
        return self._history

    # ------------------------------------------------------------------ requests

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all requests: states and windows zero, cursors at 0. Caches need no clearing."""
        target, buffers = self.target, self.buffers
        for tensor in (
            target.gdn.state_XSHVK,
            target.gdn.windows_XSCW,
            target.starts_B,
            target.anchors_B,
            buffers.limits_B,
            buffers.report.lengths_B,
        ):
            tensor.zero_()

    @torch.inference_mode()
    def capture_prefill(self) -> None:
        """Capture prefill's block as a graph; without it prefill runs its launches one by one."""
        from hybridspec.reference.gpu.capture import capture, warm_up

        warm_up(self._prefill, [BLOCK_ROWS])
        self._prefill_graph = capture(self._prefill.run, pool=torch.cuda.graph_pool_handle())
        self.reset()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Process prompts in blocks of 16 rows, exactly as verified rows are. Waits for the result.

        Args:
            prompts: token ids, one prompt a slot, each at least one token.

        Returns:
            the greedy first token of each, which is its anchor now.

        Raises:
            PromptError: empty, too long for the context, or with ids outside the vocabulary.
        """
        self._check(prompts)
        self.reset()
        target, report = self.target, self.buffers.report
        longest = max(len(prompt) for prompt in prompts)
        for start in range(0, longest, BLOCK_ROWS):
            blocks = [list(prompt[start : start + BLOCK_ROWS]) for prompt in prompts]
            lengths = [len(block) for block in blocks]
            # A prompt that is done keeps its anchor; a row of its own is computed and dropped.
            padded = torch.tensor(
                [block + [0] * (BLOCK_ROWS - len(block)) for block in blocks], dtype=torch.int32
            ).to(target.device)
            live = torch.tensor(lengths, dtype=torch.int32, device=target.device)
            target.anchors_B.copy_(torch.where(live > 0, padded[:, 0], target.anchors_B))
            target.drafts_BD.copy_(padded[:, 1:])
            report.lengths_B.copy_(live)
            if self._prefill_graph is None:
                self._prefill.run()
            else:
                self._prefill_graph.replay()
        self._begin_decoding()
        return target.anchors_B.tolist()

    def _begin_decoding(self) -> None:
        self.buffers.limits_B.fill_(BLOCK_ROWS)
        if self._history is not None:
            self._history.start(self.target.anchors_B, self.buffers.report)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(prompts) != self.batch:
            raise UsageError(f"{len(prompts)} prompts for {self.batch} slots; one each is needed")
        vocab, room = self.target.config.vocab_size, self.target.max_context
        for prompt in prompts:
            if not prompt:
                raise PromptError("the prompt has no tokens; at least one is needed: add some text")
            if len(prompt) >= room:
                raise PromptError(
                    f"the prompt has {len(prompt)} tokens; the context holds {room} with at least "
                    "one generated: shorten it or raise max_context"
                )
            bad = [token for token in prompt if not 0 <= token < vocab]
            if bad:
                raise PromptError(f"token id {bad[0]} lies outside the vocabulary 0..{vocab - 1}")

    # ------------------------------------------------------------------ state

    def _state(self, positions: int) -> list[torch.Tensor]:
        target = self.target
        parts = [
            target.gdn.state_XSHVK,
            target.gdn.windows_XSCW,
            target.starts_B,
            target.anchors_B,
            target.keys_XBCGD[:, :, :positions],
            target.values_XBCGD[:, :, :positions],
        ]
        if self.drafter is not None:
            parts += [
                self.drafter.keys_LBCGD[:, :, :positions],
                self.drafter.values_LBCGD[:, :, :positions],
            ]
        return parts

    @torch.inference_mode()
    def snapshot(self) -> Snapshot:
        """Copy of everything that rounds change. Waits for the longest context."""
        positions = int(self.target.starts_B.max())
        return Snapshot(tuple(part.clone() for part in self._state(positions)), positions)

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot behind a prefill; nothing on the host waits."""
        for part, saved in zip(self._state(snapshot.positions), snapshot.tensors, strict=True):
            part.copy_(saved)
        self._begin_decoding()
