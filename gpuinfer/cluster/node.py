"""A node: joins a coordinator, runs the job's workload as it is on this machine, and sends the records of its ranges.

It ends when there is nothing more to do, at a signal, when it cannot go on, and when the coordinator has not
answered for `patience_s`: then another coordinator, or a node in its place, does what it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from gpuinfer.api import Backend, Infer, ModelSpec, Plugin, Progress, Setup, Strategy, Workload
from gpuinfer.cluster import messages
from gpuinfer.cluster.messages import CoordinatorReply, Hello, Job, KeptReply, NodeMessage, Welcome
from gpuinfer.cluster.node_feed import FinishedRange, NodeFeed
from gpuinfer.cluster.node_meter import NodeMeter
from gpuinfer.cluster.node_report import NodeMachine
from gpuinfer.config import blame, registry
from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.host import error_text, event_loop
from gpuinfer.host.files import differences, put_whole
from gpuinfer.http.client import ClientError, HttpClient, HttpResponse, error_words
from gpuinfer.runtime.run import RunHandle, RunUpdate, execute

ANSWER_S = 20.0  # for the coordinator to answer an exchange
LEAVE_S = 5.0  # to hear that this node leaves: the coordinator may have ended by then
RECORDS_S = 600.0  # to take the records of a range
SHORTEST_S = 0.05  # between two exchanges
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two tries
MESSAGE_BYTES = messages.RECORDS_BYTES // 4  # ranges with more are sent in halves
SENDERS = 2  # ranges that are sent at once
GONE, REFUSED = 410, 409  # statuses: this node is not known any more; it cannot join

log = logging.getLogger(__name__)


class NodeWorkload(Workload):
    """The job's workload, with its units from a feed."""

    def __init__(self, inner: Workload, feed: NodeFeed, job: Job, ended: Any, use_version: Any) -> None:
        self.inner, self._feed, self._job, self._ended, self._use_version = inner, feed, job, ended, use_version
        self.setup, self.options = inner.setup, inner.options
        self.prepares = inner.prepares  # type: ignore[misc]
        self.max_failures = 1.0  # type: ignore[misc]  # the coordinator judges

    @property
    def acts_for(self) -> type[Plugin] | None:
        return type(self.inner)

    def model(self) -> ModelSpec | None:
        return self.inner.model()

    @property
    def asks(self) -> bool:
        return self.inner.asks

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def deterministic(self) -> bool:
        return self.inner.deterministic

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        """Raises `UsageError` where this machine would compute other records than the coordinator means."""
        deciding = dict(await asyncio.to_thread(self.inner.deciding, infer.arithmetic))
        if changed := differences(self._job.settings, messages.as_json(deciding)):
            raise UsageError(
                f"this node would compute something else than the run ({changed}). Give it the same files and packages "
                "as the machine of the coordinator."
            )
        self._feed.use_version = functools.partial(self._use_version, infer)
        progress: Progress | None = None
        async for progress in self.inner.run_ranges(infer, self._feed):
            yield progress
        self._feed.split_off_done()
        await self._ended(progress, await infer.counted())


def made_of(job: Job, setup: Setup) -> tuple[Workload, Backend, Strategy]:
    """The plugins of the job, as they are on this machine. Raises `UsageError` and `ValidationError`."""
    workload = blame.make(registry.load("workloads", job.workload), setup, dict(job.options))
    setup = blame.completed_setup(workload, setup)
    backend = blame.make(registry.load("backends", job.backend), setup, dict(job.backend_options))
    strategy = blame.make(registry.load("strategies", job.strategy), setup, dict(job.strategy_options))
    return workload, backend, strategy


