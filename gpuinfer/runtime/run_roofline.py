"""The roofline of a run: the bare model measured before it and again after it, and held against what the run did."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gpuinfer.api import Backend, ModelSpec, Roofline, TextRoofline
from gpuinfer.errors import BackendError, GpuinferError, WorkError
from gpuinfer.host import machine
from gpuinfer.models import roofline_process
from gpuinfer.models.roofline_process import RooflineProcess
from gpuinfer.runtime.session import preflight

log = logging.getLogger(__name__)

BEFORE_S = 6.0  # at most, the search for the best arrangement included
KNOWN_S = 1.0  # where an earlier run has found that
LEAST_TEXT_S, MOST_TEXT_S = 0.4, 2.0  # for a model of text, measured after the run alone
LONGEST_TEXT_S = 60.0  # for a model whose steps take long: a few of them
AFTER_SHARE = 0.1  # of the run's time, for measuring after it
LEAST_AFTER_S, AFTER_S = 0.5, 1.5
LONGER = 8 / 3  # times that, when the run has done more than both
BESIDE_MB, BESIDE_SHARE = 2048.0, 0.1  # what measuring may take of memory beside workers, and of what is free
MIB = 1 << 20

Again = Callable[[float], Roofline | None]
"""Measures the bare model once more, for so many seconds; None when that cannot be had."""


def has_roofline(backend: Backend) -> bool:
    """Whether a process of its own can measure the bare model: one of text is measured where it lies."""
    spec = backend.setup.model
    if spec is None or spec.kind != "rows":
        return False
    return spec.source is None or spec.source.structure is not None  # which can travel


def place_of(backend: Backend, cores: int) -> Path | None:
    """Where what is found out about a backend's model is remembered; None where that cannot be told or kept."""
    setup = backend.setup
    if setup.model is None or machine.wants_cuda(setup.devices):  # which of several CUDA devices only torch knows
        return None
    return roofline_process.kept_path(
        setup.model, dtype=setup.dtype, compute=backend.compute, cores=cores, deterministic=setup.deterministic
    )


async def text_roofline(backend: Backend, rows: int, wall_s: float) -> TextRoofline | None:
    """The model of text of a run that lasted `wall_s` measured where it lies, once the run is over, in steps of so many
    rows, and remembered. None where that cannot be had, or would take long beside the run.
    """
    seconds = min(MOST_TEXT_S, AFTER_SHARE * wall_s)
    if seconds < LEAST_TEXT_S or rows < 1:
        return None
    try:
        found = await asyncio.wait_for(backend.measure(rows, seconds), LONGEST_TEXT_S)
    except (GpuinferError, TimeoutError) as error:
        log.debug("the roofline could not be measured: %s", error)
        return None
    if found is not None:
        await asyncio.to_thread(roofline_process.remember, place_of(backend, machine.cores()), found)
    return found


class BareModel:
    """A backend's model alone, which a process of its own measures; it loads torch as soon as this is made.

    Its methods block, and raise like `Measurer.measure`.
    """

    def __init__(self, backend: Backend) -> None:
        setup, compute, cores = backend.setup, backend.compute, machine.cores()
        spec = setup.model or ModelSpec("none")
        self._measurer = RooflineProcess(
            spec,
            devices=setup.devices,
            dtype=setup.dtype,
            seed=setup.seed,
            cores=cores,
            deterministic=setup.deterministic,
            compute=compute,
        )
        self._place = place_of(backend, cores)
        self.known = roofline_process.recall(self._place)
        """Where an earlier run found it to be at its best."""
        most_mb = min(BESIDE_MB, BESIDE_SHARE * machine.memory_available() / MIB)
        self.fits_beside = self.known is not None and self.known.peak_mb <= most_mb
        """Whether it is known to take so little memory that it can be measured while others have theirs."""
        with contextlib.suppress(BackendError):  # which is said when it is needed
            self._measurer.start()

    def before(self, stopped: Callable[[], bool] = lambda: False) -> Roofline:
        """The best that it does, over batch sizes and arrangements, or in the one that an earlier run has found, if it
        does about the same there as it did then.
        """
        if self.known is not None:
            found = self._measurer.measure(KNOWN_S, only=self.known.roofline, stopped=stopped)
            if self.known.agrees(found):
                return replace(found, measured=(found.rows_per_s,))
        found = self._measurer.measure(BEFORE_S, stopped=stopped)
        roofline_process.remember(
            self._place,
            roofline_process.KeptSearch(found.at_rows, found.arrangement, found.rows_per_s, self._measurer.peak_mb),
        )
        return replace(found, measured=(found.rows_per_s,))

    def again(self, before: Roofline, seconds: float, stopped: Callable[[], bool] = lambda: False) -> Roofline:
        """What it does in the arrangement of an earlier measurement, looked at for so long."""
        return self._measurer.measure(seconds, only=before, stopped=stopped)

    def close(self) -> None:
        self._measurer.close()


@contextlib.contextmanager
def bare_model(backend: Backend) -> Iterator[BareModel]:
    made = BareModel(backend)
    try:
        yield made
    finally:
        made.close()


def roofline_of(backend: Backend) -> Roofline | None:
    """Measure the bare model; None without one. Blocks; raises like `BareModel.before`, and `UsageError` for what the
    backend knows that it cannot serve.
    """
    if not has_roofline(backend):
        return None
    asyncio.run(preflight(backend))
    with bare_model(backend) as made:
        return made.before()


def attempted(measure: Callable[[], Roofline], stopped: Callable[[], bool]) -> Roofline | None:
    try:
        return measure()
    except WorkError as error:
        if not stopped():  # a Ctrl-C reaches the measuring process too
            log.warning("the roofline could not be measured, and the run goes on without it: %s", error)
        return None


def reconciled(before: Roofline, rows_per_s: float, wall_s: float, again: Again) -> Roofline:
    """What the bare model does, after a run that did `rows_per_s` for `wall_s` seconds: the highest of two
    measurements, of three where the run did more than both, and the run's own rate where it did more than those.

    A short run is followed by a short look, and one that did nothing by none: of nothing any rate is the same share.
    """
    best, after_s = before, min(AFTER_S, max(LEAST_AFTER_S, AFTER_SHARE * wall_s))
    for longer, seconds in enumerate((after_s, LONGER * after_s)):
        if rows_per_s <= (best.rows_per_s if longer else 0.0):
            break
        if (found := again(seconds)) is None:
            break
        best = replace(
            best, rows_per_s=max(best.rows_per_s, found.rows_per_s), measured=(*best.measured, found.rows_per_s)
        )
    if rows_per_s > best.rows_per_s:
        return replace(best, rows_per_s=rows_per_s, raised=True)
    return best
