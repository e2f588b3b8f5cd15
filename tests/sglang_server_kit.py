"""Servers that stream as SGLang does, of known times; whole processes for the commands.

A round takes `base_us`, `us_a_row` for each row of the longest request, and with forced routes
`us_an_expert` for each distinct expert; a plain round takes `plain_us`. Only an answer's last chunk
counts rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

US_AN_EXPERT = 100.0


class SglangLike(BaseHTTPRequestHandler):
    """Routes as the table says."""

    plain_us, base_us, us_a_row, us_an_expert = 1500.0, 2000.0, 100.0, US_AN_EXPERT
    pair: tuple[str, str] = ("", "")
    plain = False

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/server_info":
            target, drafter = self.pair
            info: dict[str, Any] = {
                "version": "0.5.16",
                "model_path": target,
                "max_running_requests": 1,
                "tp_size": 1,
                "attention_backend": "triton",
                "linear_attn_backend": "triton",
                "moe_runner_backend": "triton",
                "cuda_graph_config": {"decode": {"bs": [1]}},
            }
            if not self.plain:
                info |= {
                    "speculative_algorithm": "HYBRIDSPEC",
                    "speculative_draft_model_path": drafter,
                }
            self.wfile.write(json.dumps(info).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if self.path == "/generate":
            self.generate(body)

    def generate(self, body: dict[str, Any]) -> None:
        """What a request for text does."""
        asked = body["sampling_params"]
        self.answer(
            [one["max_new_tokens"] for one in asked],
            [one.get("custom_params", {}).get("hybridspec", {}) for one in asked],
        )

    def answer(self, most: list[int], asked: list[dict[str, int]]) -> None:
        """A batch; each request emits at a pace of its own, so that one of them ends first."""
        lengths = [one.get("verify_length", 0) for one in asked]
        distinct = max(one.get("distinct_experts", 0) for one in asked)
        us = self.plain_us
        if max(lengths):
            us = self.base_us + self.us_a_row * max(lengths) + self.us_an_expert * distinct
        began, rounds, tokens = time.monotonic(), 0, [1] * len(most)
        for index in range(len(most)):
            self._tell(index, {"completion_tokens": 1, "finish_reason": None})
        while any(has < wants for has, wants in zip(tokens, most, strict=True)):
            rounds += 1
            time.sleep(max(0.0, began + 1e-6 * us * rounds - time.monotonic()))
            for index, length in enumerate(lengths):
                if tokens[index] == most[index]:
                    continue
                pace = 1 if distinct else max(1, min(3 - index, length))
                tokens[index] = min(most[index], tokens[index] + pace)
                meta: dict[str, Any] = {"completion_tokens": tokens[index], "finish_reason": None}
                if tokens[index] == most[index]:
                    meta |= {
                        "finish_reason": {"type": "length"},
                        "spec_verify_ct": rounds,
                        "spec_cap_lens_histogram": [0] * length + [rounds],
                    }
                self._tell(index, meta)
        self.wfile.write(b"data: [DONE]\n\n")

    def _tell(self, index: int, meta: dict[str, Any]) -> None:
        line = json.dumps({"index": index, "meta_info": meta})
        self.wfile.write(f"data: {line}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Unpriced(SglangLike):
    """One whose graphs do not take the table."""

    us_an_expert = 0.0


class Refusing(SglangLike):
    """One whose routers choose; it says so in the stream, as SGLang's scheduler does."""

    def answer(self, most: list[int], asked: list[dict[str, int]]) -> None:
        error = {"error": {"message": "routers choose experts here"}}
        self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())


class Dying(SglangLike):
    """One that goes away in the middle of an answer."""

    def answer(self, most: list[int], asked: list[dict[str, int]]) -> None:
        os._exit(7)


def words(kind: type[SglangLike], port: int, *, plain: bool, pair: tuple[Path, Path]) -> list[str]:
    """Arguments behind the Python interpreter of a server process."""
    return [__file__, kind.__name__, str(port), str(int(plain)), *map(str, pair)]


def main() -> None:
    """Serve; one that forces routes only as its configuration says."""
    name, port, plain, target, drafter = sys.argv[1:]
    kind: type[SglangLike] = globals()[name]
    kind.plain, kind.pair = plain == "1", (target, drafter)
    if not kind.plain:
        config = json.loads(Path(os.environ["HYBRIDSPEC_CONFIG"]).read_text())
        if not config["switches"].get("force_routes"):
            kind.us_an_expert = 0.0
    ThreadingHTTPServer(("127.0.0.1", int(port)), kind).serve_forever()


if __name__ == "__main__":
    main()
