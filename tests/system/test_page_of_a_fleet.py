"""The page, the events and the metrics of a real fleet, whose replica is killed under load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving.replica_servers import SECONDS, Server, until

pytestmark = pytest.mark.system
ROWS = {"rows": [[0.5] * 16] * 4}
WORDS = ("--model", "blobnet-small", "--features", 16, "--actions", 4, "--seats", 2, "-B", "threads=1", "--replicas", 2)


class Load:
    """Clients that ask one thing after the other, until they are told to stop."""

    def __init__(self, server: Server, clients: int = 4) -> None:
        self.answered = self.failed = 0
        self._server, self._over = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        connection, body = self._server.connect(), json.dumps(ROWS)
        while not self._over.is_set():
            connection.request("POST", "/v1/evaluate", body)
            answer = connection.getresponse()
            answer.read()
            self.answered += answer.status == 200
            self.failed += answer.status != 200
        connection.close()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS)


@pytest.fixture
def fleet(tmp_path) -> Iterator[Server]:
    server = Server(*WORDS, folder=tmp_path).wait_until_ready()
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)


def counters(text: bytes) -> dict[tuple[str, str], float]:
    samples = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]
    rising = ("_total", "_count", "_sum", "_bucket")
    return {(one.name, str(one.labels)): one.value for one in samples if one.name.endswith(rising)}


def test_a_replica_that_is_killed_is_seen_and_no_counter_falls(watched, fleet):
    tab, load, scrapes = watched(), Load(fleet), []
    try:
        tab.live(fleet.url)
        tab.until(lambda: tab.text("#healthy") == "2 of 2 healthy")
        assert tab.text("#model") == "blobnet-small"
        assert tab.text("#throughput-unit") == "rows/s"
        workers = fleet.ask("/stats").json["workers"]
        scrapes.append(fleet.ask("/metrics").body)
        os.kill(workers[0]["pid"], signal.SIGKILL)
        tab.until(lambda: tab.text("#healthy") == "1 of 2 healthy")
        scrapes.append(fleet.ask("/metrics").body)
        assert "died" in tab.text("#workers")
        tab.until(lambda: tab.text("#healthy") == "2 of 2 healthy")
        assert tab.page.locator("#workers tr").nth(0).locator("td").last.inner_text() == "1", "started anew once"
        until(lambda: fleet.ask("/stats").json["workers"][0]["requests_served"] > 0)
        scrapes.append(fleet.ask("/metrics").body)
        assert not tab.too_wide
        assert tab.said == []
    finally:
        load.end()
    assert load.failed == 0
    assert load.answered > 0
    for before, after in zip(map(counters, scrapes), map(counters, scrapes[1:]), strict=False):
        assert [key for key in before if key not in after or after[key] < before[key]] == []
    for text in scrapes:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_fleet_that_is_watched_ends_when_it_is_asked_to(watched, fleet):
    tab = watched()
    tab.page.goto(fleet.url + "/")
    tab.until(lambda: tab.text("#state") == "live")
    assert fleet.end(signal.SIGTERM) == 0
    tab.until(lambda: tab.text("#state") == "not connected")
    assert "broken off" not in fleet.log
