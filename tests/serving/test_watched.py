"""The page, its events and the metrics of a running server."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from replica_servers import SECONDS, serving

ROW = {"x": [0.5] * 16}


def metrics(server) -> dict[tuple[str, str], float]:
    answer = server.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(answer.body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


@contextmanager
def watching(server, headers: dict[str, str] | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=SECONDS)
    connection.request("GET", "/events", headers=headers or {})
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("content-type") == "text/event-stream"

    def events() -> Iterator[tuple[str, Any]]:
        while name := response.readline().decode().strip():
            data = response.readline().decode()
            assert response.readline() == b"\n"
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    try:
        yield events()
    finally:
        connection.close()


def test_metrics_count_what_was_asked_and_never_fall(rows):
    before = metrics(rows)
    for _ in range(5):
        assert rows.ask("/v1/evaluate", ROW).status == 200
    after = metrics(rows)
    assert after["gpuinfer_model_info", "blobnet-small"] == 1
    asked = "gpuinfer_requests_total", "normal"
    assert after[asked] - before[asked] >= 5
    assert after["gpuinfer_request_duration_seconds_count", "normal"] == after[asked]
    rising = ("_total", "_count", "_sum", "_bucket")
    assert not [key for key in before if key[0].endswith(rising) and after[key] < before[key]]
    assert after["gpuinfer_requests_total", "normal"] <= rows.ask("/stats").json["requests"]


def test_text_counts_its_tokens(tiny):
    name = tiny.ask("/v1/models").json["data"][0]["id"]
    before = metrics(tiny)
    asked = {"model": name, "prompt": "a b c", "max_tokens": 4, "temperature": 0}
    answer = tiny.ask("/v1/completions", asked)
    assert answer.status == 200
    after = metrics(tiny)
    drawn = "gpuinfer_output_tokens_total", ""
    assert after[drawn] - before.get(drawn, 0) >= answer.json["usage"]["completion_tokens"]
    assert after["gpuinfer_time_to_first_token_seconds_count", ""] >= 1


def test_events_say_what_happens(rows):
    with watching(rows) as events:
        name, first = next(events)
        assert name == "look"
        assert first["about"]["status"] == "ready"
        assert rows.ask("/v1/evaluate", ROW).status == 200
        wanted = first["totals"]["requests"] + 1
        look = next(look for _, look in events if look["totals"]["requests"] >= wanted)
        assert look["latency_s"]["p50"] > 0
        assert look["batches"]["sizes"]


def test_with_a_key_the_page_is_open_and_what_it_shows_is_not(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    words = ("--model", "blobnet-small", "--api-key-file", keys)
    with serving(*words, folder=tmp_path) as server:
        assert server.ask("/").status == 200
        for path in ("/events", "/metrics", "/stats"):
            assert server.ask(path).status == 401
        key = {"Authorization": "Bearer secret"}
        assert server.ask("/metrics", headers=key).status == 200
        with watching(server, key) as events:
            assert next(events)[0] == "look"
            server.process.send_signal(signal.SIGTERM)
            for _ in events:
                pass  # to the end: a server that leaves ends it
            assert server.process.wait(SECONDS) == 0
