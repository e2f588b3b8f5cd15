"""The HTTP interface: completions, chat, models, health, metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, Response

from hybridspec.errors import PromptError
from hybridspec.server.answers import answer
from hybridspec.server.api_error import bad_request
from hybridspec.server.documented import COMPLETION, ERRORS, HEALTH
from hybridspec.server.job import Job
from hybridspec.server.pending import Inbox, PendingJob
from hybridspec.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
)
from hybridspec.server.shapes import ChatShape, CompletionShape, Shape
from hybridspec.server.state import ServerState

router = APIRouter()


def state_of(request: Request) -> ServerState:
    """Return the server that a request belongs to."""
    return request.app.state.server


@router.get("/health", tags=["server"], responses=HEALTH)
async def health(request: Request) -> JSONResponse:
    """200 while requests are taken, else 503 with the reason."""
    server = state_of(request)
    now = server.scheduler.health()
    body = {
        "status": "ok" if now.state == "running" else now.state,
        "reason": now.reason,
        "model": server.model_name,
        "policy_active": server.policy_active,
        "active": now.active,
        "waiting": now.waiting,
    }
    return JSONResponse(body, status_code=200 if now.state == "running" else 503)


@router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(state_of(request).telemetry.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", tags=["openai"])
async def list_models(request: Request) -> dict[str, Any]:
    """The one model of this server."""
    return {"object": "list", "data": [_model(state_of(request))]}


@router.get("/v1/models/{model:path}", tags=["openai"], responses=ERRORS)
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model by name."""
    server = state_of(request)
    server.check_model(model)
    return _model(server)


@router.post("/v1/completions", tags=["openai"], response_model=None, responses=COMPLETION)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a prompt; a stream of server-sent events if `stream` is true."""
    server = state_of(request)
    server.check_model(body.model)
    if isinstance(body.prompt, str):
        ids = await _encode(server, body.prompt, param="prompt")
    else:
        ids = [index for index in body.prompt if isinstance(index, int)]
        server.check_ids(ids)
    return await _run(
        request,
        body,
        CompletionShape(server.model_name),
        ids=ids,
        prompt_param="prompt",
        default_tokens=DEFAULT_COMPLETION_TOKENS,
        stop_token_ids=server.eos_token_ids,
    )


@router.post("/v1/chat/completions", tags=["openai"], response_model=None, responses=COMPLETION)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation; a stream of server-sent events if `stream` is true."""
    server = state_of(request)
    server.check_model(body.model)
    try:
        text = server.tokenizer.apply_chat_template(
            [message.to_template() for message in body.messages]
        )
    except PromptError as error:
        raise bad_request(str(error), param="messages") from None
    return await _run(
        request,
        body,
        ChatShape(server.model_name),
        ids=await _encode(server, text, param="messages"),
        prompt_param="messages",
        default_tokens=server.chat_tokens,
        stop_token_ids={*server.eos_token_ids, *server.tokenizer.end_of_turn_ids},
    )


async def _encode(server: ServerState, text: str, *, param: str) -> list[int]:
    try:
        # A long prompt takes a while; other requests' events must not wait for it.
        return await run_in_threadpool(server.tokenizer.encode, text)
    except PromptError as error:
        raise bad_request(str(error), param=param) from None


async def _run(
    request: Request,
    body: CommonRequest,
    shape: Shape,
    *,
    ids: list[int],
    prompt_param: str,
    default_tokens: int,
    stop_token_ids: Collection[int],
) -> Response:
    server = state_of(request)
    max_tokens = server.token_limit(
        body,
        default=default_tokens,
        prompt_tokens=len(ids),
        prompt_param=prompt_param,
    )

    def build(inbox: Inbox) -> Job:
        return server.build_job(
            body, inbox, prompt_tokens=ids, max_tokens=max_tokens, stop_token_ids=stop_token_ids
        )

    pending = PendingJob(server.scheduler, build, receive=request.receive)
    return await answer(body, pending, shape, server.telemetry)


def _model(server: ServerState) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "hybridspec",
        "max_model_len": server.engine.max_context,
    }
