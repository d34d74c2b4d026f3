"""The live page in a tab, and a server that does not exist, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOOL = Path(__file__).parent.parent / "monitoring" / "serve_page.py"
CHROMIUM = "/usr/bin/chromium"
WITHIN_MS = 60_000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@contextmanager
def served(*flags: str, port: int = 0) -> Iterator[str]:
    """Its URL. `flags` are those of the tool."""
    command = [sys.executable, str(TOOL), "--port", str(port), *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Watched:
    """A tab, with all that it said on its console and asked of any host."""

    def __init__(self, browser: Any, *, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WITHIN_MS / 1000
        while not condition():
            assert time.monotonic() < end, self.page.inner_text("body")
            self.page.wait_for_timeout(50)

    def live(self, url: str) -> None:
        self.page.goto(url + "/")
        self.until(lambda: self.text("#state") == "live")
        self.until(lambda: self.text("#throughput") not in ("–", "0"))

    @property
    def too_wide(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
