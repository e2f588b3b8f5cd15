"""Two real servers over HTTP, the shapes of log-probabilities, and servers that answer nonsense."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from certify_kit import embedded_tasks, serving

from hybridspec.certify import gates
from hybridspec.certify.endpoint import Endpoint
from hybridspec.certify.texts import Task, Text
from hybridspec.certify.url_arms import BOUNDS, UrlArms
from hybridspec.errors import EnvironmentMissing, QualityGate, UsageError


def test_two_servers_say_the_same() -> None:
    with serving(drafts=False) as plain_url, serving(drafts=True) as url:
        arms = UrlArms(Endpoint(plain_url), Endpoint(f"{url}/v1/"), bound_logits=BOUNDS["float32"])
        assert (arms.tested.model, arms.tested.engine) == ("embedded", "hybridspec")
        assert arms.tested.version[0].isdigit()
        tasks = arms.encode(embedded_tasks(4), max_new_tokens=12)
        plain, hybrid = (
            arms.decode(
                "arm", tasks, drafts=drafts, batch=2, backwards=drafts, max_new_tokens=12,
                done=lambda _: None,
            )
            for drafts in (False, True)
        )  # fmt: skip
        found = [arms.compare(*three) for three in zip(tasks, plain, hybrid, strict=True)]
        assert found == [None] * 4
        assert all(text.num_tokens == 12 and text.decode_us > 0 for text in hybrid)
        assert gates.degenerate(plain, hybrid, plain).verdict == "passed"
        with pytest.raises(UsageError, match="does not serve 'other'; it serves embedded"):
            Endpoint(url, model="other")


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[str]:
    """A server that answers each path with (status, body) or a list of such in turn."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = answers.get(self.path, (404, "{}"))
            status, body = found.pop(0) if isinstance(found, list) else found
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


MODELS = (200, {"data": [{"id": "m", "owned_by": "sglang"}]})


def completion(**choice: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"text": "ab", **choice}], "usage": {"completion_tokens": 2}}


def logprobs(second: float = -0.75) -> dict[str, Any]:
    return {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.1, -0.7],
        "top_logprobs": [{"a": -0.1, "c": -3.0}, {"b": -0.7, "d": second}],
    }


def test_log_probabilities_of_both_interfaces() -> None:
    chat = {
        "choices": [
            {
                "message": {"content": "ab"},
                "logprobs": {
                    "content": [
                        {"token": "a", "logprob": -0.1,
                         "top_logprobs": [{"token": "c", "logprob": -3.0}]},
                        {"token": "b", "logprob": -0.7,
                         "top_logprobs": [{"token": "d", "logprob": -0.75}]},
                    ]
                },
            }
        ],
        "usage": {"completion_tokens": 2},
    }  # fmt: skip
    answers = {
        "/v1/models": MODELS,
        "/version": (200, {"version": "9.9"}),
        "/v1/completions": completion(logprobs=logprobs()),
        "/v1/chat/completions": (200, chat),
    }
    with answering(answers) as url:
        one = Endpoint(url).complete("x", max_tokens=2)
        two = Endpoint(url, chat=True).complete("x", max_tokens=2)
        assert Endpoint(url).version == "9.9"
    assert one.tokens == two.tokens
    assert one.tokens[1] == ("b", {"b": -0.7, "d": -0.75})


def test_server_without_log_probabilities_is_asked_without() -> None:
    refused = (400, {"message": "speculative decoding does not support return_logprob yet."})
    with answering({"/v1/models": MODELS, "/v1/completions": [refused, completion()]}) as url:
        endpoint = Endpoint(url)
        assert endpoint.complete("x", max_tokens=2).tokens == ()
        assert not endpoint.logprobs


def test_full_server_is_waited_for() -> None:
    busy = (429, {"error": {"message": "full"}})
    with answering({"/v1/models": MODELS, "/v1/completions": [busy, busy, completion()]}) as url:
        assert Endpoint(url).complete("x", max_tokens=2).text == "ab"


