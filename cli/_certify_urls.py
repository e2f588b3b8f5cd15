"""`hybridspec certify` over two running OpenAI-compatible servers."""

from __future__ import annotations

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.certificate import Subject
from hybridspec.artifacts.digest import model_digest
from hybridspec.cli._certify_plan import Arranged, Asked, Request
from hybridspec.cli._output import Output


def arrange(request: Request, asked: Asked, output: Output) -> Arranged:
    """Reach both servers."""
    from hybridspec.certify.endpoint import Endpoint
    from hybridspec.certify.run import Plan
    from hybridspec.certify.url_arms import BOUNDS, UrlArms

    assert request.url is not None
    assert request.baseline_url is not None
    baseline = Endpoint(_full(request.baseline_url), chat=request.chat)
    tested = Endpoint(_full(request.url), chat=request.chat)
    dtype = "bfloat16" if request.dtype == "auto" else request.dtype
    if request.dtype == "auto":
        output.note("servers do not tell their type; bfloat16 is taken, name another by --dtype")
    plan = Plan(
        gates=asked.gates,
        tasks=asked.tasks,
        questions=asked.questions,
        batch=request.batch or 4,
        max_new_tokens=request.max_new_tokens,
        max_answer_tokens=request.max_answer_tokens,
        margin=request.margin,
    )
    subject = Subject(
        engine=f"{tested.engine} over HTTP ({tested.model})",
        engine_version=tested.version,
        dtype=dtype,
        target_digest=None if request.target is None else model_digest(request.target),
        drafter_digest=None if request.drafter is None else model_digest(request.drafter),
        bundle=None if request.bundle is None else load_bundle(request.bundle).content_id,
        lengths="as the server chooses",
    )
    return Arranged(UrlArms(baseline, tested, bound_logits=BOUNDS[dtype]), subject, plan)


def _full(url: str) -> str:
    """`:30000` means this machine."""
    return f"http://127.0.0.1{url}" if url.startswith(":") else url