class NodeClient:
    """Requests to the coordinator, repeated for `patience_s` while it does not answer."""

    def __init__(self, url: str, key: str, patience_s: float) -> None:
        self.url, self._patience_s = url, patience_s
        bearer = [("Authorization", f"Bearer {key}"), ("Content-Type", messages.MSGPACK)]
        self._client = HttpClient(url, connections=2 + SENDERS, timeout_s=ANSWER_S, headers=bearer)

    async def post(self, path: str, body: bytes, timeout_s: float = ANSWER_S) -> HttpResponse:
        """As `request`."""
        return await self.request("POST", path, body, timeout_s)

    async def request(self, method: str, path: str, body: bytes = b"", timeout_s: float = ANSWER_S) -> HttpResponse:
        """Raises `UsageError` for what is refused, `WorkError` where this node is not wanted or nothing answers."""
        until, pause_s = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                response = await self._client.request(method, path, body, timeout_s=timeout_s)
            except ClientError as error:
                why = str(error)
            else:
                if response.status == 200:
                    return response
                why = error_words(response.status, response.body)
                if response.status == GONE:
                    raise WorkError(why)
                if response.status == 401:
                    raise UsageError(
                        f"the coordinator at {self.url} has another key than this node. Give --key-file the file that "
                        "it names at its start: each run has a new key."
                    )
                if response.status < 500:
                    raise UsageError(why)
            if time.monotonic() > until:
                raise WorkError(
                    f"the coordinator at {self.url} has not answered for {self._patience_s:g} s: {why} Start it again "
                    "with --resume, and its launcher starts nodes anew; or start this node again."
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        await self._client.close()


class Node:
    """One run of a node, on an event loop of its own."""

    def __init__(self, client: NodeClient, index: int | None = None, attempt: int = 0) -> None:
        self._client, self._index, self._attempt = client, index, attempt
        self._feed = NodeFeed(self._call_soon)
        self._meter = NodeMeter()
        self._handle = RunHandle()
        self._welcome: Welcome
        self._soon = asyncio.Event()  # the next exchange should not wait
        self._released: list[tuple[int, int]] = []
        self._sequence = 0
        self._sees_folder = self._use_folder = False
        self._failure: BaseException | None = None
        self._left = False
        self._folder: Path  # for weights, while it runs

    @property
    def summary(self) -> str:
        """What it has done, for people."""
        return f"{self._feed.done_units:,} units done in the run of {self._client.url}"

    async def run(self) -> None:
        """Raises `UsageError` where this node cannot take part, `WorkError` where it has to give up."""
        hello = Hello(
            gpuinfer=registry.own_version(),
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=NodeMachine.here(),
            index=self._index,
            attempt=self._attempt,
        )
        response = await self._client.post(messages.JOIN, messages.encode_message(hello))
        self._welcome = messages.decode_message(response.body, Welcome)
        self._meter.clock_offset_s = time.time() - self._welcome.clock
        try:
            with tempfile.TemporaryDirectory(prefix="gpuinfer-node-") as folder:
                self._folder = Path(folder)
                await self._run(self._welcome.job)
        except BaseException as error:
            why = _in_words(error)
            await self._leave(why, isinstance(error, UsageError))
            raise
        await self._leave()

    async def _run(self, job: Job) -> None:
        registry.switch_off(job.disabled_plugins)
        self._feed.total, self._feed.settings = job.total, job.settings
        workload, backend, strategy = await asyncio.to_thread(made_of, job, job.setup)
        if job.folder is not None:
            self._sees_folder = await asyncio.to_thread(self._probe, Path(job.folder))
        tasks = [asyncio.create_task(self._exchange_on())]
        tasks += [asyncio.create_task(self._send_on(workload)) for _ in range(SENDERS)]
        for task in tasks:
            task.add_done_callback(self._watch)
        try:
            await execute(
                NodeWorkload(workload, self._feed, job, self._ended, self._use_weights),
                backend,
                strategy,
                settings={"workload": job.workload, "backend": job.backend, "strategy": job.strategy},
                roofline=job.roofline,
                on_update=self._look,
                handle=self._handle,
            )
        except BaseException as error:
            if self._failure is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
                raise self._failure from error
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self._failure is not None:
            raise self._failure

    def _probe(self, folder: Path) -> bool:
        """Whether the folder is the coordinator's, and this node can write there."""
        own = folder / messages.RANGES_FOLDER
        with contextlib.suppress(OSError):
            if (own / self._welcome.run).is_file():
                put_whole(own / f"node-{self._welcome.node}.probe", lambda file: file.write(b"seen\n"))
                return True
        return False

    def _look(self, update: RunUpdate) -> None:
        self._meter.look(update)

    async def _use_weights(self, infer: Infer, version: str) -> None:
        """Have the backend answer with the weights of this version, which come from the coordinator."""
        path = f"{messages.WEIGHTS}?{urlencode({'version': version})}"
        response = await self._client.request("GET", path, timeout_s=RECORDS_S)
        place = self._folder / f"weights-{version}.safetensors"
        await asyncio.to_thread(put_whole, place, functools.partial(_write, response.body))
        await infer.update(version, str(place))
        for other in self._folder.glob("weights-*"):
            if other != place:  # a server that is brought back reads its last ones again
                other.unlink(missing_ok=True)

    async def _ended(self, progress: Progress | None, counted: Any) -> None:
        """The workload has ended: send what is left, before the backend is closed and the roofline measured again."""
        self._meter.last(progress, counted)
        while not self._feed.all_sent and self._failure is None:
            await self._feed.change()
        if self._failure is None:
            await self._leave()

    # The coordinator

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A task of ours that fails ends the run."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or error
        self._feed.give_up()
        self._handle.hurry()

    def _call_soon(self) -> None:
        self._soon.set()

    def _state(self, **more: Any) -> NodeMessage:
        released, self._released = tuple(self._released), []
        self._sequence += 1
        return NodeMessage(
            sequence=self._sequence,
            node=self._welcome.node,
            run=self._welcome.run,
            done=self._feed.done_units,
            on_hand=self._feed.on_hand,
            parallel=self._feed.parallel,
            released=released,
            sees_folder=self._sees_folder,
            report=self._meter.report(self._feed),
            **more,
        )

    async def _exchange_on(self) -> None:
        pause_s = SHORTEST_S
        while not self._left:
            self._soon.clear()
            response = await self._client.post(messages.EXCHANGE, messages.encode_message(self._state()))
            reply: CoordinatorReply = messages.decode_message(response.body, CoordinatorReply)
            got = self._apply(reply)
            pause_s = SHORTEST_S if got else min(messages.EXCHANGE_S, 2 * pause_s)
            hungry = not self._feed.on_hand and not reply.over
            wait_s = pause_s if hungry or self._released else messages.EXCHANGE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await asyncio.sleep(SHORTEST_S)
                    await self._soon.wait()

    def _apply(self, reply: CoordinatorReply) -> bool:
        """Whether there is more to do than before."""
        self._use_folder = reply.use_folder and self._sees_folder
        self._feed.total = reply.total
        if reply.ranges:
            self._feed.add(reply.ranges)
        if reply.release:
            self._released += self._feed.release(reply.release)
        if reply.stop:
            self._feed.give_up()
            self._handle.stop()
        elif reply.over:
            self._feed.end()
            if self._feed.unfinished:  # others have computed the same, and it counts no more
                self._handle.hurry()
        return bool(reply.ranges or reply.release)

    async def _leave(self, failure: str = "", refuses: bool = False) -> None:
        if self._left:
            return
        self._left = True
        with contextlib.suppress(WorkError, UsageError, TimeoutError):  # it is gone, or knows
            async with asyncio.timeout(LEAVE_S):
                await self._client.post(
                    messages.EXCHANGE,
                    messages.encode_message(self._state(leaving=True, failure=failure, refuses=refuses)),
                )

    # Records

    async def _send_on(self, workload: Workload) -> None:
        while True:
            finished = await self._feed.next_finished()
            records = await asyncio.to_thread(workload.pack_records, finished.records)
            began = time.monotonic()
            if (reply := await self._send(finished, records)) is None:
                work = finished.work
                middle = (work.start + work.stop) // 2
                self._feed.send_again(finished, ((work.start, middle), (middle, work.stop)))
            else:
                self._meter.sent(len(records), time.monotonic() - began, self._use_folder)
                if not reply.kept:  # another node was first, with some of it at least
                    self._feed.send_again(finished, reply.missing)
            self._feed.sent()

    async def _send(self, finished: FinishedRange, records: bytes) -> KeptReply | None:
        """None: they are too many bytes for one message."""
        work, folder = finished.work, self._welcome.job.folder
        query = {"node": self._welcome.node, "run": self._welcome.run, "start": work.start, "stop": work.stop}
        if self._use_folder and folder is not None and records:
            name = f"{work.start:012d}-{work.stop:012d}.node-{self._welcome.node}"
            place = Path(folder) / messages.RANGES_FOLDER / name
            if await self._written(place, records):
                response = await self._client.post(
                    f"{messages.RECORDS}?{urlencode({**query, 'file': name})}", b"", RECORDS_S
                )
                reply: KeptReply = messages.decode_message(response.body, KeptReply)
                if reply.seen:
                    return reply
                place.unlink(missing_ok=True)
        if len(records) > MESSAGE_BYTES and len(work) > 1:  # a first range: how large records are was not known
            return None
        response = await self._client.post(f"{messages.RECORDS}?{urlencode(query)}", records, RECORDS_S)
        kept: KeptReply = messages.decode_message(response.body, KeptReply)
        return kept

    async def _written(self, place: Path, records: bytes) -> bool:
        """Whether the records lie there. Where this node cannot write, they go over the wire from now on, and the
        coordinator sees for itself whether the disk is full.
        """
        try:
            await asyncio.to_thread(put_whole, place, functools.partial(_write, records))
        except OSError as error:
            log.warning("%s cannot be written: %s. Records go over the wire.", place, error.strerror)
            self._sees_folder = self._use_folder = False
            return False
        return True


def _write(records: bytes, file: Any) -> None:
    file.write(records)


def run_node(url: str, key: str, patience_s: float, index: int | None = None, attempt: int = 0) -> str:
    """One run of a node, in this process; what to say at its end. Raises as `Node.run`."""

    async def run() -> str:
        client = NodeClient(url, key, patience_s)
        try:
            node = Node(client, index, attempt)
            await node.run()
            return node.summary
        finally:
            await client.close()

    return event_loop.run(run())


def _in_words(error: BaseException) -> str:
    """Why a node leaves, for the coordinator's people."""
    if isinstance(error, GpuinferError):
        return error_text.safe_str(error)
    return error_text.full_message(error) if isinstance(error, Exception) else "it was ended"