@pytest.mark.parametrize(
    "answer",
    [(200, "no json"), (200, {"choices": []}), (200, {}), (200, "[1]"), (500, "oh"),
     completion(logprobs={"tokens": ["a"], "top_logprobs": [], "token_logprobs": [0.0, 1.0]}),
     completion(text=None, logprobs={"tokens": ["a"], "token_logprobs": ["x"]})],
)  # fmt: skip
def test_nonsense_is_one_clear_refusal(answer: Any) -> None:
    with answering({"/v1/models": MODELS, "/v1/completions": answer}) as url:
        endpoint = Endpoint(url)
        with pytest.raises(EnvironmentMissing, match=url):
            endpoint.complete("x", max_tokens=2)


def test_nan_is_refused() -> None:
    body = json.dumps(completion(logprobs=logprobs())[1]).replace("-0.75", "NaN")
    with answering({"/v1/models": MODELS, "/v1/completions": (200, body)}) as url:
        endpoint = Endpoint(url)
        with pytest.raises(QualityGate, match="are NaN"):
            endpoint.complete("x", max_tokens=2)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "//"])
def test_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no http address"):
        Endpoint(url)


def test_unreachable_and_foreign_servers_are_refused() -> None:
    with pytest.raises(EnvironmentMissing, match="does not answer"):
        Endpoint("http://127.0.0.1:9")
    for answer in ((200, {"data": []}), (200, "[]"), (404, "{}")):
        with answering({"/v1/models": answer}) as url, pytest.raises(EnvironmentMissing):
            Endpoint(url)


def told(text: str, *tokens: tuple[str, dict[str, float]]) -> Text:
    return Text("a", "p", "c", text, (), len(tokens), 1.0, tuple(tokens))


@pytest.mark.parametrize(
    ("best", "other", "gap"),
    [
        ({"b": -0.7, "d": -0.75}, "d", 0.05),  # the runner-up
        ({"b": -0.7, "d": -5.0}, "z", 4.3),  # not even told: at least as far as the last one
        ({"b": -0.7, "d": -0.75}, "z", None),  # not told, may lie anywhere below
        ({}, "d", None),
    ],
)
def test_gap_from_log_probabilities(best: dict[str, float], other: str, gap: float | None) -> None:
    arms = UrlArms.__new__(UrlArms)
    arms.bound = 0.5
    plain = told("ab", ("a", {"a": -0.1}), ("b", best))
    found = arms.compare(Task("p", "c", "x"), plain, told(f"a{other}", ("a", {}), (other, {})))
    assert found is not None
    assert found.position == 1
    assert found.gap_logits == (None if gap is None else pytest.approx(gap))


@pytest.mark.parametrize(
    ("best", "other", "gap"),
    [
        ({"b": -0.7, "d": -0.75}, "dd", 0.05),
        ({"b": -0.7, "d": -0.75, "dd": -2.7}, "dd", 2.0),  # may be either: the further one counts
        ({"b": -0.7, "d": -5.0}, "zz", 4.3),  # none of those told: at least as far as the last
        ({"b": -0.7, "d": -0.75}, "zz", None),
        ({"b": -0.7, "d": -0.75}, "", float("inf")),  # it ended
    ],
)
def test_gap_to_a_server_that_tells_text_alone(
    best: dict[str, float], other: str, gap: float | None
) -> None:
    arms = UrlArms.__new__(UrlArms)
    arms.bound = 0.5
    plain = told("abc", ("a", {"a": -0.1}), ("b", best), ("c", {"c": -0.1}))
    text = Text("b", "p", "c", f"a{other}", (), 3, 1.0)
    found = arms.compare(Task("p", "c", "x"), plain, text)
    assert found is not None
    assert found.position == 1
    assert found.gap_logits == (None if gap is None else pytest.approx(gap))
    split = Text("a", "p", "c", "abé", (), 3, 1.0, plain.top)
    unknown = arms.compare(Task("p", "c", "x"), split, text)
    assert unknown is not None
    assert unknown.gap_logits is None


def test_texts_without_log_probabilities_differ_by_an_unknown_gap() -> None:
    arms = UrlArms.__new__(UrlArms)
    arms.bound = 0.5
    task = Task("p", "c", "x")
    found = arms.compare(task, told("abc"), told("abd"))
    assert found is not None
    assert (found.position, found.gap_logits) == (2, None)
    ended = arms.compare(task, told("abc"), told("ab"))
    assert ended is not None
    assert ended.gap_logits == float("inf")
