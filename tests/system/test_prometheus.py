"""A real Prometheus scrapes a server as docs/monitoring.md says, and every panel of the dashboard has its series."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from monitoring.exposed import PAGE, expressions
from ports import free_port
from system.pages import served

pytestmark = pytest.mark.system
WITHIN_S = 90.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str, **fields: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(fields)}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.URLError:
            return None

    def values(self, expression: str) -> list[float]:
        found = self.ask("query", query=expression)
        return [float(one["value"][1]) for one in found["result"]] if found else []


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (text,) = re.findall(r"^```yaml prometheus.yml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    port = free_port()
    with served("--fleet") as url:
        config = folder / "prometheus.yml"
        config.write_text("global: {scrape_interval: 1s}\n" + text.replace("127.0.0.1:8000", url.rpartition("/")[2]))
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.kill()
            process.wait()


def until(condition: Any, otherwise: Any) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.2)


def test_it_scrapes_what_is_served_and_every_panel_has_its_series(prometheus, tmp_path):
    until(lambda: (prometheus.values("min_over_time(up[1m])") or [0])[0] == 1, lambda: prometheus.ask("targets"))
    until(lambda: (prometheus.values("count_over_time(up[1m])") or [0])[0] >= 3, lambda: prometheus.ask("targets"))
    for expression in expressions():
        asked = expression.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*")
        if asked.endswith("== 0"):
            assert len(prometheus.values(asked)) == 1, "replica 2 is down there"
            continue
        until(lambda asked=asked: prometheus.values(asked), lambda asked=asked: asked)


def test_nothing_it_scrapes_is_refused(prometheus):
    until(lambda: prometheus.values("scrape_samples_scraped"), lambda: prometheus.ask("targets"))
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert min(prometheus.values("scrape_samples_scraped")) > 200
