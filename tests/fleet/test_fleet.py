"""A whole fleet: router, stand-in replicas, control application, as a program of its own."""

from __future__ import annotations

import asyncio
import json
import signal

import psutil
import standins
from programs import ADMIN, all_gone, fleet, kill
from standin_replica import text

ASKED = {"prompt": "abc", "seed": 3}
SAID = text("abc", 3, 12)


def choice(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


async def test_requests_go_to_replicas_and_the_rest_to_the_supervisor(tmp_path):
    async with fleet(tmp_path, replicas=2) as it:
        answers = [await it.ask("POST", "/v1/completions", ASKED) for _ in range(20)]
        assert {choice(answer.body) for answer in answers} == {SAID}
        health = await it.json("GET", "/health", headers=())
        assert (health["server"], health["status"], health["healthy_workers"]) == ("gpuinfer", "ready", 2)
        stats = await it.json("GET", "/stats", headers=())
        assert (stats["total_workers"], stats["healthy_workers"]) == (2, 2)
        assert stats["total_requests"] >= 20
        assert sum(worker["requests_served"] for worker in stats["workers"]) == 20
        assert all(worker["requests_served"] > 0 for worker in stats["workers"])
        assert {"index", "url", "healthy", "requests_served", "errors", "in_flight"} <= stats["workers"][0].keys()
        merged = await standins.until(lambda: _counted(it, 20), "the replicas' own counters")
        assert merged["requests"] == 20
        metrics = (await it.ask("GET", "/metrics")).body.decode()
        assert 'gpuinfer_worker_up{worker="0"} 1.0' in metrics
        assert 'gpuinfer_worker_up{worker="1"} 1.0' in metrics
        page = await it.ask("GET", "/")
        assert page.headers["content-type"].startswith("text/html")


async def _counted(it, requests):
    stats = await it.json("GET", "/stats", headers=())
    return stats if stats["requests"] == requests else None


async def test_the_page_is_sent_looks_at_the_fleet(tmp_path):
    async with fleet(tmp_path) as it, it.client.stream("GET", "/events") as events:
        seen = b""
        async for part in events:
            seen += part
            if b"\n\n" in seen:
                break
        look = json.loads(seen.split(b"data: ")[1].split(b"\n")[0])
        assert look["workers"][0]["healthy"]
        assert look["about"]["model"] == "standin"


async def test_workers_come_and_go_by_the_admin_key(tmp_path):
    async with fleet(tmp_path) as it:
        for method, path in (("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/0")):
            assert (await it.ask(method, path)).status == 401
            assert (await it.ask(method, path, headers=[("Authorization", "Bearer wrong")])).status == 401
        added = await it.ask("POST", "/workers", {}, ADMIN)
        assert added.status == 201
        assert json.loads(added.body)["id"] == 1
        await standins.until(lambda: it.whole(2), "two workers up")
        assert (await it.ask("DELETE", "/workers/0", None, ADMIN)).status == 202
        workers = await standins.until(lambda: it.whole(1), "the leaving of the first")
        assert workers[0]["id"] == 1
        assert choice((await it.ask("POST", "/v1/completions", ASKED)).body) == SAID
        url = workers[0]["url"]
        for body, status in (
            (b"{", 400),
            ({"url": "http://user@h:1"}, 400),
            ({"url": url}, 400),
            ({"urls": 1}, 400),
            ({"url": 7}, 400),
        ):
            assert (await it.ask("POST", "/workers", body, ADMIN)).status == status
        for id in ("0", "7", "x", "-1", "1e9", "99999999999999999999"):
            assert (await it.ask("DELETE", f"/workers/{id}", None, ADMIN)).status == 404


async def test_the_control_socket_hears_nobody_but_the_router(tmp_path):
    from gpuinfer.http.client import Client

    async with fleet(tmp_path) as it:
        folder = json.loads((tmp_path / "ready.json").read_text())["folder"]
        client = Client("http://localhost", unix=f"{folder}/control.sock")
        assert (await client.request("GET", "/workers", headers=ADMIN)).status == 403
        await client.close()
        forged = [*ADMIN, ("X-Gpuinfer-Control-Key", "guess")]
        assert (await it.ask("GET", "/workers", headers=forged)).status == 200  # the router puts its own in place


async def test_a_fleet_of_which_no_replica_comes_up_ends_with_its_last_words(tmp_path):
    async with fleet(tmp_path, ready=False, replicas=2, standin={"dies": "no such checkpoint, alas"}) as it:
        assert await it.ended() == 1
        assert "none of 2 replicas came up" in it.log
        assert "no such checkpoint, alas" in it.log


async def test_a_port_in_use_is_said_before_anything_starts(tmp_path):
    (tmp_path / "other").mkdir()
    async with fleet(tmp_path) as it:
        port = int(it.url.rpartition(":")[2])
        async with fleet(tmp_path / "other", ready=False, port=port) as second:
            assert await second.ended() != 0
            assert str(port) in second.log
            assert "replica" not in second.log


async def test_sigterm_finishes_what_is_under_way_and_leaves_nothing_behind(tmp_path):
    async with fleet(tmp_path, replicas=2, standin={"answer_s": 1.0}) as it:
        family = it.family()
        assert len(family) == 3  # two replicas and a router process
        asked = [asyncio.create_task(it.ask("POST", "/v1/completions", ASKED)) for _ in range(8)]
        await standins.until(lambda: _under_way(it, 8), "eight requests under way")
        it.signal(signal.SIGTERM)
        assert [choice((await one).body) for one in asked] == [SAID] * 8
        assert await it.ended() == 0
        await all_gone(family)


async def _under_way(it, count):
    return sum(worker["in_flight"] for worker in await it.workers()) == count


async def test_a_second_signal_ends_at_once(tmp_path):
    async with fleet(tmp_path, standin={"answer_s": 600.0}) as it:
        family = it.family()
        asked = asyncio.create_task(it.ask("POST", "/v1/completions", ASKED))
        await standins.until(lambda: _under_way(it, 1), "a request under way")
        it.signal(signal.SIGINT)
        await standins.until(lambda: "finishing what is under way" in it.log, "its word")
        it.signal(signal.SIGINT)
        assert await it.ended() == 3
        await all_gone(family)
        await asyncio.wait({asked})
        assert asked.exception() is not None


async def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    async with fleet(tmp_path, replicas=2, router_processes=2) as it:
        family = it.family()
        assert len(family) == 4
        stopped = next(one for one in family if "standin_replica" in " ".join(one.cmdline()))
        stopped.suspend()  # nor one that is suspended
        it.signal(signal.SIGKILL)
        await all_gone(family)


async def test_a_replica_that_is_killed_takes_no_request_with_it(tmp_path):
    async with fleet(tmp_path, replicas=2, standin={"answer_s": 0.3}) as it:
        asked = [asyncio.create_task(it.ask("POST", "/v1/completions", ASKED)) for _ in range(8)]
        await standins.until(lambda: _under_way(it, 8), "eight requests under way")
        pid = (await it.workers())[0]["pid"]
        kill(pid, signal.SIGKILL)
        assert [choice((await one).body) for one in asked] == [SAID] * 8
        await standins.until(lambda: it.whole(2), "the pool is whole")
        assert not psutil.pid_exists(pid) or psutil.Process(pid).ppid() != it.process.pid


async def test_more_load_starts_replicas_and_less_ends_them(tmp_path):
    scaling = {"least": 1, "most": 2, "target": 2.0, "down_delay_s": 2.0}
    async with fleet(tmp_path, standin={"answer_s": 0.2}, scaling=scaling) as it:
        asking = asyncio.create_task(_ask_for_ever(it, 8))
        await standins.until(lambda: it.whole(2), "a second replica")
        asking.cancel()
        await asyncio.wait({asking})
        await standins.until(lambda: it.whole(1), "its leaving")
        decisions = (await it.json("GET", "/stats", headers=()))["scaling"]["decisions"]
        assert [(one["before"], one["after"]) for one in decisions] == [(1, 2), (2, 1)]
        assert "over the target" in decisions[0]["reason"]
        assert decisions[0]["reason"] in it.log


async def _ask_for_ever(it, at_once):
    async def one():
        while True:
            assert (await it.ask("POST", "/v1/completions", ASKED)).status == 200

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one())
