"""Bodies that no client sends by accident: each gets one clear answer, and the server goes on."""

from __future__ import annotations

import json
from http.client import HTTPConnection

import pytest
from robustness_kit import Server

BODIES = {
    "deep list": (b"[" * 100_000, "not JSON"),
    "deep object": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON"),
    "long number": (b'{"model":"embedded","prompt":[1' + b"0" * 5000 + b"]}", "not JSON"),
    "no UTF-8": (b"\xff\xfe", "not JSON"),
    "nothing": (b"", "JSON object"),
    "surrogate": (rb'{"model":"embedded","prompt":"\ud800"}', "surrogate"),
    "surrogate key": (rb'{"model":"embedded","prompt":"x","\ud800":1}', ""),
    "surrogate model": (rb'{"model":"\ud800","prompt":"x"}', "not served here"),
    "surrogate value": (rb'{"model":"embedded","prompt":"x","n":"\ud800"}', "n = "),
    "NaN": (b'{"model":"embedded","prompt":"x","temperature":NaN}', "temperature"),
    "infinity": (b'{"model":"embedded","prompt":"x","temperature":1e999}', "temperature"),
    "mixed prompt": (b'{"model":"embedded","prompt":["a",1]}', "prompt[0]"),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_body_is_refused(server: Server, name: str) -> None:
    data, word = BODIES[name]
    for path in ("/v1/completions", "/v1/chat/completions"):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())["error"]
        assert answer.status in (400, 404)
        assert said["message"]
        if path == "/v1/completions":
            assert word in said["message"]
        connection.close()
    assert server.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("name", ["%ff", "%00", "a/b", "%ED%A0%80", "x" * 5000])
def test_hostile_model_name_is_not_found(server: Server, name: str) -> None:
    status, body = server.ask("GET", f"/v1/models/{name}")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "model_not_found"
