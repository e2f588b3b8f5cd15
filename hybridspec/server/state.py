"""What the handlers of one server share, and how a request becomes a job."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.request import LengthRule, SamplingParams
from hybridspec.server.api_error import ApiError, bad_request
from hybridspec.server.job import Job
from hybridspec.server.output import OutputAssembler
from hybridspec.server.pending import Inbox
from hybridspec.server.protocol import CommonRequest, HybridSpecOptions
from hybridspec.server.scheduler import Scheduler
from hybridspec.telemetry import Telemetry

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine
    from hybridspec.reference.tokenizer import Tokenizer


def natural_rule(engine: Engine) -> LengthRule:
    """Return the best rule that an engine can follow: its policy, else 16 rows, else no drafts."""
    if engine.drafter_config is None:
        return LengthRule(kind="none")
    return LengthRule(kind="fixed" if engine.policy is None else "policy")


@dataclass(frozen=True)
class ServerState:
    """One server: engine, tokenizer, scheduler and what they are called.

    Attributes:
        default_rule: how requests without a choice of their own choose their lengths.
        chat_tokens: most tokens of a chat answer whose request sets no limit.
        drain_s: how long a shutdown waits for accepted requests, seconds.
        created: start of the server, seconds since the epoch.
    """

    engine: Engine
    tokenizer: Tokenizer
    scheduler: Scheduler
    telemetry: Telemetry
    model_name: str
    default_rule: LengthRule
    chat_tokens: int
    drain_s: float
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def policy_active(self) -> bool:
        """Whether a bundle's policy chooses lengths by default, and still does."""
        policy = self.engine.policy
        chosen = self.default_rule.kind == "policy"
        return chosen and policy is not None and policy.static_reason is None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end every answer: the model's and the tokenizer's."""
        return frozenset(self.engine.target_config.eos_token_ids) | frozenset(
            self.tokenizer.eos_token_ids
        )

    def check_model(self, model: str) -> None:
        """Refuse a model that this server does not serve."""
        if model != self.model_name:
            raise ApiError(
                f"model {model!r} is not served here; the only model is {self.model_name!r}: "
                "send that name",
                status=404,
                kind="invalid_request_error",
                param="model",
                code="model_not_found",
            )

    def check_ids(self, ids: Collection[int]) -> None:
        """Refuse token ids that the model has no row for."""
        vocab_size = self.engine.target_config.vocab_size
        wrong = next((index for index in ids if not 0 <= index < vocab_size), None)
        if wrong is not None:
            raise bad_request(
                f"prompt holds token id {wrong}; ids of this model are 0..{vocab_size - 1}: "
                "use the model's own tokenizer",
                param="prompt",
            )

    def token_limit(
        self, body: CommonRequest, *, default: int, prompt_tokens: int, prompt_param: str
    ) -> int:
        """Return how many tokens the answer may have, in 1..room left in the context.

        Raises:
            ApiError: the prompt, or the prompt and the wanted tokens, exceed the context.
        """
        context = self.engine.max_context
        room = context - prompt_tokens
        if room < 1:
            raise bad_request(
                f"the prompt has {prompt_tokens} tokens; the context is {context} tokens, of which "
                "at least 1 is for the answer: shorten the prompt",
                param=prompt_param,
                code="context_length_exceeded",
            )
        wanted = body.wanted_tokens
        if wanted is None:
            return min(default, room)
        if wanted > room:
            raise bad_request(
                f"{wanted} tokens are wanted after a prompt of {prompt_tokens} tokens; the context "
                f"is {context} tokens: ask for at most {room}, or shorten the prompt",
                param=body.wanted_param,
                code="context_length_exceeded",
            )
        return wanted

    def length_rule(self, options: HybridSpecOptions) -> LengthRule:
        """Return how a request with these options chooses its verify lengths."""
        if options.off:
            return LengthRule(kind="none")
        if self.engine.drafter_config is None:
            if options.fixed_length is not None:
                raise bad_request(
                    f"hybridspec.fixed_length = {options.fixed_length}; this server runs without "
                    "a drafter, so nothing can be verified: leave it out",
                    param="hybridspec.fixed_length",
                )
            return LengthRule(kind="none")
        if options.fixed_length is not None:
            return LengthRule(kind="fixed", length=options.fixed_length)
        default = self.default_rule
        return replace(default, length=min(default.length, options.max_length or BLOCK_SIZE))

    def build_job(
        self,
        body: CommonRequest,
        inbox: Inbox,
        *,
        prompt_tokens: list[int],
        max_tokens: int,
        stop_token_ids: Collection[int],
    ) -> Job:
        """Return the job that answers a checked request."""
        # OpenAI's defaults: temperature 1, top_p 1.
        sampling = SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
        )
        output = OutputAssembler(
            self.tokenizer,
            max_tokens=max_tokens,
            stops=body.stops,
            stop_token_ids=stop_token_ids,
        )
        return Job(
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            length_rule=self.length_rule(body.options),
            output=output,
            deliver=inbox.put,
            wants_text=bool(body.stream),
        )
