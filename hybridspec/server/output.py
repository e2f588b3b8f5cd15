"""Output of one request: tokens in, text that may be sent out, and where to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.server.stop_strings import StopMatcher

if TYPE_CHECKING:
    from hybridspec.reference.tokenizer import Tokenizer
    from hybridspec.request import Round

FinishReason = Literal["stop", "length"]


class OutputAssembler:
    """Follows one request's tokens and decides where its output ends.

    Tokens after the end (a round may emit several at once) are neither counted nor sent. The token
    that ends the output counts: an `eos` token, or the one that completes a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self._stream = tokenizer.stream()
        self._matcher = StopMatcher(stops)
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def push(self, tokens: Iterable[int]) -> str:
        """Add emitted tokens and return the text that may be sent now (may be empty)."""
        piece = ""
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            if token in self._stop_token_ids:
                piece += self._end("stop")
                break
            piece += self._matcher.push(self._stream.push([token]))
            if self._matcher.matched:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self._max_tokens:
                piece += self._end("length")
        self.text += piece
        return piece

    def close(self, reason: FinishReason) -> str:
        """End the output from outside (context full); return the text that was held back."""
        if self.finish_reason is not None:
            return ""
        piece = self._end(reason)
        self.text += piece
        return piece

    def _end(self, reason: FinishReason) -> str:
        self.finish_reason = reason
        piece = self._matcher.push(self._stream.flush())
        if self._matcher.matched:
            self.finish_reason = "stop"
            return piece
        return piece + self._matcher.flush()


@dataclass
class RequestStats:
    """How one request was decoded; `to_json` is the `hybridspec` object of a response.

    Attributes:
        emitted: tokens delivered by rounds, which leaves out the first one (prefill emits it) and
            what a last round emitted beyond the end of the output.
        decode_us: observed time of the steps that this request took part in, microseconds. Steps
            are shared by all active requests.
        round_log: the rounds themselves, in order.
    """

    rounds: int = 0
    emitted: int = 0
    accepted: int = 0
    decode_us: float = 0.0
    prefill_us: float = 0.0
    queue_us: float = 0.0
    round_log: list[Round] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def add_round(self, round_: Round, *, delivered: int) -> None:
        """Count a round of which `delivered` tokens became output."""
        self.rounds += 1
        self.round_log.append(round_)
        self.emitted += delivered
        self.accepted += round_.accepted
        self.decode_us += round_.observed_us
        self.lengths[round_.verify_length] += 1
        if round_.fallback is not None:
            self.fallbacks[round_.fallback] += 1

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `lengths[L]` counts rounds that verified L rows, L in 0..16."""
        rows = sum(length * count for length, count in self.lengths.items())
        return {
            "rounds": self.rounds,
            "emitted": self.emitted,
            "accepted": self.accepted,
            "mean_verify_length": round(rows / self.rounds, 4) if self.rounds else None,
            "tokens_per_round": round(self.emitted / self.rounds, 4) if self.rounds else None,
            "decode_us": round(self.decode_us, 1),
            "prefill_us": round(self.prefill_us, 1),
            "queue_us": round(self.queue_us, 1),
            "lengths": [self.lengths[length] for length in range(BLOCK_SIZE + 1)],
            "fallbacks": dict(self.fallbacks),
        }

    def log_json(self) -> list[dict[str, Any]]:
        """Return one object a round; `emitted` counts also what lies beyond the output's end."""
        return [
            {
                "emitted": len(round_.emitted),
                "accepted": round_.accepted,
                "verify_length": round_.verify_length,
                "selected_length": round_.selected_length,
                "observed_us": round(round_.observed_us, 1),
                "predicted_us": round_.predicted_us and round(round_.predicted_us, 1),
                "fallback": round_.fallback,
            }
            for round_ in self.round_log
        ]
