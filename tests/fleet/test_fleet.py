"""A whole fleet: router, stand-in replicas, control application, as a program of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fleet_programs import ADMIN, LIMIT_S, Program, all_gone, fleet, standin, until, words_of
from killing import DIFFERENT, Load, drive, of_tiny
from ports import free_port
from standin_replica import text

from gpuinfer.fleet.folder import FleetFolder, PrivateFolder
from gpuinfer.http.client import HttpClient, Unreachable

ASKED = {"prompt": "abc", "seed": 3}
SAID = text("abc", 3, 12)


def choice(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Program]:
    """One for all tests that leave three replicas behind."""
    folder = tmp_path_factory.mktemp("shared")
    program = Program(standin(folder, replicas=3, standin={"answer_s": 0.02}, router_processes=2), folder)
    yield program
    program.end()


@contextlib.asynccontextmanager
async def whole(shared: Program) -> AsyncIterator[Program]:
    async with shared.asking() as it:
        await until(lambda: it.whole(3), "three workers up")
        yield it


async def test_requests_go_to_replicas_and_the_rest_to_the_supervisor(shared):
    async with whole(shared) as it:
        before = await it.json("/stats")
        answers = await asyncio.gather(*(it.ask("POST", "/v1/completions", ASKED) for _ in range(30)))  # all have some
        assert {choice(answer.body) for answer in answers} == {SAID}
        health = await it.json("/health")
        assert (health["server"], health["status"], health["healthy_workers"]) == ("gpuinfer", "ready", 3)
        stats = await it.json("/stats")
        assert (stats["total_workers"], stats["healthy_workers"]) == (3, 3)
        assert stats["total_requests"] - before["total_requests"] >= 30
        served, served_before = (sum(one["requests_served"] for one in told["workers"]) for told in (stats, before))
        assert served - served_before == 30
        assert all(worker["requests_served"] > 0 for worker in stats["workers"])
        assert {"index", "url", "healthy", "requests_served", "errors", "in_flight"} <= stats["workers"][0].keys()

        async def counted():
            return (await it.json("/stats"))["requests"] >= before["requests"] + 30

        await until(counted, "the replicas' own counters")
        metrics = (await it.ask("GET", "/metrics")).body.decode()
        for worker in stats["workers"]:
            assert f'gpuinfer_worker_up{{worker="{worker["id"]}"}} 1.0' in metrics
        page = await it.ask("GET", "/")
        assert page.headers["content-type"].startswith("text/html")
        async with it.client.stream("GET", "/events") as events:
            seen = b""
            async for part in events:
                seen += part
                if b"\n\n" in seen:
                    break
        look = json.loads(seen.split(b"data: ")[1].split(b"\n")[0])
        assert (look["workers"][0]["healthy"], look["about"]["model"]) == (True, "standin")


async def sent(port: int, data: bytes, *, no_more: bool = False) -> bytes:
    """All that is answered to this on a connection of its own, until the router closes it or the answer is whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if no_more:
        writer.write_eof()
    try:
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            return head + (await reader.read() if no_more or b"close" in head.lower() else b"")
    finally:
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the router was quicker
        await writer.wait_closed()


async def test_a_client_that_has_sent_everything_is_answered(shared):
    """As `nc -N`, some proxies and health checkers do: the connection is shut on their side, and they read."""
    async with whole(shared) as it:
        before = (await it.json("/stats"))["router"]["client_gone"]
        bodies = [("/v1/completions", {**ASKED, "stream": stream}) for stream in (False, True)]
        for path, body in [*bodies, ("/health", None), ("/stats", None)] * 5:
            data = json.dumps(body).encode() if body else b""
            head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
            said = await sent(it.told["port"], f"{head}\r\n\r\n".encode() + data, no_more=True)
            assert said.startswith(b"HTTP/1.1 200 OK\r\n")
            assert (b"data: [DONE]\n\n" in said) == bool(body and body["stream"])
        assert (await it.json("/stats"))["router"]["client_gone"] == before


