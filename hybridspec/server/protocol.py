"""Request bodies of the OpenAI-compatible interface, and what is refused in them.

A parameter that would change the output but is not supported is refused by name unless it has the
value that changes nothing; unknown parameters are refused; harmless ones are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hybridspec.artifacts.tables import BLOCK_SIZE

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
VerifyLength = Annotated[int, Field(ge=1, le=BLOCK_SIZE)]


def _only(*neutral: object) -> AfterValidator:
    """Refuse every value of an unsupported parameter but those that change nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # `1 == True` in Python, so types are compared too.
        if any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            return value
        shown = repr(value) if len(repr(value)) <= 80 else type(value).__name__
        raise ValueError(
            f"{info.field_name} = {shown} is not supported; only "
            f"{' or '.join(repr(allowed) for allowed in neutral)} is: leave {info.field_name} out"
        )

    return AfterValidator(check)


class HybridSpecOptions(BaseModel):
    """How this request chooses its verify lengths (the `hybridspec` object of a request).

    At most one of `off`, `fixed_length` and `max_length` applies; without any, the server's
    default does.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    off: bool = Field(default=False, description="Decode without drafting (plain autoregression).")
    max_length: VerifyLength | None = Field(
        default=None, description="Longest verify length that the server may choose."
    )
    fixed_length: VerifyLength | None = Field(
        default=None, description="Verify this many rows in every round (16 = stock DFlash)."
    )
    return_token_ids: bool = Field(
        default=False, description="Return the output's token ids as `hybridspec.token_ids`."
    )
    return_rounds: bool = Field(
        default=False, description="Return what every round did as `hybridspec.round_log`."
    )

    @model_validator(mode="after")
    def _exclusive(self) -> HybridSpecOptions:
        chosen = [
            name for name in ("max_length", "fixed_length") if getattr(self, name) is not None
        ]
        chosen = (["off"] if self.off else []) + chosen
        if len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} exclude each other; a request sets at most one of off, "
                "max_length and fixed_length: leave all but one out"
            )
        return self


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(
        default=False, description="End the stream with a chunk of usage counts."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored.")


class CommonRequest(BaseModel):
    """Fields that both kinds of completion share."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description=f"Most tokens of the answer. Default: {DEFAULT_COMPLETION_TOKENS}; for chat "
        "the server's own limit (512 unless it was started with another). Defaults shrink to what "
        "the context leaves.",
    )
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = Field(
        default=None, description="0 is greedy. Default: 1, as OpenAI's."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None, description="Nucleus mass. Default: 1."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    hybridspec: HybridSpecOptions | None = None

    # Without effect on the output: accepted and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Would change the output: refused unless neutral.
    n: Annotated[Any, _only(1, None)] = 1
    presence_penalty: Annotated[Any, _only(0, 0.0, None)] = None
    frequency_penalty: Annotated[Any, _only(0, 0.0, None)] = None
    logit_bias: Annotated[Any, _only({}, None)] = None

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed: leave some out"
            )
        if any(not stop for stop in stops):
            raise ValueError("stop holds an empty string; it would stop at once: leave it out")
        return value

    @field_validator("stream_options")
    @classmethod
    def _usage_needs_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError(
                "stream_options is set but stream is false; it is for streams: set stream to true"
            )
        return value

    @property
    def options(self) -> HybridSpecOptions:
        """The `hybridspec` object, or one that leaves everything to the server."""
        return self.hybridspec or HybridSpecOptions()

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted_tokens(self) -> int | None:
        """The limit that the client asked for, or None."""
        return self.max_tokens

    @property
    def wanted_param(self) -> str:
        """Name of the parameter that `wanted_tokens` came from."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(CommonRequest):
    """Body of POST /v1/completions."""

    # After `_check_prompt` only text or token ids are left.
    prompt: str | list[int] | list[str] = Field(
        description="Text, token ids, or a list of exactly one text."
    )
    logprobs: Annotated[Any, _only(None, False)] = None
    echo: Annotated[Any, _only(False, None)] = None
    best_of: Annotated[Any, _only(1, None)] = None
    suffix: Annotated[Any, _only("", None)] = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str | list[int] | list[str]) -> str | list[int]:
        if not value:
            raise ValueError("prompt is empty; at least one token is needed: send some text")
        if isinstance(value, str):
            return value
        texts = [item for item in value if isinstance(item, str)]
        if not texts:
            return [item for item in value if isinstance(item, int)]
        if len(texts) > 1:
            raise ValueError(
                f"prompt holds {len(texts)} texts; one prompt a request is supported: "
                "send one request a prompt (they are batched on arrival)"
            )
        if not texts[0]:
            raise ValueError("prompt is empty; at least one token is needed: send some text")
        return texts[0]


class TextPart(BaseModel):
    """A part of a message's content; text is the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: Annotated[Any, _only(None)] = None
    tool_calls: Annotated[Any, _only(None, [])] = None

    def to_template(self) -> dict[str, str]:
        """Return what chat templates read; `developer` is today's name for `system`."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CommonRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[Any, _only(False, None)] = None
    top_logprobs: Annotated[Any, _only(0, None)] = None
    tools: Annotated[Any, _only(None, [])] = None
    tool_choice: Annotated[Any, _only("none", None)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only(None, [])] = None
    function_call: Annotated[Any, _only("none", None)] = None
    response_format: Annotated[Any, _only({"type": "text"}, None)] = None
    modalities: Annotated[Any, _only(["text"], None)] = None
    reasoning_effort: Annotated[Any, _only(None)] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and value != other:
            raise ValueError(
                f"max_completion_tokens = {value} contradicts max_tokens = {other}; they mean the "
                "same: send one"
            )
        return value

    @property
    def wanted_tokens(self) -> int | None:
        """The limit that the client asked for, or None."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_param(self) -> str:
        """Name of the parameter that `wanted_tokens` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
