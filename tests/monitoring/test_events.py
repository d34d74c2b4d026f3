"""The live page: its files, what it is told of two snapshots, and the stream of looks that all watchers share."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

import pytest
from monitoring.synthetic import Server, worker

from gpuinfer.errors import GpuinferError
from gpuinfer.fleet.fleet_counters import MonotonicCounters
from gpuinfer.serving.monitoring.live_page import (
    FILES,
    MOST_PLACES,
    MOST_WORKERS,
    LiveEvents,
    LiveState,
    asset,
    live_totals,
    live_view,
)
from gpuinfer.stats import Histogram, Snapshot, summarise

WITHIN_S = 60.0


class Reader:
    """Stands for an exchange: keeps what was written, and reads as slowly as it is told."""

    def __init__(self, reading: asyncio.Event | None = None) -> None:
        self.status, self.headers, self.events, self.ended = 0, {}, [], False
        self._reading = reading

    def begin(self, status, content_type, headers=()):
        self.status, self.headers = status, {"Content-Type": content_type, **dict(headers)}

    def refuse(self, status, message, headers=()):
        self.status, self.headers = status, dict(headers)

    async def write(self, data: bytes) -> None:
        first, second, *rest = data.decode().split("\n")
        assert (first[:7], second[:6], rest) == ("event: ", "data: ", ["", ""])
        self.events.append((first[7:], json.loads(second[6:])))
        if self._reading is not None:
            await self._reading.wait()

    def end(self):
        self.ended = True


class Source:
    def __init__(self) -> None:
        self.server, self.taken, self.error = Server(), 0, None

    async def __call__(self) -> LiveState:
        self.taken += 1
        if self.error is not None:
            raise self.error
        return LiveState(self.server.step(), [worker(0)], {"model": "tiny"})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 (of things that tell nobody)
            await asyncio.sleep(0.005)


async def left(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_watchers_share_one_look_and_nothing_is_taken_while_nobody_watches():
    source, readers = Source(), [Reader() for _ in range(5)]
    watching = LiveEvents(source, every_s=0.01)
    assert source.taken == 0
    tasks = [asyncio.create_task(watching(reader)) for reader in readers]
    await until(lambda: all(len(reader.events) >= 3 for reader in readers))
    told = readers[0]
    assert (told.headers["Content-Type"], told.headers["Cache-Control"]) == ("text/event-stream", "no-store")
    assert source.taken <= max(len(reader.events) for reader in readers) + 2
    numbers = [look["totals"]["requests"] for _, look in told.events]
    assert numbers == sorted(numbers)
    assert told.events[0][1]["rates"] == {}, "nothing has been seen to move yet"
    assert told.events[2][1]["rates"]["requests"] > 0
    await left(*tasks)
    await until(lambda: len(asyncio.all_tasks()) == 1)
    taken, again = source.taken, Reader()
    task = asyncio.create_task(watching(again))
    await until(lambda: len(again.events) > 1)
    assert again.events[0][1]["rates"] == {}, "what went on unwatched has no rate"
    assert source.taken > taken
    await left(task)
    assert watching.watchers == 0


async def test_one_who_reads_slowly_misses_looks_and_holds_nobody_up():
    reading = asyncio.Event()
    slow, quick, watching = Reader(reading), Reader(), LiveEvents(Source(), every_s=0.01)
    tasks = [asyncio.create_task(watching(reader)) for reader in (slow, quick)]
    await until(lambda: len(quick.events) > 10)
    assert len(slow.events) == 1
    newest = quick.events[-1][1]["totals"]["requests"]
    reading.set()
    await until(lambda: len(slow.events) > 1)
    assert slow.events[1][1]["totals"]["requests"] >= newest
    await left(*tasks)


async def test_more_watchers_than_there_may_be_are_refused_and_a_server_that_closes_ends_its_streams():
    watching = LiveEvents(Source(), every_s=0.01, most=2)
    tasks = [asyncio.create_task(watching(Reader())) for _ in range(2)]
    await until(lambda: watching.watchers == 2)
    third, fourth, late = Reader(), Reader(), Reader()
    await watching(third)
    assert (third.status, third.headers) == (503, {"Retry-After": "5"})
    await left(tasks[0])
    task = asyncio.create_task(watching(fourth))
    await until(lambda: fourth.events)
    watching.close()
    await asyncio.wait_for(task, WITHIN_S)
    assert fourth.ended
    await watching(late)
    assert late.status == 503
    await left(*tasks)


async def test_what_cannot_be_seen_is_said_and_watched_again_and_a_fault_ends_the_stream():
    source, reader = Source(), Reader()
    source.error = GpuinferError("replica 2 is gone")
    watching = LiveEvents(source, every_s=0.01)
    task = asyncio.create_task(watching(reader))
    await until(lambda: reader.events)
    assert reader.events[0] == ("trouble", {"message": "replica 2 is gone"})
    source.error = None
    await until(lambda: reader.events[-1][0] == "look")
    await left(task)
    await until(lambda: len(asyncio.all_tasks()) == 1)
    source.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watching(Reader()), WITHIN_S)
    source.error, reader = None, Reader()
    task = asyncio.create_task(watching(reader))
    await until(lambda: reader.events)
    await left(task)


def test_counters_of_a_fleet_never_fall_whatever_becomes_of_its_replicas():
    lives, first, second = MonotonicCounters(), Server(1), Server(2)
    lives.saw(("0", "first"), first.step(requests=50))
    lives.saw(("1", "first"), second.step(requests=20))
    lives.only({("1", "first")})
    assert live_totals(lives.total())["requests"] == 70
    assert live_totals(lives.total())["output_tokens"] == 70 * 48
    lives.saw(("0", "second"), Server(3).step(requests=5))
    lives.saw(("1", "first"), second.step(requests=1))
    assert live_totals(lives.total())["requests"] == 76
    assert lives.total().device["tokens"] == {"input": 76 * 120, "output": 76 * 48}
    for life in (("0", "second"), ("1", "first"), ("1", "first"), "never seen"):
        lives.ended(life)
    total = lives.total()
    assert (total.requests, total.waiting, total.slots, total.rss_peak_mb) == (76, 0, 0, 0)
    assert "allocated_mb" not in total.device


def test_lanes_of_one_name_are_one_so_that_a_look_tells_their_shares():
    servers, lives = [Server(seed) for seed in range(3)], MonotonicCounters()
    for number, server in enumerate(servers):
        lives.saw(number, server.step(10.0))
    before = lives.total()
    assert [lane["name"] for lane in before.lanes] == ["forward 0", "prompts 0"]
    for number, server in enumerate(servers):
        lives.saw(number, server.step(10.0))
    shares = {place["station"]: place["share"] for place in live_view(lives.total(), before, 10.0)["places"]}
    assert shares["forward"] == pytest.approx(0.72, abs=0.05)


def test_rates_and_percentiles_are_those_of_the_time_between():
    server = Server()
    before, now = server.step(60.0, requests=10), server.step(2.0, requests=100)
    seen = live_view(now, before, 2.0)
    assert (seen["rates"]["requests"], seen["rates"]["output_tokens"]) == (50.0, 100 * 48 / 2)
    assert (seen["totals"]["requests"], seen["batches"]["slots"]) == (110, 32)
    assert sum(seen["batches"]["sizes"].values()) == sum(seen["batches"]["reasons"].values()) == 100
    shares = {place["station"]: place["share"] for place in seen["places"] if place["lane"] == "forward"}
    assert shares["forward"] == pytest.approx(0.72, abs=0.05)
    assert sum(shares.values()) == pytest.approx(1.0)
    early, late = Histogram(), Histogram()
    for histogram in (early, late):
        histogram.add(30.0)
    for seconds in (0.1, 0.2):
        late.add(seconds)
    times = live_view(Snapshot(latency=late.to_wire()), Snapshot(latency=early.to_wire()), 1.0)["latency_s"]
    assert (times["max"], times["mean"]) == (pytest.approx(0.2, rel=0.02), pytest.approx(0.15))
    sizes = live_view(Snapshot(batches={1: 5, 2: 1, 3: 2, 4: 3, 33: 1}), None, 1.0)["batches"]["sizes"]
    assert sizes == {"1": 5, "2": 1, "4": 5, "64": 1}, "by doublings"


def test_without_an_earlier_one_it_is_since_the_start_and_where_nothing_moved_there_are_no_figures():
    now = Server().step(10.0, requests=80)
    seen = live_view(now, None, 10.0)
    assert seen["rates"]["requests"] == 8.0
    assert seen["latency_s"]["p50"] == summarise(now.latency)["p50"]
    seen = live_view(now, now, 5.0)
    assert set(seen["rates"].values()) == {0.0}
    assert seen["latency_s"] == seen["first_token_s"] == seen["batches"]["sizes"] == {}
    assert live_view(now, now, 0.0)["rates"] == {}
    seen = live_view(Server(2).step(1.0, requests=3), now, 1.0)
    assert min(seen["rates"].values()) == 0.0, "counters that fell count as not moved"
    assert all(times > 0 for times in seen["batches"]["sizes"].values())
    assert all(0 <= place["share"] <= 1 for place in seen["places"])


def test_it_is_small_and_plain_whatever_names_there_are():
    long = "<img src=x onerror=alert(1)>" * 1000
    stations = {f"{number} {long}": 1.0 for number in range(500)}
    lanes, device = ({"name": f"{long} 0", "stations": stations},), {"name": long, "utilisation": object()}
    told = Server(model=long).snapshot(failure=long, notices=(long,) * 50, lanes=lanes, device=device)
    workers = [worker(number, url=long, last_event={"kind": long}) for number in range(3 * MOST_WORKERS)]
    seen = live_view(told, None, 1.0, workers, {"model": long, "odd": [long]})
    assert (len(seen["workers"]), len(seen["places"])) == (MOST_WORKERS, MOST_PLACES)
    assert len(json.dumps(seen, allow_nan=False)) < 1000 * MOST_WORKERS
    assert len(json.dumps(live_view(Server().step(), None, 1.0, [worker(0), worker(1)]))) < 2500


KINDS = {
    "/": "text/html",
    "/page.js": "text/javascript",
    "/page.css": "text/css",
    "/dashboard.json": "application/json",
}


def test_each_file_of_the_page_comes_with_its_type_and_the_policy_and_there_is_no_other():
    assert set(FILES) == set(KINDS)
    for path in FILES:
        body, kind, headers = asset(path)
        assert body
        assert kind.partition(";")[0] == KINDS[path]
        policy = dict(headers)["Content-Security-Policy"].split("; ")
        rules = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src data:")
        assert set(rules) <= set(policy)
        assert "unsafe" not in " ".join(policy)
    for path in ("/page.html", "/index.html", "", "/../page.js", "/page.js/", "/__init__.py"):
        assert asset(path) is None


def test_the_pages_files_fit_together_and_nothing_from_outside_becomes_html():
    html, script, style = (asset(path)[0].decode() for path in ("/", "/page.js", "/page.css"))
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", html) == []
    urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", html + script + style)
    assert set(urls) <= {"http://www.w3.org"}, "the names of XML's namespaces alone"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in script
    known = set(re.findall(r'id="([\w-]+)"', html))
    asked = re.findall(r'\bby\("([\w-]+)"\)', script) + re.findall(r'(?:facts|shares)\("([\w-]+)"', script)
    assert {*asked, *re.findall(r'aria-labelledby="([\w-]+)"', html)} <= known
