"""Refuses request bodies that no prompt can need before they fill the memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridspec.server.api_error import ApiError

MAX_BODY_BYTES = 16 * 2**20


class BodyLimit:
    """ASGI middleware that raises a 413 once a body is larger than `limit_bytes`."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body's bytes as the application reads them."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen_bytes = 0

        async def counted() -> Message:
            nonlocal seen_bytes
            message = await receive()
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > self._limit_bytes:
                raise ApiError(
                    f"the body is larger than {self._limit_bytes} bytes; that is the most this "
                    "server reads: send a shorter prompt",
                    status=413,
                    kind="invalid_request_error",
                    code="body_too_large",
                )
            return message

        await self._app(scope, counted, send)
