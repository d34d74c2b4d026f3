"""The coordinator of a divided run: hands out ranges to the nodes that ask, and keeps their records.

What is decided (who gets what, who is lost, which records count) is decided in `coordinator_core.py`, without a clock
and without I/O; here are the clock, the requests and the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from gpuinfer.api import Progress
from gpuinfer.cluster import messages
from gpuinfer.cluster.coordinator_core import CoordinatorCore
from gpuinfer.cluster.messages import CoordinatorReply, Hello, Job, KeptReply, NodeMessage, Welcome
from gpuinfer.cluster.node_endpoint import NodeEndpoint
from gpuinfer.cluster.node_entry import NodeEntry, UnknownNode
from gpuinfer.cluster.node_figures import ClusterFigures, RangeFigures
from gpuinfer.cluster.node_processes import NodeProcesses, NodesPlan
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.config import registry
from gpuinfer.division import Division, WorkRange
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import error_text
from gpuinfer.host.files import put_whole

LOOK_S = 0.25  # between two updates of the run
EXPIRE_S = 1.0  # between two searches for nodes that are lost
LEAVE_S = 20.0  # for nodes to send what they have finished, once the run is over or is to stop
WAIT_S = 10.0  # with fewer nodes than there must be, and none starting, before the run is abandoned
NODE_FILE = re.compile(r"\d{12,}-\d{12,}\.node-\d+")

log = logging.getLogger(__name__)


class Coordinator:
    """One divided run: `async with` it, and follow it. `job` is completed with what the division says once it is open.

    `figures` are those of all nodes. Belongs to one event loop.
    """

    def __init__(
        self, division: Division, job: Job, plan: NodesPlan, figures: ClusterFigures, policy: RangePolicy | None = None
    ) -> None:
        self._division, self._job, self._plan, self.figures = division, job, plan, figures
        self._policy = policy or RangePolicy(nodes=plan.nodes, least=division.least)
        self._run = secrets.token_hex(8)
        self._nodes: dict[int, NodeEntry] = {}
        self._core: CoordinatorCore
        self._processes = NodeProcesses(plan, self.fail)
        self._endpoint = NodeEndpoint(self, self._processes.key)
        self._disk = asyncio.Lock()  # one call of the division at a time
        self._news = asyncio.Event()
        self._waiting: dict[asyncio.Future[None], None] = {}  # exchanges of nodes for which there is nothing, in order
        self._keeping: dict[tuple[int, int, int], asyncio.Task[KeptReply]] = {}  # by node and range
        self._failure: Exception | None = None
        self._stopping = self._over = self._closed = False
        self._begun = False  # enough nodes have joined
        self._few_since: float | None = None  # since when there are fewer nodes than there must be
        self._refusals: set[str] = set()  # messages to nodes that could not join
        self._before = 0
        self._opened = time.monotonic()
        self.address = ""

    # Beginning and end

    async def __aenter__(self) -> Coordinator:
        async with contextlib.AsyncExitStack() as if_refused:
            kept = await asyncio.to_thread(self._division.open)
            if_refused.push_async_callback(self._division.close, False)
            self._before = sum(stop - start for start, stop in kept)
            self._core = CoordinatorCore(self._policy, total=self._division.total, kept=kept)
            self._core.open_until(self._division.open_until)
            self.figures.count_ranges = self._count_ranges
            folder = self._division.folder
            self._job = msgspec.structs.replace(
                self._job,
                settings=messages.as_json(self._division.settings),
                folder=None if folder is None else str(folder.absolute()),
            )
            if folder is not None:
                if_refused.callback(self._unmark_folder)
                await asyncio.to_thread(self._mark_folder, folder)
            self._processes.open()
            if_refused.push_async_callback(self._processes.close)
            self.address = await self._endpoint.listen(self._plan)
            if_refused.push_async_callback(self._endpoint.close)
            self._division.begin()
            self._processes.start(self.address)
            if_refused.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nodes that are still there are ended; what is kept is on the disk."""
        broken = error[0] is not None
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._close_division, broken)
            closing.callback(self._unmark_folder)
            closing.push_async_callback(self._endpoint.close)
            closing.push_async_callback(self._processes.close, broken)
            self._over = True
            self._processes.end()
            self._wake()
            if not broken:
                await self._until_left()

    async def _close_division(self, broken: bool) -> None:
        """After what it is doing: records that wait for it come too late."""
        async with self._disk:
            self._closed = True
            await self._division.close(not broken and self._core.over)

    def _mark_folder(self, folder: Path) -> None:
        """For nodes to see that it is this folder that they see."""
        own = folder / messages.RANGES_FOLDER
        own.mkdir(exist_ok=True)
        put_whole(own / self._run, lambda file: file.write(b"coordinator\n"))

    def _unmark_folder(self) -> None:
        """What is there counts only once it has been moved away."""
        if self._division.folder is None:
            return
        own = self._division.folder / messages.RANGES_FOLDER
        with contextlib.suppress(OSError):
            for one in own.iterdir():
                one.unlink()
            own.rmdir()

    async def _until_left(self) -> None:
        """Wait until all nodes that still speak have sent what they have finished and left, for `LEAVE_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while any(one.state == "joined" and not one.silent for one in self._nodes.values()):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._change()

    # The run

    async def follow(self, stopping: asyncio.Event) -> AsyncIterator[Progress]:
        """Until all units are kept, the run is to stop, or its deadline is near. Raises `WorkError` when it cannot
        go on: what is kept stays.
        """
        deadline = self._plan.deadline_s
        ends = None if deadline is None else self._opened + deadline - self._division.deadline_s - LEAVE_S
        last_look = 0.0
        while not self._core.over:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            if not self._stopping and (stopping.is_set() or (ends is not None and now > ends)):
                if not stopping.is_set():
                    log.warning("the deadline is near: stopping, and keeping what is finished. --resume goes on.")
                    stopping.set()
                self._stopping = True
                self._processes.end()
                self._wake()
            if self._stopping:
                await self._until_left()
                break
            if now > last_look + EXPIRE_S:
                last_look = now
                self._look_for_lost(now)
            yield self.progress()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    while not (self._core.over or self._failure or self._stopping):
                        await self._change()
        self.figures.ended(time.monotonic())
        async with self._disk:
            await self._division.flush()
        yield self.progress()

    def progress(self) -> Progress:
        waiting = not self._begun and self._joined
        return self.figures.progress(
            self._core.counts.kept,
            total=self._division.total,
            unit=self._division.unit,
            before=self._before,
            besides=self._division.progress,
            facts=self._division.facts(),
            note=f"{self._joined} of {self._plan.least} nodes have joined" if waiting else "",
        )

    def _count_ranges(self) -> RangeFigures:
        counts = self._core.counts
        return RangeFigures(
            **asdict(self._core.range_counts), duplicates=counts.duplicates, units=counts.kept - self._before
        )

    @property
    def _joined(self) -> int:
        return sum(one.state == "joined" for one in self._nodes.values())

    def _look_for_lost(self, now: float) -> None:
        for entry in self._nodes.values():
            if entry.answer is not None and not entry.answer.done():
                self._core.answering(entry.number, now)
        for lost in self._core.expire(now):
            entry = self._nodes[lost.node]
            entry.state, entry.reason = "lost", lost.reason
            self.figures.gone(lost.node, now, lost.reason, lost=True, since=lost.since)
            log.warning("%s is given up (%s): others compute what it had", entry.name, lost.reason)
            self._processes.lost(entry.hello.index)
            self._wake()
        least = self._plan.least
        if self._joined >= least or self._processes.alive() >= least:
            self._few_since = None
            return
        self._few_since = self._few_since or now
        if now > self._few_since + WAIT_S:
            first = self._processes.first_failure
            failures = "" if first is None else f" Of those that failed, the first says: {first}"
            raise WorkError(
                f"{self._joined} nodes are there, and --nodes-min {least} are needed. What is finished is kept: the "
                f"same command with --resume goes on.{failures}"
            )

    def fail(self, error: Exception) -> None:
        """The run cannot go on."""
        self._failure = self._failure or error
        self._wake()

    def look_again(self) -> None:
        """More units can be read than before (`Division.open_until`)."""
        self._core.open_until(self._division.open_until)
        self._wake()

    def _wake(self) -> None:
        """Something has changed for the run, or for all nodes."""
        self._news.set()
        while self._waiting:
            self._wake_one()

    def _wake_one(self) -> None:
        """There are units for a node that waits."""
        if self._waiting:
            waiting = next(iter(self._waiting))
            del self._waiting[waiting]
            if not waiting.done():
                waiting.set_result(None)

    async def _change(self) -> None:
        self._news.clear()
        await self._news.wait()

    # Requests of nodes

    def join(self, hello: Hello) -> Welcome:
        """Raises `UsageError` for a node of another version."""
        entry = NodeEntry(len(self._nodes), hello)
        if hello.gpuinfer != registry.own_version():
            why = UsageError(
                f"{entry.name} runs gpuinfer {hello.gpuinfer}, and the coordinator {registry.own_version()}: records "
                "of two versions must not be mixed. Install the same on all machines."
            )
            self._processes.refused(hello.index, why)
            if not self._plan.launcher.starts and str(why) not in self._refusals:
                self._refusals.add(str(why))  # once, however often others start it
                log.warning("%s", why)
            raise why
        now = time.monotonic()
        for other in self._nodes.values():  # the same process, started again before its end was noticed
            if hello.index is not None and other.hello.index == hello.index and other.state == "joined":
                self._leave(other, "left", "it was started again", now)
        self._nodes[entry.number] = entry
        self._core.join(entry.number, now, name=entry.name)
        self.figures.joined(entry.number, hello.machine, now, index=hello.index, version=hello.gpuinfer)
        if not self._begun and self._joined >= self._plan.least:
            self._begun = True
        self._wake()
        job = msgspec.structs.replace(
            self._job,
            total=self._division.total,
            roofline=self._job.roofline and self.figures.measures_roofline(entry.number),
        )
        return Welcome(node=entry.number, run=self._run, clock=time.time(), job=job)

    async def exchange(self, state: NodeMessage) -> CoordinatorReply:
        """Raises `UnknownNode`."""
        entry = self._entry(state.node, state.run)
        if entry.state != "joined":
            raise UnknownNode(f"{entry.name} was given up ({entry.reason or entry.state}). Start it again.")
        if entry.answer is None or state.sequence != entry.sequence:
            entry.sequence = state.sequence
            entry.answer = asyncio.ensure_future(self._exchange(entry, state))
        # A node that repeats an exchange has not had the reply: it gets the same one, with the ranges leased to it.
        return await asyncio.shield(entry.answer)

    async def _exchange(self, entry: NodeEntry, state: NodeMessage) -> CoordinatorReply:
        now = entry.heard_at = time.monotonic()
        if entry.sees_folder != state.sees_folder:
            log.info("%s sees %s, and writes its records there", entry.name, self._division.folder)
        entry.sees_folder = state.sees_folder
        self._core.heard(entry.number, now, state.done, state.on_hand, state.parallel)
        for start, stop in state.released:
            self._core.released(entry.number, start, stop)
        if state.released:
            self._wake_one()
        if state.report is not None:
            entry.compare_clock(state.report.clock_offset_s)
            self.figures.heard(entry.number, state.report, now)
        if state.done:
            self._processes.worked(entry.hello.index)
        if state.leaving:
            self._leave(entry, "failed" if state.failure else "left", state.failure, now)
            if state.refuses:
                self._processes.refused(entry.hello.index, UsageError(f"{entry.name}: {state.failure}"))
            return CoordinatorReply(over=True)
        return await self._reply(entry, state)

    async def _reply(self, entry: NodeEntry, state: NodeMessage) -> CoordinatorReply:
        """What the node is to do: at once, or when there is something, for `EXCHANGE_S` at most."""
        until = time.monotonic() + messages.EXCHANGE_S
        while True:
            if (total := self._division.total) is not None:
                self._core.expect(total)
            reply = CoordinatorReply(
                total=self._division.total,
                over=self._over or self._core.over,
                stop=self._stopping,
                use_folder=entry.sees_folder,
            )
            if reply.over or reply.stop or not self._begun or entry.state != "joined":
                return reply
            grant = self._core.grant(entry.number, time.monotonic())
            ranges, left = list(grant.ranges), grant.fresh
            if left:
                async with self._disk, self.figures.reading():
                    while left > 0 and (work := await self._division.read(left)):  # neither None nor empty
                        self._core.lease(entry.number, work, time.monotonic())
                        ranges.append(work)
                        left -= len(work)
                if left > 0 and work is None and self._division.total is not None:
                    self._core.ended_input(self._division.total)
            reply.ranges, reply.release = tuple(ranges), grant.release
            if grant.ranges and self._core.counts.pending:
                self._wake_one()
            wait_s = until - time.monotonic()
            if ranges or grant.release or state.on_hand or wait_s <= 0:
                return reply
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await waiting
            self._waiting.pop(waiting, None)

    async def keep(self, node: int, run: str, work: WorkRange, records: bytes | str) -> KeptReply:
        """`records`: the bytes, or the name of a file in the folder of ranges. Raises `UnknownNode`, `UsageError` for
        what is no such file, and `WorkError` where they cannot be kept.
        """
        entry, which = self._entry(node, run), (node, work.start, work.stop)
        if (keeping := self._keeping.get(which)) is None:
            # A task of its own: the connection may break, and the division is not to be left in the midst of it.
            place = records if isinstance(records, bytes) else self._file_of(records)
            keeping = asyncio.ensure_future(self._keep(entry, work, place))
            self._keeping[which] = keeping
            keeping.add_done_callback(functools.partial(self._was_kept, which))
        return await asyncio.shield(keeping)  # of a request that is repeated, the same reply

    def weights(self, version: str) -> Path:
        """The file of a version. Raises `UsageError`."""
        return self._division.weights(version)

    def _was_kept(self, which: tuple[int, int, int], keeping: asyncio.Task[KeptReply]) -> None:
        """Or not, which ends the run, also where no connection is left to hear of it."""
        del self._keeping[which]
        if not keeping.cancelled() and isinstance(error := keeping.exception(), WorkError):
            self.fail(error)

    async def _keep(self, entry: NodeEntry, work: WorkRange, records: bytes | Path) -> KeptReply:
        """Raises `WorkError`, also for what nobody has foreseen: the same records would come again and again."""
        start, stop = work.start, work.stop
        if isinstance(records, Path) and not await asyncio.to_thread(records.is_file):
            return KeptReply(kept=False, seen=False)
        now = time.monotonic()
        if not self._core.may_keep(entry.number, start, stop):
            if isinstance(records, Path):
                await asyncio.to_thread(records.unlink, missing_ok=True)
            return KeptReply(kept=False, missing=tuple(self._core.missing(start, stop)))
        try:
            async with self._disk, self.figures.keeping():
                if self._closed:
                    raise UnknownNode("the run has ended: its records are closed. Start it again with --resume.")
                await self._division.keep(work, records)
        except BaseException as error:
            self._core.not_kept(entry.number, start, stop)
            if not isinstance(error, Exception) or isinstance(error, WorkError | UnknownNode):
                raise
            raise WorkError(
                f"the records of {self._division.unit} {start} to {stop - 1} cannot be kept "
                f"({error_text.full_message(error)}). Mend that, then run again with --resume: what was kept before "
                "is whole."
            ) from error
        size = len(records) if isinstance(records, bytes) else 0
        self.figures.kept(entry.number, self._core.kept(entry.number, start, stop, now, size))
        self._processes.worked(entry.hello.index)
        if self._core.over:
            self._processes.end()  # at once: nodes that hear of it leave
            self.figures.ended(time.monotonic())
            self._wake()
        return KeptReply(kept=True)

    def _file_of(self, name: str) -> Path:
        folder = self._division.folder
        if folder is None or not NODE_FILE.fullmatch(name):
            raise UsageError("this is no file of a range. Let both ends run one version.")
        return folder / messages.RANGES_FOLDER / name

    def _entry(self, node: int, run: str) -> NodeEntry:
        if self._failure is not None:
            raise UnknownNode("the run has failed: see what the coordinator says.")
        if run != self._run or node not in self._nodes:
            raise UnknownNode("this coordinator has another run than the one that this node joined. Start it again.")
        return self._nodes[node]

    def _leave(self, entry: NodeEntry, state: str, reason: str, now: float) -> None:
        entry.state, entry.reason = state, reason
        self._core.leave(entry.number, now)
        self.figures.gone(entry.number, now, reason)
        if state == "failed":
            log.warning("%s cannot take part: %s", entry.name, reason)
        self._wake()
