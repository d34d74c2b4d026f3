"""The ways that are compared, run in turn: A B A B …, each repeat with arrivals and prompts that all ways share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuinfer.api import Progress, Setup
from gpuinfer.errors import GpuinferError, WorkError
from gpuinfer.http.client import HttpClient
from gpuinfer.lab.bench.measurement import LATENCY, Variant, reason
from gpuinfer.lab.bench.series import Measured, SeriesOutcome, SeriesPlan
from gpuinfer.lab.serve_bench import target_server
from gpuinfer.lab.serve_bench.load_generator import MOST_AT_ONCE, LoadGenerator, OfferedLoad
from gpuinfer.lab.serve_bench.load_summary import LoadRun, summarised
from gpuinfer.lab.serve_bench.requests import RequestSource, TextRequests
from gpuinfer.lab.serve_bench.target_server import TargetServer
from gpuinfer.launchers.local import COMMAND
from gpuinfer.report import report
from gpuinfer.runtime.run import RunPlan
from gpuinfer.stats import Histogram, Snapshot
from gpuinfer.units import number, short, whole


@dataclass(frozen=True)
class ServerVariant:
    """A server at a URL, or one that is started with these words for `gpuinfer serve`."""

    name: str
    load: OfferedLoad
    settings: Mapping[str, str] = field(default_factory=dict)  # those that tell it from the others
    url: str | None = None
    words: Sequence[str] = ()
    replicas: int = 1
    command: str = ""  # runs it by itself

    def variant(self) -> Variant:
        """As something to compare. It is no run of ours, so nothing builds it."""

        def build(seed: int) -> RunPlan:
            raise NotImplementedError(self.name)

        return Variant(self.name, build, self.settings, self.command)


MakeCalls = Callable[[TargetServer, str], RequestSource]
"""The requests for a target, from a seed. Raises `UsageError` for what it does not serve."""


@dataclass(frozen=True)
class LoadPlan:
    """What all ways do."""

    ways: Sequence[ServerVariant]
    calls: MakeCalls
    model: str | None = None  # what a server that runs calls the one that is asked; None: its first
    promised: Mapping[str, float] = field(default_factory=dict)
    key: str | None = None  # of the API
    calibrate: bool = True  # prompts are drawn, so that their words must be tokens
    command: Sequence[str] = COMMAND


class LoadSeries:
    """Runs every way as often as the course says. One that cannot run is left out and harms no other."""

    def __init__(
        self, plan: LoadPlan, series_plan: SeriesPlan, logs: Path, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.outcome = SeriesOutcome([way.variant() for way in plan.ways])
        self.summaries: list[dict[str, Any]] = []  # one for each of the outcome's runs
        self.calls: RequestSource | None = None  # of the last run
        self.sender: LoadGenerator | None = None  # at work, for those who watch
        self.doing = ""  # in words
        self._plan, self._course, self._logs, self._say = plan, series_plan, logs, say
        self._servers = 0

    async def run(self) -> SeriesOutcome:
        """All runs, or those until it is cancelled."""
        for repeat in range(self._course.repeats):
            for way in self._plan.ways:
                if way.name not in self.outcome.skipped and way.name not in self.outcome.failed:
                    await self._measure(way, repeat)
                if self.outcome.stopped:
                    return self.outcome
        return self.outcome

    async def _measure(self, way: ServerVariant, repeat: int) -> None:
        doing = f"repeat {repeat + 1} of {self._course.repeats}"
        self.doing = f"{way.name} · {doing}{'' if way.url else ' · starting the server'}"
        try:
            found = await self._turn(way, self._course.seed + repeat)
            self.outcome.stopped = found.stopped
            measured = self._measured(way, repeat, found)
        except GpuinferError as error:
            began = any(one.variant == way.name for one in self.outcome.runs)
            (self.outcome.failed if began else self.outcome.skipped)[way.name] = reason(error)
            if len(self._plan.ways) > 1:  # of one alone it is the command's own error
                self._say(f"{way.name} · {doing}: {reason(error)}")
            return
        self.outcome.runs.append(measured)
        figures = self.summaries[-1]
        parts = [f"{number(figures['requests_per_s'])} requests/s"]
        if figures["output_tokens_per_s"]:
            parts.append(f"{number(figures['output_tokens_per_s'])} tokens/s")
        parts.append(f"p50 {short(figures['e2e_s']['p50'])}, p99 {short(figures['e2e_s']['p99'])}")
        if failed := sum(figures["errors"].values()):
            parts.append(f"{whole(failed)} failed")
        self._say(f"{way.name} · {doing}: {' · '.join(parts)}")

    async def _turn(self, way: ServerVariant, seed: int) -> LoadRun:
        load = way.load
        at_once = load.concurrency + 2 if load.arrivals is None else MOST_AT_ONCE
        key = () if self._plan.key is None else (("Authorization", f"Bearer {self._plan.key}"),)
        async with AsyncExitStack() as ends:
            url = way.url
            if url is None:
                self._servers += 1
                server = target_server.serving(way.words, self._logs, self._servers, self._plan.command)
                url = await ends.enter_async_context(server)
            client = HttpClient(url, connections=at_once, timeout_s=load.timeout_s, headers=key)
            try:
                calls = self._plan.calls(
                    await target_server.look(client, self._plan.model if way.url else None), str(seed)
                )
                if isinstance(calls, TextRequests) and self._plan.calibrate:
                    calls = replace(calls, scale=await target_server.scale(client, calls))
                await target_server.ask(client, calls, -1)
                self.calls = calls
                self.doing = self.doing.removesuffix(" · starting the server")
                self.sender = LoadGenerator(client, calls, load, str(seed))
                return await self.sender.run()
            finally:
                self.sender = None
                await client.close()

    def _measured(self, way: ServerVariant, repeat: int, run: LoadRun) -> Measured:
        """Raises `WorkError` when nothing was answered."""
        figures = summarised(run, self._plan.promised)
        if not figures["answered"]:
            kinds = ", ".join(f"{kind} ({times})" for kind, times in figures["errors"].items())
            raise WorkError(f"no request was answered in {figures['seconds']:.1f} s{f': {kinds}' if kinds else ''}.")
        # Runs are compared by goodput where times are promised; of an open loop, which everybody who keeps up serves at
        # one rate, by the 95th percentile of the latency; else by tokens or requests per second.
        metric = "output_tokens_per_s" if figures["output_tokens_per_s"] else "requests_per_s"
        if figures["goodput_per_s"] is not None:
            metric = "goodput_per_s"
        elif way.load.arrivals is not None:
            metric = LATENCY
        value = figures["e2e_s"]["p95"] if metric == LATENCY else figures[metric]
        if not value:
            raise WorkError("no answer came to its end within the time that counts. Give it more: --duration 30s.")
        self.summaries.append(figures)
        made = load_report(way, figures, run, self._course.seed + repeat)
        return Measured(
            way.name, repeat, self._course.seed + repeat, metric, value, made, figures["requests_per_s"], True
        )


def load_report(way: ServerVariant, figures: Mapping[str, Any], run: LoadRun, seed: int) -> dict[str, Any]:
    """A report of as much as a client sees."""
    latency, first = Histogram(), Histogram()
    right = [one for one in run.records if one.error is None and one.due >= run.began]
    for one in right:
        latency.add(one.e2e_s)
        if (seconds := one.ttft_s) is not None:
            first.add(seconds)
    rates = ("output_tokens_per_s", "input_tokens_per_s")
    counts = {name.removesuffix("_per_s"): figures[name] * figures["seconds"] for name in rates if figures[name]}
    counts["requests"] = figures["requests_per_s"] * figures["seconds"]
    return report.build(
        report.Run(
            workload="serve",
            backend=way.url or "serve",
            strategy="none",
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            setup_s=0.0,
            wall_s=figures["seconds"],
            status="partial" if run.stopped else "done",
            setup=Setup(seed=seed),
            snapshot=Snapshot(latency=latency.to_wire(), first_token=first.to_wire()),
            progress=Progress(len(right), None, "requests", counts=counts),
            settings={**way.settings, "url": way.url, "words": list(way.words)},
        )
    )
