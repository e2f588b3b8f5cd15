"""Servers that answer as SGLang does, of known times: whole processes for the commands.

One request at a time, which is what forced routes are measured with. A round takes 2 ms, 0.1 ms a
row, and with forced routes 0.1 ms a distinct expert; a plain round takes 1.5 ms.
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

    us_an_expert = US_AN_EXPERT
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
        if self.path != "/generate":
            return
        (params,) = body["sampling_params"]
        asked = params.get("custom_params", {}).get("hybridspec", {})
        self.answer(
            params["max_new_tokens"],
            asked.get("verify_length", 0),
            asked.get("distinct_experts", 0),
        )

    def answer(self, most: int, length: int, distinct: int) -> None:
        """A token a round, up to three of a drafted one."""
        us = 1500.0 if not length else 2000.0 + 100.0 * length + self.us_an_expert * distinct
        a_round = min(3, length) if length and not distinct else 1
        began, tokens, rounds = time.monotonic(), 1, 0
        self._tell({"completion_tokens": 1, "finish_reason": None})
        while tokens < most:
            rounds, tokens = rounds + 1, min(most, tokens + a_round)
            time.sleep(max(0.0, began + 1e-6 * us * rounds - time.monotonic()))
            meta: dict[str, Any] = {"completion_tokens": tokens, "finish_reason": None}
            if tokens == most:
                meta |= {
                    "finish_reason": {"type": "length"},
                    "spec_verify_ct": rounds,
                    "spec_cap_lens_histogram": [0] * length + [rounds],
                }
            self._tell(meta)
        self.wfile.write(b"data: [DONE]\n\n")

    def _tell(self, meta: dict[str, Any]) -> None:
        line = json.dumps({"index": 0, "meta_info": meta})
        self.wfile.write(f"data: {line}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Unpriced(SglangLike):
    """One whose graphs do not take the table."""

    us_an_expert = 0.0


class Refusing(SglangLike):
    """One whose routers choose; it says so in the stream, as SGLang's scheduler does."""

    def answer(self, most: int, length: int, distinct: int) -> None:
        error = {"error": {"message": "routers choose experts here"}}
        self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())


class Dying(SglangLike):
    """One that goes away in the middle of an answer."""

    def answer(self, most: int, length: int, distinct: int) -> None:
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
