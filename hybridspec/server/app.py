"""The FastAPI application of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

import hybridspec
from hybridspec.request import LengthRule
from hybridspec.server.api_error import ApiError, bad_request
from hybridspec.server.body_limit import BodyLimit
from hybridspec.server.routes import router, state_of
from hybridspec.server.scheduler import Scheduler
from hybridspec.server.state import ServerState, natural_rule
from hybridspec.server.validation import explain
from hybridspec.telemetry import DriftMonitor, Telemetry

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine
    from hybridspec.reference.tokenizer import Tokenizer

DEFAULT_CHAT_TOKENS = 512
DEFAULT_QUEUE_LIMIT = 64
DEFAULT_DRAIN_S = 30.0


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    default_rule: LengthRule | None = None,
    queue_limit: int = DEFAULT_QUEUE_LIMIT,
    chat_tokens: int = DEFAULT_CHAT_TOKENS,
    drain_s: float = DEFAULT_DRAIN_S,
    telemetry: Telemetry | None = None,
    drift: DriftMonitor | None = None,
) -> FastAPI:
    """Build the application; the engine's thread runs from its start-up to its shutdown.

    Args:
        engine: used by this application alone from now on.
        model_name: the name that requests must send.
        default_rule: for requests that choose nothing themselves; by default the engine's policy
            where it has one, else 16 rows, else no drafts.
        queue_limit: requests that may wait beyond those that hold a slot; more get a 429.
        chat_tokens: most tokens of a chat answer whose request sets no limit.
        drain_s: how long a shutdown waits for accepted requests, seconds.
        telemetry: metrics to count into; new ones by default.
        drift: watch on predicted round times; the design's limits by default.
    """
    telemetry = telemetry or Telemetry()
    scheduler = Scheduler(engine, telemetry=telemetry, queue_limit=queue_limit, drift=drift)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await run_in_threadpool(scheduler.stop, drain_s)

    app = FastAPI(
        title="HybridSpec reference server",
        version=hybridspec.__version__,
        summary="OpenAI-compatible completions with verify lengths chosen per request and round.",
        lifespan=lifespan,
        # Their pages load scripts from the network; the schema itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        scheduler=scheduler,
        telemetry=telemetry,
        model_name=model_name,
        default_rule=default_rule or natural_rule(engine),
        chat_tokens=chat_tokens,
        drain_s=drain_s,
    )
    app.state.server = state
    telemetry.policy_active.set(state.policy_active)
    app.add_middleware(BodyLimit)
    app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


def _respond(request: Request, error: ApiError) -> JSONResponse:
    if request.url.path.startswith("/v1/"):
        state_of(request).telemetry.count_request(status=error.status)
    return JSONResponse(error.to_json(), status_code=error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _respond(request, error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _respond(request, explain(error.errors()))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # FastAPI's word for what the JSON parser gives up on.
        return _respond(
            request,
            bad_request(
                "the body is not JSON that can be read (nested too deeply, or a number too long); "
                "requests are JSON objects: send one",
                code="not_json",
            ),
        )
    called = f"{request.method} {request.url.path}"
    message = f"{called} is not served here ({error.detail}): see /openapi.json"
    wrapped = ApiError(
        message,
        status=error.status_code,
        kind="invalid_request_error",
        code="not_found" if error.status_code == 404 else None,
        headers=error.headers,
    )
    return _respond(request, wrapped)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    message = f"the server failed on this request ({type(error).__name__}): see its log"
    return _respond(
        request, ApiError(message, status=500, kind="server_error", code="internal_error")
    )
