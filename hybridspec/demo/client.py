"""A small client of our own server: one prompt, one way, with what every round took."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hybridspec.calibrate.prompts import Prompt
from hybridspec.demo.comparison import Decoded
from hybridspec.errors import EnvironmentMissing


class Client:
    """Keeps one connection to `url`, such as http://127.0.0.1:8000."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s
        )
        self.url = url

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        try:
            self._connection.request(
                method,
                path,
                body=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentMissing(
                f"the server at {self.url} does not answer ({error}): see its messages above"
            ) from error
        if response.status != 200:
            raise EnvironmentMissing(
                f"the server at {self.url} answered {response.status}: {content.decode()[:300]}"
            )
        return content

    def metrics(self) -> str:
        """The server's Prometheus page."""
        return self._ask("GET", "/metrics").decode()

    def model(self) -> str:
        """Name of the served model."""
        return str(json.loads(self._ask("GET", "/v1/models"))["data"][0]["id"])

    def decode(
        self, model: str, prompt: Prompt, *, max_new_tokens: int, options: Mapping[str, Any]
    ) -> Decoded:
        """Decode a prompt greedily.

        Args:
            options: the request's `hybridspec` object: `{}`, `{"off": True}`, ...
        """
        answer = json.loads(
            self._ask(
                "POST",
                "/v1/completions",
                {
                    "model": model,
                    "prompt": prompt.text,
                    "max_tokens": max_new_tokens,
                    "temperature": 0,
                    "hybridspec": {**options, "return_token_ids": True, "return_rounds": True},
                },
            )
        )
        told = answer["hybridspec"]
        return Decoded(
            prompt.prompt_id,
            prompt.category,
            tuple(told["token_ids"]),
            tuple(r["emitted"] for r in told["round_log"]),
            tuple(r["observed_us"] for r in told["round_log"]),
            tuple(r["verify_length"] for r in told["round_log"]),
            tuple(r["fallback"] for r in told["round_log"] if r["fallback"] is not None),
        )
