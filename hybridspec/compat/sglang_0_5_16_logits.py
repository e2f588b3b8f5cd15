"""The target's choices in greedy acceptance of SGLang 0.5.16, from a kernel of our own.

DFLASH takes `torch.argmax(next_token_logits, dim=-1)` inside `forward_batch_generation`. For the
time of a round these logits are a tensor that answers this one call from `argmax_of_blocks`, after
whatever the engine did to them in place, and every other one as a plain tensor does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridspec.kernels.accept.argmax import ArgmaxScratch, argmax_of_blocks
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, RoundState


class VerifiedLogits(torch.Tensor):
    """Logits whose argmax over the vocabulary comes from `choose`; views are plain tensors."""

    choose: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercepts `argmax` over the last dimension alone."""
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if (
                func is torch.argmax
                and len(args) == 1
                and kwargs == {"dim": -1}
                and isinstance(args[0], cls)
            ):
                return args[0].choose(args[0].as_subclass(torch.Tensor))
            return func(*args, **kwargs)


class GreedyChoice:
    """Offers choices to acceptance and takes the offer back behind it.

    Args:
        state: whose lengths say which rows were verified.
    """

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._scratch = ArgmaxScratch.create(state.max_requests, state.device)

    def compile(self, vocab: int) -> None:
        """Launch once for logits of this width, which are fp32 in SGLang."""
        logits = torch.zeros(BLOCK_SIZE, vocab, dtype=torch.float32, device=self._state.device)
        candidates = torch.zeros(1, BLOCK_SIZE, dtype=torch.int64, device=self._state.device)
        argmax_of_blocks(logits, self._state.lengths_B[:1], self._scratch, candidates_BT=candidates)

    def offer(self, output: Any, candidates_BT: torch.Tensor) -> bool:
        """Behind the target's pass of a greedy batch.

        Args:
            output: with `next_token_logits` [B * 16, V].
            candidates_BT: int64 [B, 16], anchors and drafts; the choice takes those at and past
                the length away, so that they cannot be accepted.

        Returns:
            False: the logits are of another kind and stay plain, and nothing will be taken away.
        """
        logits, requests = output.next_token_logits, candidates_BT.shape[0]
        if (
            logits is None
            or logits.ndim != 2
            or logits.dtype != torch.float32
            or logits.shape[0] != requests * BLOCK_SIZE
            or logits.stride(1) != 1
        ):
            return False
        lengths_B = self._state.lengths_B[:requests]
        offered = logits.as_subclass(VerifiedLogits)
        offered.choose = lambda plain: argmax_of_blocks(
            plain, lengths_B, self._scratch, candidates_BT=candidates_BT
        )
        output.next_token_logits = offered
        return True

    def taken(self, output: Any) -> None:
        """Behind the round: the logits are plain again."""
        if output is None:
            return
        logits = output.next_token_logits
        if isinstance(logits, VerifiedLogits):
            output.next_token_logits = logits.as_subclass(torch.Tensor)
