"""The coordinator's requests, one by one, without a process of a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from urllib.parse import parse_qsl, urlsplit

import pytest

from cluster.numbers_workload import NumbersDivision
from gpuinfer.api import Setup
from gpuinfer.cluster import messages, node_processes
from gpuinfer.cluster import node as node_module
from gpuinfer.cluster.coordinator import Coordinator
from gpuinfer.cluster.messages import CoordinatorReply, Hello, Job, KeptReply, NodeMessage, Welcome
from gpuinfer.cluster.node import Node
from gpuinfer.cluster.node_figures import ClusterFigures
from gpuinfer.cluster.node_processes import NodesPlan
from gpuinfer.cluster.node_report import NodeMachine, NodeReport
from gpuinfer.config import registry
from gpuinfer.division import WorkRange
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http.client import HttpClient, HttpResponse, error_words
from gpuinfer.launchers.base import Launcher

JOB = Job(
    workload="numbers",
    options={},
    setup=Setup(),
    backend="inprocess",
    backend_options={},
    strategy="dynamic",
    strategy_options={},
)


class NoLauncher(Launcher):
    name = "nowhere"

    async def launch(self, plan):
        await asyncio.sleep(3600)


class FakeNode:
    """Says what a node says, as the test has it."""

    def __init__(self, coordinator, key=None):
        bearer = [("Authorization", f"Bearer {key or coordinator._processes.key}")]
        self.client = HttpClient(f"http://{coordinator.address}", headers=bearer, timeout_s=30)
        self.number, self.run, self.done, self.sequence = -1, "", 0, 0

    async def post(self, path, message, kind):
        response = await self.client.request("POST", path, message)
        return response.status, (
            messages.decode_message(response.body, kind)
            if response.status == 200
            else error_words(response.status, response.body)
        )

    async def join(self, version=None, index=None):
        hello = Hello(
            gpuinfer=version or registry.own_version(),
            host="here",
            pid=1,
            machine=NodeMachine(host="here", cores=1),
            index=index,
        )
        status, welcome = await self.post(messages.JOIN, messages.encode_message(hello), Welcome)
        if status == 200:
            self.number, self.run = welcome.node, welcome.run
        return status, welcome

    async def exchange(self, on_hand=0, **more):
        self.sequence = more.pop("sequence", self.sequence + 1)
        own = {"node": self.number, "run": self.run, "sequence": self.sequence}
        state = NodeMessage(done=self.done, on_hand=on_hand, **own, **more)
        return await self.post(messages.EXCHANGE, messages.encode_message(state), CoordinatorReply)

    async def send(self, start, stop, more=""):
        path = f"{messages.RECORDS}?node={self.number}&run={self.run}&start={start}&stop={stop}{more}"
        records = b"".join(b"%d\n" % number for number in range(start, stop))
        status, reply = await self.post(path, b"" if more else records, KeptReply)
        if status == 200 and reply.kept:
            self.done += stop - start
        return status, reply


@contextlib.asynccontextmanager
async def coordinated(tmp_path, total=100, **changes):
    plan = {"nodes": 1, **{name: changes.pop(name) for name in ("least", "deadline_s") if name in changes}}
    division = NumbersDivision(total, tmp_path / "out", **changes)
    figures = ClusterFigures(time.monotonic())
    async with Coordinator(division, JOB, NodesPlan(NoLauncher(), **plan), figures) as coordinator:
        node = FakeNode(coordinator)
        try:
            yield coordinator, node
        finally:
            with contextlib.suppress(Exception):
                await node.exchange(leaving=True)
            await node.client.close()


async def followed(coordinator, stopping=None):
    return [one async for one in coordinator.follow(stopping or asyncio.Event())]


def test_a_node_computes_all(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (coordinator, node):
            following = asyncio.create_task(followed(coordinator))
            _, welcome = await node.join()
            assert welcome.job.settings == {"multiplied_by": 1}
            assert welcome.job.folder == str(tmp_path / "out")
            while True:
                _, reply = await node.exchange()
                if reply.over:
                    break
                for work in reply.ranges:
                    assert await node.send(work.start, work.stop) == (200, KeptReply(kept=True))
            last = (await following)[-1]
            assert (last.done, last.total, last.unit) == (100, 100, "numbers")

    asyncio.run(main())
    assert (tmp_path / "out" / "all.txt").read_text().split() == [str(number) for number in range(100)]
    assert not (tmp_path / "out" / messages.RANGES_FOLDER).exists()


def test_records_that_came_before_do_not_count_again(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            _, reply = await node.exchange(parallel=10)
            work = reply.ranges[0]
            middle = work.start + 3
            assert (await node.send(work.start, middle))[1] == KeptReply(kept=True)
            assert (await node.send(work.start, middle))[1] == KeptReply(kept=False)
            # of a range that is kept in part, the rest may be sent alone
            assert (await node.send(work.start, work.stop))[1] == KeptReply(kept=False, missing=((middle, work.stop),))
            assert (await node.send(middle, work.stop))[1] == KeptReply(kept=True)

    asyncio.run(main())


def test_another_version_is_refused_with_the_cure(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            status, why = await node.join(version="99.1")
            assert status == 409
            assert "runs gpuinfer 99.1" in why
            assert why.endswith("Install the same on all machines.")

    asyncio.run(main())


def test_a_clock_that_differs_is_named(tmp_path, caplog):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            for _ in range(2):
                await node.exchange(report=NodeReport(clock_offset_s=-60.0))

    asyncio.run(main())
    assert caplog.text.count("60 s behind") == 1


def test_without_the_key_nobody_joins(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (coordinator, _):
            stranger = FakeNode(coordinator, key="guessed")
            status, _ = await stranger.join()
            await stranger.client.close()
            assert status == 401

    asyncio.run(main())


@pytest.mark.parametrize("name", ["../all.txt", "000000000000-000000000010.node-0/..", "all.txt", "%2e%2e%2fx"])
def test_a_file_outside_the_folder_of_ranges_is_no_record(tmp_path, name):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            _, reply = await node.exchange()
            status, why = await node.send(0, reply.ranges[0].stop, f"&file={name}")
            assert status == 409
            assert "no file of a range" in why

    asyncio.run(main())


def test_a_file_that_is_not_seen_is_to_be_sent(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            _, reply = await node.exchange()
            stop = reply.ranges[0].stop
            absent = f"&file=000000000000-{stop:012d}.node-0"
            assert (await node.send(0, stop, absent))[1] == KeptReply(kept=False, seen=False)
            assert (await node.send(0, stop))[1] == KeptReply(kept=True)

    asyncio.run(main())


def test_a_node_that_leaves_gives_back_what_it_had(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (coordinator, node):
            await node.join()
            _, reply = await node.exchange()
            await node.exchange(leaving=True)
            assert (await node.exchange())[0] == 410
            other = FakeNode(coordinator)
            await other.join()
            _, again = await other.exchange()
            assert again.ranges[0].start == reply.ranges[0].start
            await other.exchange(leaving=True)
            await other.client.close()

    asyncio.run(main())


def test_a_node_of_another_run_is_not_known(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            node.run = "another"
            status, why = await node.exchange()
            assert status == 410
            assert "another run" in why

    asyncio.run(main())


def test_the_run_waits_until_enough_nodes_have_joined(tmp_path):
    async def main():
        async with coordinated(tmp_path, least=2) as (coordinator, node):
            await node.join()
            _, reply = await node.exchange()
            assert reply.ranges == ()
            other = FakeNode(coordinator)
            await other.join()
            assert (await node.exchange())[1].ranges
            await other.exchange(leaving=True)
            await other.client.close()

    asyncio.run(main())


def test_a_full_disk_ends_the_run_and_keeps_what_was_kept(tmp_path):
    async def main():
        async with coordinated(tmp_path, full_at=1) as (coordinator, node):
            following = asyncio.create_task(followed(coordinator))
            await node.join()
            _, reply = await node.exchange()
            work = reply.ranges[0]
            await node.send(work.start, work.start + 1)
            assert (await node.send(work.start + 1, work.stop))[0] == 500
            assert (await node.exchange())[0] == 410
            with pytest.raises(WorkError, match="disk is full"):
                await following
            raise WorkError("the test's own way out")

    with pytest.raises(WorkError, match="the test's own way out"):
        asyncio.run(main())
    assert [one.name for one in (tmp_path / "out").glob("*.part")] == ["000000000-000000001.part"]


def test_a_deadline_stops_the_run_in_time(tmp_path):
    async def main():
        stopping = asyncio.Event()
        async with coordinated(tmp_path, deadline_s=0.001) as (coordinator, node):
            await node.join()
            following = asyncio.create_task(followed(coordinator, stopping))
            while not (reply := (await node.exchange())[1]).stop:
                pass
            assert reply.ranges == ()
            await node.exchange(leaving=True)
            await following
        assert stopping.is_set()

    asyncio.run(main())


def test_what_a_node_counted_stays_when_it_dies(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (coordinator, node):
            await node.join(index=0)
            await node.exchange(report=NodeReport(done=5, counts={"numbers": 5.0}, setup=False))
            again = FakeNode(coordinator)
            await again.join(index=0)  # started again before anyone has noticed
            assert (await node.exchange())[0] == 410
            await again.exchange(report=NodeReport(done=2, counts={"numbers": 2.0}, setup=False))
            assert coordinator.figures.accounts["0"].counts["numbers"] == 7
            await again.exchange(leaving=True)
            await again.client.close()

    asyncio.run(main())


def test_an_address_that_is_none_is_refused(tmp_path):
    async def main():
        division = NumbersDivision(5, tmp_path / "out")
        plan = NodesPlan(NoLauncher(), 1, address="host:port")
        async with Coordinator(division, JOB, plan, ClusterFigures(0.0)):
            pass

    with pytest.raises(UsageError, match=r"-L coordinator=host:port: .* Write HOST or HOST:PORT"):
        asyncio.run(main())
    assert not (tmp_path / "out" / messages.RANGES_FOLDER).exists()


def test_a_node_that_repeats_an_exchange_gets_the_same_ranges_again(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (_, node):
            await node.join()
            _, first = await node.exchange(parallel=10)
            _, again = await node.exchange(parallel=10, sequence=node.sequence)
            assert again == first
            assert first.ranges
            _, other = await node.exchange(parallel=10)
            assert {work.start for work in other.ranges}.isdisjoint(work.start for work in first.ranges)

    asyncio.run(main())


def test_a_node_that_waits_gets_at_once_what_another_one_releases(tmp_path):
    async def main():
        async with coordinated(tmp_path, total=10) as (coordinator, node):
            await node.join()
            held = []
            while sum(map(len, held)) < 10:
                held += (await node.exchange(parallel=10))[1].ranges
            other = FakeNode(coordinator)
            await other.join()
            waiting = asyncio.create_task(other.exchange(parallel=10))
            while not coordinator._waiting:  # an exchange that finds nothing waits for a second, and is made again
                if waiting.done():
                    assert (await waiting)[1].ranges == ()
                    waiting = asyncio.create_task(other.exchange(parallel=10))
                await asyncio.sleep(0.001)
            last = held[-1]
            await node.exchange(on_hand=0, released=((last.start, last.stop),))
            while not (given := (await waiting)[1].ranges):  # the wait had come to its end
                waiting = asyncio.create_task(other.exchange(parallel=10))
            assert given == (last,)
            await other.exchange(leaving=True)
            await other.client.close()

    asyncio.run(main())


class ThreadedDivision(NumbersDivision):
    """Keeps in a thread, when the test lets it."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.began, self.go_on, self.calls = threading.Event(), threading.Event(), []

    async def keep(self, work, records):
        await asyncio.to_thread(self._keep, work, records)

    def _keep(self, work, records):
        self.calls.append((work.start, work.stop))
        self.began.set()
        assert self.go_on.wait(60)
        self.kept.append((work.start, work.stop))

    async def close(self, complete):
        self.calls.append("close")
        assert self.calls == [*self.kept, "close"], "closed while records were being kept"


