"""What is asked of a running SGLang server, over HTTP and by the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridspec.errors import EnvironmentMissing, UsageError

IDLE_SECONDS = 60.0
# The server ends a request whose connection is closed, and a connection carries one request.
HEADERS = {"Content-Type": "application/json", "Connection": "close"}


@dataclass(frozen=True)
class Chunk:
    """One piece of a stream.

    Attributes:
        arrived_s: `time.perf_counter` when its line was read.
        index: request of the batch that it belongs to.
        meta: SGLang's `meta_info`, with counts since the request's start.
    """

    arrived_s: float
    index: int
    meta: Mapping[str, Any]


class ServerApi:
    """A SGLang server by its URL.

    Args:
        url: such as `http://127.0.0.1:8000`.
        api_key: of a server that asks for one.

    Raises:
        UsageError: a URL that is none.
    """

    def __init__(self, url: str, *, timeout_s: float = 120.0, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server: write it as http://HOST:PORT")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        self._headers = dict(HEADERS)
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def healthy(self) -> bool:
        """Whether the server answers that it is ready."""
        try:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=5.0)
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False

    def info(self) -> dict[str, Any]:
        """Fields of the server's `ServerArgs` as resolved, and its `version`."""
        return self._json("GET", "/server_info")

    def wait_until_idle(self) -> None:
        """Abort what runs and wait until nothing does.

        Raises:
            EnvironmentMissing: requests of others go on.
        """
        self._read("POST", "/abort_request", {"rid": "", "abort_all": True})
        until = time.monotonic() + IDLE_SECONDS
        while self._request("POST", "/flush_cache?timeout=5", {}, any_status=True).status != 200:
            if time.monotonic() > until:
                raise EnvironmentMissing(
                    f"{self.url} was not idle within {IDLE_SECONDS:g} s; rounds are timed on a "
                    "server without other requests: stop its other clients"
                )

    def stream(self, body: Mapping[str, Any]) -> Iterator[Chunk]:
        """Chunks of a batch of requests, as they arrive; closing the iterator ends them.

        Raises:
            EnvironmentMissing: the server went away, or answered with an error.
        """
        response = self._request("POST", "/generate", body)
        try:
            for line in response:
                arrived_s = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                found = json.loads(data)
                if "error" in found:
                    reason = found["error"].get("message", found["error"])
                    raise EnvironmentMissing(f"{self.url} refused a request: {reason}")
                yield Chunk(arrived_s, int(found.get("index") or 0), found["meta_info"])
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        finally:
            response.close()

    def _json(self, method: str, path: str) -> dict[str, Any]:
        return json.loads(self._read(method, path, None))

    def _read(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            return self._request(method, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, any_status: bool = False
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200 and not any_status:
                text = response.read(2000).decode("utf-8", "replace").strip()
                raise EnvironmentMissing(
                    f"{self.url}{path} answered {response.status}: {text}: see the server's log"
                )
            return response
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> EnvironmentMissing:
        return EnvironmentMissing(
            f"{self.url} does not answer ({error}): start the server, or see its log"
        )


def generate_body(
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    verify_length: int,
    distinct_experts: int = 0,
) -> dict[str, Any]:
    """A greedy batch of streams that stop for nothing.

    Args:
        prompts: token ids.
        verify_length: rows of every round, 1..16; 0 for a server without a drafter.
        distinct_experts: of each layer that the rows of a request go to; 0: as the routers say.
    """
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
    }
    if verify_length:
        asked = {"verify_length": verify_length}
        if distinct_experts:
            asked["distinct_experts"] = distinct_experts
        sampling["custom_params"] = {"hybridspec": asked}
    return {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": [sampling] * len(prompts),
        "stream": True,
    }