async def test_workers_come_and_go_by_the_admin_key(shared):
    async with whole(shared) as it:
        for method, path in (("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/0")):
            assert (await it.ask(method, path)).status == 401
            assert (await it.ask(method, path, headers=[("Authorization", "Bearer wrong")])).status == 401
        oldest = (await it.workers())[0]["id"]
        added = await it.ask("POST", "/workers", {}, ADMIN)
        assert added.status == 201
        await until(lambda: it.whole(4), "four workers up")
        assert (await it.ask("DELETE", f"/workers/{oldest}", None, ADMIN)).status == 202
        workers = await until(lambda: it.whole(3), "the leaving of the first")
        assert [worker["id"] for worker in workers][-1] == json.loads(added.body)["id"]
        assert oldest not in [worker["id"] for worker in workers]
        assert choice((await it.ask("POST", "/v1/completions", ASKED)).body) == SAID
        for body in (b"{", {"url": "http://user@h:1"}, {"url": workers[0]["url"]}, {"urls": 1}, {"url": 7}):
            assert (await it.ask("POST", "/workers", body, ADMIN)).status == 400
        for id in (str(oldest), "777", "x", "-1", "1e9", "99999999999999999999"):
            assert (await it.ask("DELETE", f"/workers/{id}", None, ADMIN)).status == 404


async def test_the_control_socket_hears_nobody_but_the_router(shared):
    async with whole(shared) as it:
        client = HttpClient("http://localhost", unix=f"{it.told['folder']}/control.sock")
        assert (await client.request("GET", "/workers", headers=ADMIN)).status == 403
        await client.close()
        forged = [*ADMIN, ("X-Gpuinfer-Control-Key", "guess")]
        assert (await it.ask("GET", "/workers", headers=forged)).status == 200  # the router puts its own in place


async def test_replicas_that_are_killed_under_load_take_no_request_with_them(shared):
    async with whole(shared) as it:
        load = Load(it, 300, 16, 8, {number: text(f"question {number}", number, 8) for number in range(DIFFERENT)})
        loading = asyncio.create_task(load.run())
        for done, worker in ((40, 0), (120, 1)):
            await until(lambda done=done: load.done >= done or loading.done(), "some answers")
            os.kill((await it.workers())[worker]["pid"], signal.SIGKILL)
        await loading
        assert load.outcome.failed == []
        assert load.outcome.wrong == []
        assert (load.outcome.requests, load.outcome.streams) == (300, 100)
        await until(lambda: it.whole(3), "the pool is whole")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("given", [{"router_processes": 2}, {"queue": "global"}], ids=["two routers", "global queue"])
@pytest.mark.parametrize(("seed", "requests"), [(0, 1500), pytest.param(1, 5000, marks=pytest.mark.soak)])
async def test_no_request_is_lost_while_replicas_are_killed_suspended_and_ended_at_random(
    tmp_path, seed, requests, given
):
    async with fleet(tmp_path, replicas=3, standin={"answer_s": 0.05, "room": 4}, **given) as it:
        outcome = await drive(it, 3, requests, at_once=24, tokens=16, every_s=2.0, seed=seed)
        assert outcome.failed == []
        assert outcome.wrong == []
        assert sum(outcome.deeds.values()) > requests // 500
        assert outcome.counters["resumed"] > 0


