"""One OpenAI-compatible server, whatever engine runs behind it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hybridspec.errors import EnvironmentMissing, QualityGate, UsageError

TOP = 5
_MOST_WAIT_S = 30.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        tokens: text of each generated token and the log-probabilities of the best tokens there;
            empty where the server does not tell.
        seconds: of the whole answer, prefill included.
    """

    text: str
    num_tokens: int
    tokens: tuple[tuple[str, dict[str, float]], ...]
    seconds: float


class Endpoint:
    """A server by its address, such as `http://127.0.0.1:8000` or `.../v1`.

    Attributes:
        model: the model that is asked for, the server's first by default.
        engine: who serves, as far as the server says (`owned_by`).
        version: of it, `unknown` where it does not say.
        logprobs: whether answers come with log-probabilities.

    Raises:
        UsageError: no http address.
        EnvironmentMissing: nothing answers there, or another kind of server.
    """

    def __init__(self, url: str, *, model: str | None = None, chat: bool = False) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no http address: write it such as http://127.0.0.1:8000")
        self.url, self.chat = url, chat
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        try:
            listed = self._ask("GET", "/v1/models")["data"]
            entries = {str(entry["id"]): entry for entry in listed}
            self.model = model or next(iter(entries))
        except (KeyError, TypeError, StopIteration, AttributeError) as error:
            raise EnvironmentMissing(
                f"{url} lists no models at /v1/models: is it an OpenAI-compatible server?"
            ) from error
        if self.model not in entries:
            raise UsageError(
                f"{url} does not serve {self.model!r}; it serves {', '.join(entries)}: choose one"
            )
        self.engine = str(entries[self.model].get("owned_by") or "unknown")
        self.version = self._version()
        self.logprobs = True

    def _version(self) -> str:
        for path, keys in (
            ("/get_server_info", ("version",)),
            ("/version", ("version",)),
            ("/openapi.json", ("info", "version")),
        ):
            try:
                value: Any = self._ask("GET", path)
                for key in keys:
                    value = value[key]
                return str(value)
            except (EnvironmentMissing, KeyError, TypeError):
                continue
        return "unknown"

    def complete(self, prompt: str, *, max_tokens: int) -> Completion:
        """A greedy answer.

        Raises:
            EnvironmentMissing: the server does not answer, or refuses the request.
            QualityGate: log-probabilities that are no numbers.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        while True:
            wanted, asked = body, self.logprobs
            if asked:
                more = {"logprobs": True, "top_logprobs": TOP} if self.chat else {"logprobs": TOP}
                wanted = body | more
            began = time.perf_counter()
            try:
                answer = self._ask("POST", path, wanted)
            except _Refused as refusal:
                # Margins are then not known, which is told, not hidden.
                if asked and "logprob" in str(refusal):
                    self.logprobs = False
                    continue
                raise
            return self._completion(answer, time.perf_counter() - began)

    def _completion(self, answer: Any, seconds: float) -> Completion:
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
            tokens = _chat_tokens(choice) if self.chat else _tokens(choice)
            count = int((answer.get("usage") or {}).get("completion_tokens") or len(tokens))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EnvironmentMissing(
                f"{self.url} answered in another shape than OpenAI's ({type(error).__name__}: "
                f"{error}): is it an OpenAI-compatible server?"
            ) from error
        if any(value != value for _, best in tokens for value in best.values()):
            raise QualityGate(
                f"{self.url} tells log-probabilities that are NaN; nothing can be certified on "
                "them: check the weights and the server's log"
            )
        # JSON may carry half of a surrogate pair, which no file in UTF-8 holds.
        text = str(text or "").encode("utf-8", "replace").decode()
        return Completion(text, count, tokens, seconds)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """JSON of one call; waits where the server says that it is full."""
        status, headers, content = self._call(method, path, body)
        waited = 0.0
        while status in (429, 503) and waited < _MOST_WAIT_S:
            pause = min(_seconds(headers.get("Retry-After")), 5.0)
            time.sleep(pause)
            waited += pause
            status, headers, content = self._call(method, path, body)
        said = content.decode("utf-8", "replace")
        if status != 200:
            kind = _Refused if status in (400, 422) else EnvironmentMissing
            raise kind(f"{self.url}{path} answered {status}: {' '.join(said.split())[:300]}")
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            raise EnvironmentMissing(f"{self.url}{path} answered no JSON ({error})") from error

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_TIMEOUT_S)
        try:
            connection.request(
                method,
                self._root + path,
                body=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentMissing(
                f"{self.url} does not answer ({error}); a running server is needed: start it, or "
                "correct the address"
            ) from error
        finally:
            connection.close()


def _seconds(header: str | None) -> float:
    try:
        return max(float(header or 0.5), 0.1)
    except ValueError:
        return 1.0  # a date


class _Refused(EnvironmentMissing):
    """The server does not take the request as it is."""


def _tokens(choice: Mapping[str, Any]) -> tuple[tuple[str, dict[str, float]], ...]:
    told = choice.get("logprobs")
    if not told or not told.get("tokens"):
        return ()
    best = told.get("top_logprobs") or [None] * len(told["tokens"])
    own = told.get("token_logprobs") or [None] * len(told["tokens"])
    found = []
    for token, value, row in zip(told["tokens"], own, best, strict=True):
        row = dict(row or {})
        if value is not None:
            row[token] = value
        found.append((str(token), {str(k): float(v) for k, v in row.items()}))
    return tuple(found)


def _chat_tokens(choice: Mapping[str, Any]) -> tuple[tuple[str, dict[str, float]], ...]:
    told = (choice.get("logprobs") or {}).get("content") or []
    return tuple(
        (
            str(entry["token"]),
            {str(e["token"]): float(e["logprob"]) for e in entry.get("top_logprobs") or []}
            | {str(entry["token"]): float(entry["logprob"])},
        )
        for entry in told
    )
