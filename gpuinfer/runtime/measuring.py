"""The roofline of a run: the bare model measured before it and again after it, and held against what the run did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from gpuinfer.api import Backend, Roofline
from gpuinfer.errors import WorkError
from gpuinfer.host import machine

log = logging.getLogger(__name__)

BEFORE_S = 6.0  # the search for the best arrangement included
AFTER_S = 1.5
LONGER_S = 4.0  # when the run has done more than that

Again = Callable[[float], Roofline | None]
"""Measures the bare model once more, for so many seconds; None when that cannot be had."""


def has_roofline(backend: Backend) -> bool:
    """Whether the bare model can be measured: there is no roofline yet for models of text."""
    spec = backend.setup.model
    return spec is not None and spec.kind == "rows"


def roofline_of(
    backend: Backend,
    *,
    only: Roofline | None = None,
    budget_s: float = BEFORE_S,
    stopped: Callable[[], bool] = lambda: False,
) -> Roofline | None:
    """Measure the bare model in a process of its own; None without a model. `only` asks for no more than the batch size
    and arrangement of an earlier measurement. Blocks; raises like `measure_in_child`.
    """
    from gpuinfer.models.roofline import measure_in_child

    setup = backend.setup
    spec = setup.model
    if spec is None:
        return None
    found = measure_in_child(
        spec,
        devices=setup.devices,
        dtype=setup.dtype,
        seed=setup.seed,
        cores=machine.cores(),
        deterministic=setup.deterministic,
        compute=backend.compute,
        only=only,
        budget_s=budget_s,
        stopped=stopped,
    )
    return replace(found, measured=(found.rows_per_s,))


def attempted(
    backend: Backend, stopped: Callable[[], bool], *, budget_s: float, only: Roofline | None = None
) -> Roofline | None:
    """`roofline_of` for a run that goes on without it."""
    try:
        return roofline_of(backend, only=only, budget_s=budget_s, stopped=stopped)
    except WorkError as error:
        if not stopped():  # a Ctrl-C reaches the measuring process too
            log.warning("the roofline could not be measured, and the run goes on without it: %s", error)
        return None


def reconciled(before: Roofline, rows_per_s: float, again: Again) -> Roofline:
    """What the bare model does, after a run that did `rows_per_s`: the highest of two measurements, of three where the
    run did more than both, and the run's own rate where it did more than those.
    """
    best = before
    for seconds in (AFTER_S, LONGER_S):
        if seconds == LONGER_S and rows_per_s <= best.rows_per_s:
            break
        if (found := again(seconds)) is None:
            break
        best = replace(
            best, rows_per_s=max(best.rows_per_s, found.rows_per_s), measured=(*best.measured, found.rows_per_s)
        )
    if rows_per_s > best.rows_per_s:
        return replace(best, rows_per_s=rows_per_s, raised=True)
    return best
