"""Servers that are shared by all tests that change nothing of them: of text, rows, several models, behind a router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from replica_servers import Server, serving, write_keys

ROWS = ("--features", 16, "--actions", 4, "--seats", 2)
WORDS: dict[str, tuple[object, ...]] = {
    "tiny": ("--model", "tiny", "-B", "slots=8", "-B", "threads=1"),
    "rows": ("--model", "blobnet-small", *ROWS, "-B", "threads=1"),
    "several": ("--model", "chat=tiny,small=tiny,net=blobnet-small", *ROWS, "-B", "slots=8", "--share", "chat=2",
                "--api-key-file", "api", "--admin-key-file", "admin"),
    "behind": ("--model", "tiny", "-B", "slots=4", "-B", "threads=1", "--behind-router"),
}  # fmt: skip


def shared(name: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp(name)
        for kind in ("api", "admin"):
            write_keys(folder / kind, f"# of the tests\nthe-{kind}-key")
        with serving(*WORDS[name], folder=folder) as running:
            yield running

    return server


tiny, rows, several, behind = map(shared, WORDS)
