"""Self-play of a loop on nodes: a coordinator that lives as long as the loop, in a thread of its own, while training
and matches are commands of this machine.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from gpuinfer.cluster.coordinator import Coordinator
from gpuinfer.cluster.messages import Job
from gpuinfer.cluster.node_figures import ClusterFigures
from gpuinfer.cluster.node_processes import NodesPlan
from gpuinfer.division import Division
from gpuinfer.errors import WorkError
from gpuinfer.host import event_loop
from gpuinfer.host.files import put_whole
from gpuinfer.lab.loop.loop_division import LoopDivision
from gpuinfer.lab.loop.loop_runner import LoopPlan, LoopStep, Report, done_report

LOOK_S = 0.2  # between two polls for Ctrl-C while games are waited for
LEAVE_S = 60.0  # for nodes to send what they have finished, and to end


class ClusterGames:
    """`with` it, all games of the loop are played by nodes, which stay up over all iterations."""

    def __init__(
        self,
        plan: LoopPlan,
        records_of: Callable[[int], Division],
        settings: Callable[[], Mapping[str, Any]],
        job: Job,
        nodes: NodesPlan,
        max_staleness: int,
    ) -> None:
        self._plan, self._job, self._nodes = plan, job, nodes
        self._division = LoopDivision(plan, records_of, settings, max_staleness, self._played)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coordinator: Coordinator | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._before: set[int] = set()  # iterations whose games an earlier run has finished
        self._done: set[int] = set()  # iterations whose games were all kept since the start
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="gpuinfer nodes", daemon=True)

    def __enter__(self) -> Self:
        self._division.published = self._first_without_weights() - 1
        iterations = range(1, self._plan.iterations + 1)
        self._before = {one for one in iterations if done_report(self._plan.of(one) / "games.json") is not None}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(LEAVE_S)

    def _first_without_weights(self) -> int:
        """The first iteration whose weights may not play yet: its training or its gate is not done."""
        for iteration in range(1, self._plan.iterations + 1):
            kinds = [kind for kind in self._plan.kinds(iteration) if kind in ("training", "gate")]
            if any(done_report(self._plan.of(iteration) / f"{kind}.json") is None for kind in kinds):
                return iteration
        return self._plan.iterations + 1

    def step_ended(self, step: LoopStep) -> None:
        """Have nodes play with the weights of an iteration, once all that decides which these are is done."""
        last = "training" if self._plan.gate is None else "gate"
        if step.kind != last:
            return
        self._division.published = max(self._division.published, step.iteration)  # also for nodes that begin later
        if (loop := self._loop) is not None and not self._ended:
            loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        if self._coordinator is not None:
            self._coordinator.look_again()

    def games(self, step: LoopStep) -> Report | None:
        """Wait until all games of the step's iteration are kept. Its report; None where it was done before this loop
        began. Raises what ends the run of the nodes, and `KeyboardInterrupt` where it was stopped.
        """
        began = time.monotonic()
        if step.iteration in self._before:
            return None
        with self._changed:
            while step.iteration not in self._done:
                if self._error is not None:
                    raise self._error
                if self._ended:  # at its deadline
                    raise KeyboardInterrupt
                self._changed.wait(LOOK_S)
        report = {**(done_report(step.report) or {}), "waited_s": time.monotonic() - began}
        put_whole(step.report, lambda file: file.write(json.dumps(report, indent=2).encode()))
        return report

    def _played(self, iteration: int) -> None:
        with self._changed:
            self._done.add(iteration)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            event_loop.run(self._follow())
        except BaseException as error:  # noqa: BLE001 (the loop's own thread raises it)
            self._error = error if isinstance(error, Exception) else WorkError("the nodes' run was ended. Resume it.")
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        async def look_for_the_end() -> None:
            while not self._stopping.is_set():  # noqa: ASYNC110 (another thread sets it)
                await asyncio.sleep(LOOK_S)
            stopping.set()

        watching = asyncio.create_task(look_for_the_end())
        try:
            async with Coordinator(self._division, self._job, self._nodes, ClusterFigures(time.monotonic())) as one:
                self._coordinator = one
                one.look_again()  # what was published since it was opened
                await self._division.finish_kept()
                async for _ in one.follow(stopping):
                    pass
        finally:
            watching.cancel()
