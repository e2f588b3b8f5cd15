"""Errors in the shape that OpenAI clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

RETRY_AFTER_S = 1


class ApiError(HTTPException):
    """An HTTP error answer; the message says value, rule and remedy.

    It is an `HTTPException` because FastAPI turns every other error inside a body into a plain 400.

    Attributes:
        status: HTTP status code.
        kind: OpenAI's `type`, such as `invalid_request_error`.
        param: name of the request field at fault, or None.
        code: stable machine-readable reason, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be right as it is."""
    return ApiError(message, status=400, kind="invalid_request_error", param=param, code=code)


def queue_full(waiting: int, limit: int) -> ApiError:
    """429: as many requests wait as may wait."""
    return ApiError(
        f"{waiting} requests are waiting already; at most {limit} may wait: "
        "send the request again later, or start the server with a longer queue",
        status=429,
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def unavailable(reason: str, *, code: str) -> ApiError:
    """503: the server takes no requests now."""
    return ApiError(
        reason,
        status=503,
        kind="server_error",
        code=code,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def engine_failed(reason: str) -> ApiError:
    """500: the engine failed while the request was in its hands."""
    return ApiError(reason, status=500, kind="server_error", code="engine_failed")