@pytest.mark.thorough
async def test_ten_times_too_much_load_is_refused_in_time_and_forgotten(tmp_path):
    async with fleet(tmp_path, replicas=2, standin={"answer_s": 0.2, "limit": 4}) as it:
        fits, asked = 8, 80
        statuses: Counter[int] = Counter()
        retry_after: set[str | None] = set()
        most_mb = [0.0]
        until = asyncio.get_running_loop().time() + 8.0

        async def client() -> None:
            while asyncio.get_running_loop().time() < until:
                answer = await it.ask("POST", "/v1/completions", ASKED)
                statuses[answer.status] += 1
                if answer.status == 429:
                    retry_after.add(answer.headers.get("retry-after"))
                    await asyncio.sleep(0.05)

        async def watch() -> None:
            while True:
                most_mb[0] = max(most_mb[0], max(one.memory_info().rss for one in it.family()) / 2**20)
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(asked)))
        watching.cancel()
        assert statuses.keys() == {200, 429}
        assert statuses[200] >= fits  # those that fit were answered all the while
        assert retry_after == {"1"}
        assert most_mb[0] < 300
        answers = await asyncio.gather(*(it.ask("POST", "/v1/completions", ASKED) for _ in range(fits // 2)))
        assert {answer.status for answer in answers} == {200}
        assert (await it.json("/health"))["healthy_workers"] == 2


async def test_a_crowded_router_answers_health_checks_and_refuses_work(tmp_path):
    async with fleet(tmp_path, replicas=1, router_processes=1, connections=4) as it:
        await until(lambda: it.whole(1), "the replica")
        await it.client.close()  # whose connections count too

        async def answer(path: str) -> bytes:
            return await sent(it.told["port"], f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

        crowd = [await asyncio.open_connection("127.0.0.1", it.told["port"]) for _ in range(4)]
        for path, status in [("/health", b"200"), ("/v1/models", b"503"), ("/stats", b"503")] * 3:
            said = await answer(path)
            assert said[9:12] == status, path
            assert b"\r\nconnection: close\r\n" in said.lower()
            assert (b"too many connections" in said) == (status == b"503")
        for _, writer in crowd:
            await closed(writer)

        async def served():
            return (await answer("/stats"))[9:12] == b"200"

        await until(served, "room for others")


@pytest.mark.thorough
async def test_what_a_killed_supervisor_leaves_is_removed_by_the_next_fleet(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    async with fleet(tmp_path / "a") as killed, fleet(tmp_path / "b") as alive:
        folders = [Path(one.told["folder"]) for one in (killed, alive)]
        family = killed.family()
        killed.process.kill()
        assert await killed.ended() == -signal.SIGKILL
        await all_gone(family)
        assert (folders[0] / "admin.key").exists()
        (folders[0] / "replica-9.log").write_text("last words")
        async with fleet(tmp_path / "c") as following:
            assert [one.name for one in folders[0].iterdir()] == ["replica-9.log"]
            assert {"admin.key", "replica.key", "control.sock"} <= {one.name for one in folders[1].iterdir()}
            for one in (alive, following):
                assert choice((await one.ask("POST", "/v1/completions", ASKED)).body) == SAID
            following.process.send_signal(signal.SIGTERM)
            assert await following.ended() == 0
            assert following.told["folder"] not in [str(one) for one in folders[0].parent.iterdir()]
            following.told = {}
        assert folders[1].exists()


def test_a_folder_of_another_host_is_left_alone(tmp_path):
    ours, theirs = PrivateFolder(tmp_path), PrivateFolder(tmp_path)
    (theirs.path / "lock").write_text("another-host")
    theirs._lock.close()  # as if it had been killed
    ours._lock.close()
    PrivateFolder(tmp_path).remove()
    assert [one.name for one in tmp_path.iterdir()] == [theirs.path.name]


@pytest.mark.thorough
async def test_requests_wait_for_the_first_replica(tmp_path):
    port = free_port()
    async with fleet(tmp_path, ready=False, port=port, standin={"starts_s": 3.0}):
        client, refused = HttpClient(f"http://127.0.0.1:{port}"), 0

        async def asked():
            nonlocal refused
            with contextlib.suppress(Unreachable):  # the router itself is not there yet
                answer = await client.request("POST", "/v1/completions", json.dumps(ASKED).encode())
                refused += answer.status == 503  # after a quarter of a minute, on a machine that is slow to start one
                return None if answer.status == 503 else answer

        answer = await until(asked, "an answer")
        await client.close()
        assert (answer.status, choice(answer.body)) == (200, SAID)
        assert refused <= 4, "it does not wait"


async def test_a_fleet_of_which_no_replica_comes_up_ends_with_its_last_words(tmp_path):
    async with fleet(tmp_path, ready=False, replicas=2, standin={"dies": "no such checkpoint, alas"}) as it:
        assert await it.ended() == 1
        assert "none of 2 replicas came up" in it.log
        assert "no such checkpoint, alas" in it.log


@pytest.mark.parametrize("shared", [False, True], ids=["one folder", "the socket lies apart"])
def test_what_removes_old_files_finds_none_in_a_folder_that_is_touched(tmp_path, monkeypatch, shared):
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # a short path, as sockets want
    folder = FleetFolder(tmp_path if shared else None)
    control = folder.socket()
    assert (control.parent == folder.path) != shared
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(control))
    try:
        (folder.path / "replica-0.log").write_text("words")
        found = [one for place in {folder.path, control.parent} for one in (place, *place.iterdir())]
        assert len(found) == (8 if shared else 6)  # a folder and its lock, once or twice; two keys, the socket, a log
        for one in found:
            os.utime(one, (0, 0))
        assert folder.touch()
        assert all(one.stat().st_mtime > 0 < one.stat().st_atime for one in found)
        control.unlink()
        assert not folder.touch()
    finally:
        bound.close()
        folder.remove()
    assert not folder.touch()


@pytest.mark.thorough
async def test_a_fleet_whose_folder_is_removed_says_so_with_the_cure_and_still_answers(tmp_path):
    async with fleet(tmp_path) as it:
        shutil.rmtree(it.told["folder"])
        await until(lambda: "Start the fleet anew; TMPDIR=DIR" in it.log, "the loss is said")
        assert choice((await it.ask("POST", "/v1/completions", ASKED)).body) == SAID
        (replica,) = [one for one in it.family() if words_of(one, "standin_replica")]
        replica.kill()
        await until(lambda: "cannot be started: its log" in it.log, "the replica's failure is said")
        it.process.send_signal(signal.SIGTERM)
        assert await it.ended() == 0


async def test_sigterm_finishes_what_is_under_way_and_leaves_nothing_behind(tmp_path):
    async with fleet(tmp_path, replicas=2, standin={"answer_s": 3.0}) as it:
        family = it.family()
        assert len(family) == 3  # two replicas and a router process
        asked = [asyncio.create_task(it.ask("POST", "/v1/completions", ASKED)) for _ in range(8)]
        await under_way(it, 8)
        it.process.send_signal(signal.SIGTERM)
        assert [choice((await one).body) for one in asked] == [SAID] * 8
        assert await it.ended() == 0
        await all_gone(family)


async def under_way(it, count):
    async def reached():
        return sum(worker["in_flight"] for worker in await it.workers()) == count

    await until(reached, f"{count} requests under way")


@pytest.mark.thorough
async def test_a_second_signal_ends_at_once(tmp_path):
    async with fleet(tmp_path, standin={"answer_s": 600.0}) as it:
        family = it.family()
        asked = asyncio.create_task(it.ask("POST", "/v1/completions", ASKED))
        await under_way(it, 1)
        it.process.send_signal(signal.SIGINT)
        await until(lambda: "finishing what is under way" in it.log, "its word")
        it.process.send_signal(signal.SIGINT)
        assert await it.ended() == 3
        await all_gone(family)
        await asyncio.wait({asked})
        assert asked.exception() is not None


async def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    async with fleet(tmp_path, replicas=2, router_processes=2) as it:
        family = it.family()
        assert len(family) == 4
        stopped = next(one for one in family if words_of(one, "standin_replica"))
        stopped.suspend()  # nor one that is suspended
        it.process.kill()
        await all_gone(family)


@pytest.mark.thorough
async def test_more_load_starts_replicas_and_less_ends_them(tmp_path):
    scaling = {"least": 1, "most": 2, "target": 2.0, "down_delay_s": 2.0}
    async with fleet(tmp_path, standin={"answer_s": 0.2}, scaling=scaling) as it:

        async def ask_for_ever():
            while True:
                assert (await it.ask("POST", "/v1/completions", ASKED)).status == 200

        asking = [asyncio.create_task(ask_for_ever()) for _ in range(8)]
        await until(lambda: it.whole(2), "a second replica")
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
        await until(lambda: it.whole(1), "its leaving")
        decisions = (await it.json("/stats"))["scaling"]["decisions"]
        assert [(one["before"], one["after"]) for one in decisions] == [(1, 2), (2, 1)]
        assert "over the target" in decisions[0]["reason"]
        assert decisions[0]["reason"] in it.log


@pytest.mark.thorough
async def test_a_fleet_of_the_command_itself_answers_like_one_server_and_no_kill_takes_an_answer_along(tmp_path):
    def told(answer):
        assert answer.status == 200, answer.body
        found = json.loads(answer.body)
        return found["choices"][0]["text"] if "choices" in found else found["outputs"]

    async with of_tiny(tmp_path, 2, "a=tiny,b=tiny,net=blobnet-small") as it:
        completion = {"prompt": "Hello", "max_tokens": 64, "seed": 1, "ignore_eos": True}
        asked = [("/v1/completions", {**completion, "model": name}) for name in "ab"]
        asked.append(("/v1/evaluate", {"rows": [[0.5] * 256] * 2, "model": "net"}))
        before = [told(await it.ask("POST", *one)) for one in asked]
        answers = [await it.ask("POST", *asked[0]) for _ in range(64)]  # of equals any may be chosen
        assert {told(answer) for answer in answers} == {before[0]}
        assert len({answer.headers["x-gpuinfer-route"].split(";")[0] for answer in answers}) == 2
        document = await it.json("/openapi.json")
        assert {"/v1/completions", "/workers", "/workers/{id}", "/events"} <= document["paths"].keys()
        under_way = [asyncio.create_task(it.ask("POST", *one)) for one in asked for _ in range(8)]
        await asyncio.sleep(0.05)
        os.kill((await it.workers())[0]["pid"], signal.SIGKILL)
        assert [told(answer) for answer in await asyncio.gather(*under_way)] == [
            one for one in before for _ in range(8)
        ]
        await until(lambda: it.whole(2), "the pool is whole", within_s=180.0)
        assert [told(await it.ask("POST", *one)) for one in asked * 4] == before * 4