@contextlib.asynccontextmanager
async def keeping_in_a_thread(tmp_path):
    """A coordinator, and a connection by which records came that are being kept."""
    division = ThreadedDivision(100, tmp_path / "out")
    plan = NodesPlan(NoLauncher(), 1)
    async with Coordinator(division, JOB, plan, ClusterFigures(time.monotonic())) as coordinator:
        node = FakeNode(coordinator)
        try:
            await node.join()
            _, reply = await node.exchange(parallel=10)
            stop = reply.ranges[0].stop
            path = f"{messages.RECORDS}?node={node.number}&run={node.run}&start=0&stop={stop}"
            head = f"POST {path} HTTP/1.1\r\nHost: {coordinator.address}\r\nContent-Length: 2\r\n"
            host, port = coordinator.address.split(":")
            with socket.create_connection((host, int(port))) as connection:
                key = coordinator._processes.key
                connection.sendall(f"{head}Authorization: Bearer {key}\r\n\r\nok".encode())
                assert await asyncio.to_thread(division.began.wait, 60)
                yield coordinator, division, node, connection, stop
        finally:
            with contextlib.suppress(Exception):
                await node.exchange(leaving=True)
            await node.client.close()


def test_records_whose_connection_breaks_while_they_are_kept_are_kept_once(tmp_path):
    async def main():
        async with keeping_in_a_thread(tmp_path) as (coordinator, division, node, connection, stop):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
            connection.close()
            while not coordinator._endpoint.server.counts.get("cancelled"):  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.001)
            again = asyncio.create_task(node.send(0, stop))  # as the node does then
            await asyncio.sleep(0.05)
            division.go_on.set()
            assert await again == (200, KeptReply(kept=True))
            assert division.calls == [(0, stop)]
            assert coordinator.progress().done == stop

    asyncio.run(main())


