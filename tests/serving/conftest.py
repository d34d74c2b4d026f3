"""One server of text and one of rows for all tests of a worker that change nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replica_servers import Server, serving


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        "--model", "tiny", "-B", "slots=8", "-B", "threads=1", folder=tmp_path_factory.mktemp("tiny")
    ) as server:
        yield server


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("--model", "blobnet-small", "--features", 16, "--actions", 4, "--seats", 2, "-B", "threads=1")
    with serving(*words, folder=tmp_path_factory.mktemp("rows")) as server:
        yield server
