"""Random requests against /openapi.json: no failure of the server, answers in the promised shape.

Bodies come from the schema, right ones and wrong ones; most are sent with the served model's name
and few tokens, so that they reach the engine.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness_kit import MODEL, Server
from schemathesis import GenerationMode, checks

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = (
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
)
pytestmark = pytest.mark.examples
# Bodies of a path and kind; `make test-losslessness-long` is the long form.
EXAMPLES = int(os.environ.get("HYBRIDSPEC_TEST_EXAMPLES", "40"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_made_from_the_schema(
    server: Server, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("a path without parameters has no wrong requests")
    examples = EXAMPLES if method == "POST" else min(EXAMPLES, 5)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode), named=st.integers(0, 4))
    def one(case: Any, named: int) -> None:
        if named and isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL
            limit = case.body.get("max_tokens")
            if limit is None or (isinstance(limit, int) and limit > 6):
                case.body["max_tokens"] = 6
                case.body.pop("max_completion_tokens", None)
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)

    one()
    status, _ = server.ask("GET", "/health")
    assert status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused_in_the_same_shape(server: Server, method: str) -> None:
    status, body = server.ask(method, "/v1/completions")
    assert status == 405
    assert b'"error"' in body