def test_a_run_that_ends_waits_for_records_that_are_being_kept(tmp_path):
    async def main():
        async with keeping_in_a_thread(tmp_path) as (_, division, _, _, _):
            asyncio.get_running_loop().call_later(2.0, division.go_on.set)  # the server waits for a second
            raise WorkError("the run fails meanwhile")

    with pytest.raises(WorkError, match="the run fails meanwhile"):
        asyncio.run(main())


def test_records_that_cannot_be_kept_end_the_run_whatever_the_reason(tmp_path):
    async def main():
        async with coordinated(tmp_path) as (coordinator, node):
            (tmp_path / "out" / "000000000-000000001.tmp").mkdir()
            following = asyncio.create_task(followed(coordinator))
            await node.join()
            await node.exchange()
            assert (await node.send(0, 1))[0] == 500
            with pytest.raises(WorkError, match=r"numbers 0 to 0 cannot be kept .*Is a directory.*--resume"):
                await following
            raise WorkError("the test's own way out")

    with pytest.raises(WorkError, match="the test's own way out"):
        asyncio.run(main())


def test_a_node_that_waits_for_a_slow_disk_is_not_lost(tmp_path):
    async def main():
        async with keeping_in_a_thread(tmp_path) as (coordinator, division, node, _, _):
            waiting = asyncio.create_task(node.exchange(parallel=10))  # units cannot be read meanwhile
            while (answer := coordinator._nodes[node.number].answer) is None or answer.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            coordinator._look_for_lost(time.monotonic() + 100)
            division.go_on.set()
            status, reply = await waiting
            assert (status, bool(reply.ranges)) == (200, True)
            coordinator._look_for_lost(time.monotonic() + 101)
            assert (await node.exchange())[0] == 200
            coordinator._look_for_lost(time.monotonic() + 134)  # silent from here on
            assert (await node.exchange())[0] == 410

    asyncio.run(main())


