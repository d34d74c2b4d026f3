"""A browser for the tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from system.pages import CHROMIUM, Watched


@pytest.fixture(scope="module")  # it runs an event loop in this thread, and no test beside it could run its own
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def watched(browser) -> Iterator[Callable[..., Watched]]:
    opened: list[Watched] = []

    def make(**options: Any) -> Watched:
        opened.append(Watched(browser, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.context.close()
