"""What /openapi.json says about answers: errors in OpenAI's shape, streams, plain text."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What is wrong: `message` says value, rule and remedy."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


# Status classes: without one of 4XX FastAPI would promise its own shape for wrong parameters.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorBody,
        "description": "400: a parameter is wrong; 404: no such model; 413: the body is too "
        "large; 429: too many requests wait, see Retry-After.",
    },
    "5XX": {
        "model": ErrorBody,
        "description": "500: the engine failed on this request; 503: no requests are taken now.",
    },
}
COMPLETION: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "description": "The answer, or its events if `stream` is true.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            # OpenAPI before 3.2 has the schema of a stream describe each of its events.
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "properties": {"data": {"type": "string"}},
                    "required": ["data"],
                }
            },
        },
    },
}
HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    503: {
        "description": "No requests are taken; `reason` says why.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
}