def test_weights_lie_in_memory_in_pieces_however_slowly_nodes_take_them(tmp_path):
    weights = os.urandom(1 << 20) * 48
    (tmp_path / "weights").write_bytes(weights)

    class WithWeights(NumbersDivision):
        def weights(self, version):
            return tmp_path / "weights"

    async def main():
        division, figures = WithWeights(100, tmp_path / "out"), ClusterFigures(time.monotonic())
        async with Coordinator(division, JOB, NodesPlan(NoLauncher(), 1), figures) as coordinator:
            node = FakeNode(coordinator)
            host, port = coordinator.address.split(":")
            head = f"GET {messages.WEIGHTS}?version=1 HTTP/1.1\r\nHost: {coordinator.address}\r\n"
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall(f"{head}Authorization: Bearer {coordinator._processes.key}\r\n\r\n".encode())
                assert (await node.client.request("GET", f"{messages.WEIGHTS}?version=1")).body == weights
                assert await asyncio.to_thread(slow.recv, 12) == b"HTTP/1.1 200"
                waiting = [one.transport.get_write_buffer_size() for one in coordinator._endpoint.server._connections]
                assert sum(waiting) < 8 << 20
            await node.client.close()

    asyncio.run(main())


class BrokenLauncher(NoLauncher):
    async def launch(self, plan):
        raise ZeroDivisionError("of a plugin")


def test_a_launcher_that_raises_what_it_likes_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(node_processes, "PAUSE_S", 0.0)

    async def main():
        division = NumbersDivision(5, tmp_path / "out")
        plan = NodesPlan(BrokenLauncher(), 1)
        async with Coordinator(division, JOB, plan, ClusterFigures(0.0)) as coordinator:
            await followed(coordinator)

    with pytest.raises(WorkError, match=r"--launcher nowhere failed: ZeroDivisionError: of a plugin"):
        asyncio.run(main())


def test_a_range_with_too_many_bytes_for_a_message_is_sent_in_parts(monkeypatch):
    monkeypatch.setattr(node_module, "MESSAGE_BYTES", 10)
    sent = []

    class Client:
        async def post(self, path, body, timeout_s):
            query = dict(parse_qsl(urlsplit(path).query))
            sent.append((int(query["start"]), int(query["stop"]), body))
            return HttpResponse(200, [], messages.encode_message(KeptReply(kept=True)))

    class Packing:
        def pack_records(self, records):
            return b"".join(records)

    async def main():
        node = Node(Client())
        node._welcome = Welcome(node=0, run="run", clock=0.0, job=JOB)
        node._feed.add([WorkRange(3, 12)])
        await node._feed.take(9)
        sending = asyncio.create_task(node._send_on(Packing()))
        for number in range(3, 12):
            node._feed.done(number, b"%03d" % number if number != 7 else b"a large one of its own")
        while not node._feed.all_sent or not sent:
            await node._feed.change()
        sending.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert b"".join(body for _, _, body in sorted(sent)) == b"003004005006a large one of its own008009010011"
    assert [number for start, stop, _ in sorted(sent) for number in range(start, stop)] == list(range(3, 12))
    assert all(len(body) <= 10 or stop - start == 1 for start, stop, body in sent)
