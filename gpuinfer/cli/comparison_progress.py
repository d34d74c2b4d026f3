"""A comparison while it goes on: a live view of the present run, or a line for each step."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer.lab.bench.series import Series, SeriesStep
    from gpuinfer.lab.bench.tuning import Tuner


class ComparisonProgress:
    """What people see while it goes on: a live view of the present run, or a line for each step."""

    def __init__(self, title: str, common: Any) -> None:
        self._title, self._common = title, common
        self._work: Series | Tuner | None = None
        self._live = sys.stderr.isatty() and common.live is not False and not common.quiet

    def watch(self, work: Series | Tuner) -> None:
        """Set the work whose results are shown as they come."""
        self._work = work

    @contextlib.contextmanager
    def step(self, step: SeriesStep) -> Iterator[Callable[[Any], None]]:
        """Show one step, and afterwards what it brought."""
        from gpuinfer.lab.bench.series import RunKind
        from gpuinfer.units import left_until

        remaining = f" · {left_until(step.left_s)}" if step.left_s else ""
        said, known = f"{step.variant.name} · {step.doing}{remaining}", self._results()
        if not self._live or step.kind is RunKind.ROOFLINE:
            self._say("measuring the bare model …" if step.kind is RunKind.ROOFLINE else said)
        with self._view(said) as update:
            yield lambda look: update(look if step.kind is RunKind.PARITY else self._by_the_clock(look))
        for name, result in self._results().items() if self._live else ():
            if known.get(name) != result:
                self._say(f"{name} · {step.doing}: {result}")

    def _results(self) -> dict[str, str]:
        """The latest of each variant."""
        from gpuinfer.lab.bench.comparison import speed

        if self._work is None:
            return {}
        return {one.variant: speed(one.metric, one.rate) for one in self._work.outcome.runs}

    @contextlib.contextmanager
    def _view(self, said: str) -> Iterator[Callable[[Any], None]]:
        from gpuinfer.cli.screen.display import Display

        if not self._live:
            yield lambda update: None
            return
        with Display(f"{self._title} · {said}", live=True) as display:
            yield display.update

    def _say(self, line: str) -> None:
        if not self._common.quiet:
            print(line, file=sys.stderr, flush=True)

    def _by_the_clock(self, update: Any) -> Any:
        """A run that is ended by the clock is as far as the clock is."""
        from dataclasses import replace

        seconds = self._work.series_plan.seconds if self._work else None
        if seconds is None or update.progress.setup:
            return update
        done = min(update.elapsed_s, seconds)
        return replace(
            update, progress=replace(update.progress, done=done, total=seconds, unit="s", before=0, begun=0.0)
        )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM between two runs does what Ctrl-C does; during a run the run itself looks after both."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
