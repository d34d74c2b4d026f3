"""What a session in a program can say of itself at any time: figures, the report, the verdict, and a live view."""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Progress, Roofline, Setup
from gpuinfer.host import cpu_contention
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.library.choices import python_words
from gpuinfer.stats import Snapshot

if TYPE_CHECKING:
    from gpuinfer.runtime.run import RunUpdate

LOOK_S = 0.25  # between two looks of a live view


@dataclass(frozen=True, repr=False)
class SessionVerdict:
    """What holds a session back, and what to change. `str` is the panel of the terminal; a notebook shows HTML."""

    report: Mapping[str, Any]

    @property
    def why(self) -> str:
        """The cause, in a sentence."""
        return python_words(str(self.report["bottleneck"]["why"]))

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to mend."""
        return bool(self.report["bottleneck"]["healthy"])

    @property
    def advice(self) -> str:
        """What to do about it, in a sentence."""
        return python_words(str(self.report["bottleneck"]["advice"]))

    @property
    def change(self) -> str:
        """The keyword argument that `advice` means; empty where it is none."""
        change = self.report["bottleneck"].get("change")
        if not change:
            return ""
        words = f"{change['name']}={change['value']!r}"
        if change["flag"] == "-S":
            return f"strategy=gpuinfer.{self.report['strategy'].capitalize()}({words})"
        return words

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join(f"{label:<12} {text}" for label, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        from gpuinfer.cli.screen.final_panel import panel_rows

        for row in panel_rows(self.report):
            text = self.change if row.tone == "command" and self.change else python_words(row.text)
            for number, line in enumerate(text.split("\n")):
                yield ("" if number else row.name), line

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for label, text in self._lines()
        )
        return f"<table>{rows}</table>"


@dataclass
class SessionClock:
    """What of a session is no counter: when it started, and who has used the cores since."""

    workload: str
    backend: str
    strategy: str
    setup: Setup
    settings: Mapping[str, Any] = field(default_factory=dict)
    made: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    began: float | None = None  # once the backend is ready
    ended: float | None = None
    cores_from: CoreTime | None = None
    roofline: Roofline | None = None

    def begin(self) -> None:
        """The backend is ready: what comes now is work."""
        if self.began is None:
            self.began, self.cores_from = time.monotonic(), cpu_contention.core_time()

    def end(self) -> None:
        if self.ended is None:
            self.ended = time.monotonic()

    @property
    def wall_s(self) -> float:
        return 0.0 if self.began is None else (self.ended or time.monotonic()) - self.began

    @property
    def setup_s(self) -> float:
        return (self.began or self.ended or time.monotonic()) - self.made

    def cores(self) -> CoreTime | None:
        """Who has used the cores since the work began; None where the system does not say."""
        now = cpu_contention.core_time()
        return now.since(self.cores_from) if now is not None and self.cores_from is not None else None


class SessionFigures:
    """Figures of a session: `stats`, `report`, `verdict`, `live`. Any thread may ask, also once it is closed."""

    _clock: SessionClock

    def _snapshot(self) -> Snapshot:
        """The counters until now; the last ones of a session that is closed."""
        raise NotImplementedError

    def _progress(self, snapshot: Snapshot) -> Progress:
        """How far the work has come."""
        return Progress(snapshot.rows, unit="rows")

    def stats(self) -> dict[str, Any]:
        """The figures until now: how much is done, rates, batches, latency and queue wait in seconds, errors."""
        report = self.report()
        chosen = ("wall_s", "progress", "throughput", "batches", "latency_s", "queue_wait_s", "errors", "device")
        return {name: report[name] for name in chosen}

    def report(self) -> dict[str, Any]:
        """All that was measured, as `--json` of a command writes it (`gpuinfer docs report`)."""
        from gpuinfer.report import report

        clock, snapshot = self._clock, self._snapshot()
        return report.build(
            report.Run(
                workload=clock.workload,
                backend=clock.backend,
                strategy=clock.strategy,
                started_at=clock.started_at,
                setup_s=clock.setup_s,
                wall_s=clock.wall_s,
                status="done",
                setup=clock.setup,
                snapshot=snapshot,
                progress=self._progress(snapshot),
                roofline=clock.roofline,
                cores=clock.cores(),
                settings=clock.settings,
                command=f"gpuinfer {clock.workload}",
            )
        )

    def verdict(self) -> SessionVerdict:
        """Where the time went, what holds the session back, and what to change."""
        return SessionVerdict(self.report())

    @contextlib.contextmanager
    def live(self, title: str = "") -> Iterator[None]:
        """A live view in the terminal while the body runs; plain lines where there is no terminal."""
        from gpuinfer.cli.screen.display import Display

        clock = self._clock
        over = threading.Event()
        with Display(title or f"{clock.workload} · {clock.backend} · {clock.strategy}") as display:

            def watch() -> None:
                while not over.wait(LOOK_S):
                    display.update(self._update())

            thread = threading.Thread(target=watch, name="gpuinfer live view", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(5.0)

    def _update(self) -> RunUpdate:
        from gpuinfer.report.report_sections import core_shares
        from gpuinfer.runtime.run import RunUpdate

        clock, snapshot = self._clock, self._snapshot()
        wall_s = clock.wall_s
        cores = core_shares(snapshot, wall_s, clock.cores()) if wall_s else None
        phase = "running" if wall_s else "starting"
        return RunUpdate(self._progress(snapshot), snapshot, wall_s, clock.setup_s, phase, clock.roofline, cores)
