"""A hub of models on this machine: a server that speaks the part of the Hugging Face hub's HTTP that huggingface_hub
asks for, and a cache as it writes one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "1" * 40
ASKED = re.compile(r"/api/models/([^/?]+/[^/?]+)(?:/(revision|tree)/([^/?]+))?(?:\?.*)?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class Repository:
    """Its files by path. `sizes`: what the list of files says instead of their length."""

    files: Mapping[str, bytes]
    gated: bool = False
    token: str | None = None  # without which nobody sees it
    sizes: Mapping[str, int] = field(default_factory=dict)
    forbidden: Collection[str] = ()  # files that nobody gets
    cut: dict[str, int] = field(default_factory=dict)  # of these files the connection ends after so many bytes, once


def repository_of(folder: Path, **more: Any) -> Repository:
    """That of a model folder."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return Repository(files, **more)


@dataclass
class Hub:
    """`asked`: method and path of each request, in their order."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[tuple[str, int]] = field(default_factory=list)  # of files that were sent: from which byte on
    down: bool = False  # whether it answers 503 to all

    @property
    def fetched(self) -> list[str]:
        """The files that were sent, in the order of their names."""
        return sorted({found[3] for one in self.asked if one.startswith("GET") and (found := FILE.search(one))})


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub on a free port of this machine. Its clients of this process are closed at the end."""
    from huggingface_hub import close_session

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        close_session()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.asked.append(f"{self.command} {self.path}")
        if hub.down:
            return self._send(503, {"error": "down"})
        found = ASKED.fullmatch(self.path) or FILE.match(self.path)
        repository = hub.repositories.get(found[1]) if found else None
        if found is None or repository is None or (repository.token and self._token() != repository.token):
            return self._send(401, {"error": "no such"}, {"X-Error-Code": "RepoNotFound"})
        if found.re is ASKED:
            revision = found[3] or "main"
            if revision not in ("main", "v1", COMMIT):
                return self._send(404, {"error": "no such"}, {"X-Error-Code": "RevisionNotFound"})
            if found[2] == "tree":
                return self._send(200, [_entry(name, repository) for name in repository.files])
            siblings = [{"rfilename": name, "size": _size(name, repository)} for name in repository.files]
            return self._send(200, {"id": found[1], "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        if found[3] in repository.forbidden:
            return self._send(403, {"error": "no"})
        if repository.gated:
            return self._send(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        return self._send_file(repository, found[3])

    def _token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def _send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _send_file(self, repository: Repository, name: str) -> None:
        content, cut = repository.files[name], None
        if self.command == "GET":
            cut = repository.cut.pop(name, None)
        begin = int(self.headers.get("range", "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[begin : None if cut is None else begin + cut])
            self.server.hub.ranges.append((name, begin))  # type: ignore[attr-defined]
        self.close_connection = self.close_connection or cut is not None


def _size(name: str, repository: Repository) -> int:
    return repository.sizes.get(name, len(repository.files[name]))


def _entry(name: str, repository: Repository) -> dict[str, Any]:
    oid = hashlib.sha1(repository.files[name]).hexdigest()
    return {"type": "file", "path": name, "size": len(repository.files[name]), "oid": oid}


def put_in_cache(
    cache: Path, name: str, files: Mapping[str, bytes], revision: str = "main", commit: str = COMMIT
) -> Path:
    """A repository in a cache, as huggingface_hub writes it; returns the snapshot's folder."""
    base = cache / f"models--{name.replace('/', '--')}"
    for path, content in files.items():
        blob = base / "blobs" / hashlib.sha1(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = base / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / revision).write_text(commit)
    return base / "snapshots" / commit
