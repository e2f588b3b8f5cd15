"""A hub on this machine: the few endpoints of the Hugging Face hub that bundles need, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/?]+)(.*))?")
RESOLVE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Repositories as lists of commits, each a map of path to bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.fail_with: int | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sha(self, repo: str, number: int) -> str:
        return hashlib.sha1(f"{repo} {number}".encode()).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit id and files of `main` or of a commit."""
        commits = self.commits.get(repo, [])
        for number in range(len(commits) - 1, -1, -1):
            if revision in ("main", self.sha(repo, number)):
                return self.sha(repo, number), commits[number]
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        assert isinstance(self.server, Hub)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, code: str) -> None:
        self._answer(404, {"error": code}, {"X-Error-Code": code})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.fail_with:
            self._answer(self.hub.fail_with, {"error": "no"})
            return
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if repo in self.hub.commits else 200
            self.hub.commits.setdefault(repo, [{}])
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(repo)
            self._answer(status, {"url": f"{self.hub.endpoint}/datasets/{repo}", "id": repo})
            return
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
            return
        match = API.fullmatch(path)
        assert match is not None, path
        repo = match[1]
        if match[2] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
            return
        assert match[2] == "commit", path
        found = dict(self.hub.commits[repo][-1])
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                found[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                del found[item["value"]["path"]]
        self.hub.commits[repo].append(found)
        sha = self.hub.sha(repo, len(self.hub.commits[repo]) - 1)
        url = f"{self.hub.endpoint}/datasets/{repo}/commit/{sha}"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": sha})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.fail_with:
            self._answer(self.hub.fail_with, {"error": "no"})
            return
        path = unquote(urlsplit(self.path).path)
        if match := RESOLVE.fullmatch(path):
            self._file(*match.groups())
            return
        match = API.fullmatch(path)
        if match is None or match[1] not in self.hub.commits:
            self._missing("RepoNotFound")
            return
        found = self.hub.find(match[1], match[3] or "main")
        if found is None:
            self._missing("RevisionNotFound")
            return
        sha, files = found
        if match[2] == "tree":
            self._answer(
                200,
                [
                    {"type": "file", "path": name, "size": len(data), "oid": sha}
                    for name, data in sorted(files.items())
                ],
            )
            return
        siblings = [{"rfilename": name} for name in sorted(files)]
        self._answer(200, {"id": match[1], "sha": sha, "siblings": siblings, "private": False})

    def _file(self, repo: str, revision: str, name: str) -> None:
        found = self.hub.find(repo, revision)
        if found is None or name not in found[1]:
            self._missing("EntryNotFound" if found else "RevisionNotFound")
            return
        data = found[1][name]
        etag = hashlib.sha1(data).hexdigest()
        self._answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": found[0]})


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(5)
