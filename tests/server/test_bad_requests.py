"""Requests that are refused, each with the parameter's name and OpenAI's error shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from conftest import Served

GOOD = {"model": "micro", "prompt": "x", "max_tokens": 1, "temperature": 0}
GOOD_CHAT = {
    "model": "micro", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1
}  # fmt: skip


def post(served: Served, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json=body, timeout=30)


def check(response: httpx.Response, param: str | None, *, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert ":" in error["message"]  # value; rule: remedy
    return error


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"top_k": 4}, "top_k"),
        ({"tools": []}, "tools"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [7] * 4096}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"hybridspec": {"max_length": 0}}, "hybridspec.max_length"),
        ({"hybridspec": {"max_length": 17}}, "hybridspec.max_length"),
        ({"hybridspec": {"fixed_length": 0}}, "hybridspec.fixed_length"),
        ({"hybridspec": {"off": 1}}, "hybridspec.off"),
        ({"hybridspec": {"off": True, "max_length": 4}}, "hybridspec"),
        ({"hybridspec": {"off": True, "fixed_length": 4}}, "hybridspec"),
        ({"hybridspec": {"max_length": 4, "fixed_length": 4}}, "hybridspec"),
        ({"hybridspec": {"speed": "fast"}}, "hybridspec.speed"),
        ({"hybridspec": []}, "hybridspec"),
    ],
)
def test_completion_refusals(served: Served, changes: dict[str, Any], param: str) -> None:
    check(post(served, "completions", {**GOOD, **changes}), param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chat_refusals(served: Served, changes: dict[str, Any], param: str) -> None:
    check(post(served, "chat/completions", {**GOOD_CHAT, **changes}), param)


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "presence_penalty": 0},
        {"user": "me", "metadata": {"a": "b"}, "logit_bias": {}, "frequency_penalty": 0.0},
        {"stop": None, "seed": None, "top_p": None, "stream": None, "hybridspec": None},
        {"stop": ["a", "b", "c", "d"], "top_p": 1, "seed": -5, "hybridspec": {"off": False}},
        {"store": False, "service_tier": "auto"},
    ],
)
def test_harmless_parameters_are_accepted(served: Served, harmless: dict[str, Any]) -> None:
    assert post(served, "completions", {**GOOD, **harmless}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param", "instead"),
    [
        ({"hybridspec": {"max_len": 4}}, "hybridspec.max_len", "mean hybridspec.max_length?"),
        ({"hybridspec": {"zzz": 4}}, "hybridspec.zzz", "leave it out"),
        ({"max_length": 4}, "max_length", "leave it out"),
        ({"custom_params": {"hybridspec": {}}}, "custom_params", 'asked for in {"hybridspec"'),
    ],
)
def test_unknown_parameters_name_a_near_one(
    served: Served, changes: dict[str, Any], param: str, instead: str
) -> None:
    refused = check(post(served, "completions", {**GOOD, **changes}), param)
    assert instead in refused["message"]


def test_unknown_model(served: Served) -> None:
    for path, body in (("completions", GOOD), ("chat/completions", GOOD_CHAT)):
        error = check(post(served, path, {**body, "model": "gpt-4"}), "model", status=404)
        assert error["code"] == "model_not_found"
        assert "'micro'" in error["message"]


def test_over_the_context_names_numbers(served: Served) -> None:
    error = check(post(served, "completions", {**GOOD, "max_tokens": 4096}), "max_tokens")
    assert error["code"] == "context_length_exceeded"
    for number in ("4096 tokens", "at most 4095"):
        assert number in error["message"]


def test_exactly_the_context_is_accepted(served: Served) -> None:
    response = post(served, "completions", {**GOOD, "prompt": [7] * 4095, "max_tokens": None})
    assert response.json()["usage"]["total_tokens"] == 4096
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("content", [b"", b"{", b'"text"', b"[1]", b"\xff\xfe"])
def test_bodies_that_are_no_object(served: Served, content: bytes) -> None:
    response = httpx.post(
        f"{served.url}/v1/completions",
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert check(response, None)["code"] == "not_json"


def test_lone_surrogate(served: Served) -> None:
    response = httpx.post(
        f"{served.url}/v1/completions",
        content=rb'{"model": "micro", "prompt": "a\ud800"}',
        headers={"Content-Type": "application/json"},
    )
    check(response, "prompt")


def test_endless_body_is_cut(served: Served) -> None:
    response = post(served, "completions", {**GOOD, "prompt": "x" * 17 * 2**20})
    assert check(response, None, status=413)["code"] == "body_too_large"


def test_unknown_paths_and_methods(served: Served) -> None:
    check(httpx.get(f"{served.url}/v1/nothing"), None, status=404)
    check(httpx.get(f"{served.url}/v1/completions"), None, status=405)


def test_refusals_are_counted(served: Served) -> None:
    before = served.metric("hybridspec_requests_total", status="400")
    post(served, "completions", {**GOOD, "n": 2})
    assert served.metric("hybridspec_requests_total", status="400") == before + 1
