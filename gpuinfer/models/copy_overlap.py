"""How much of the copies between host and CUDA device is hidden behind compute, from events on the lanes' streams.

A batch's copies run while the kernels of other lanes' batches do. Timing each batch would cost small models too much:
of every `EVERY` batches of a device `WINDOW` in a row are timed, and so are all that run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

EVERY, WINDOW = 512, 32
MARKS = 4  # of a batch: it begins, its rows are there, its answers are computed, they are back

Times = Sequence[float]
"""A batch's marks in seconds, on a clock that all batches of a window share."""


def hidden_copies(batches: Sequence[Times], edge: int = 0) -> tuple[float, float]:
    """The seconds of all copies, and those of them in which another batch was computed. The copies of the first and
    last `edge` batches are left out, since what ran at the same time may not have been timed.
    """
    ordered = sorted(batches, key=lambda marks: marks[0])
    spans: list[list[float]] = []  # in which anything was computed, one behind the other
    for begin, end in sorted((marks[1], marks[2]) for marks in ordered):
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    copied = hidden = 0.0
    for marks in ordered[edge : len(ordered) - edge]:
        for begin, end in ((marks[0], marks[1]), (marks[2], marks[3])):
            copied += end - begin
            hidden += sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)
    return copied, min(hidden, copied)


class _Window:
    """Batches that are timed together. `left`: of them, how many are not over."""

    def __init__(self) -> None:
        self.batches: list[TimedBatch] = []
        self.left, self.whole = WINDOW, True


class TimedBatch:
    """The marks of one batch, whose events are recorded on the stream of its lane."""

    def __init__(self, overlap: CopyOverlap, window: _Window) -> None:
        self._overlap = overlap
        self._window: _Window | None = window
        self.events: list[Any] = []

    def mark(self, stream: Any) -> None:
        """The next of its `MARKS`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[no-untyped-call]
        self.events.append(event)

    def over(self, whole: bool = True) -> None:
        """The host has waited for its last mark; `whole` False: it has failed. Only the first call counts."""
        window, self._window = self._window, None
        if window is not None:
            self._overlap.count(window, whole and len(self.events) == MARKS)


class Untimed:
    """A batch that is not timed."""

    def mark(self, stream: Any) -> None:
        pass

    def over(self, whole: bool = True) -> None:
        pass


UNTIMED = Untimed()


class CopyOverlap:
    """The figures of one device, whose `lanes` threads share it."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._begun = self._batches = 0
        self._window = _Window()
        self._copied_s = self._hidden_s = 0.0

    def batch(self) -> TimedBatch | Untimed:
        """A batch begins."""
        with self._lock:
            place = self._begun % EVERY
            self._begun += 1
            if place >= WINDOW:
                return UNTIMED
            if not place:
                self._window = _Window()
            made = TimedBatch(self, self._window)
            self._window.batches.append(made)
            return made

    def count(self, window: _Window, whole: bool) -> None:
        """One of a window's batches is over."""
        with self._lock:
            window.left -= 1
            window.whole = window.whole and whole
            if window.left or not window.whole:
                return
            try:
                # From the window's first event: CUDA tells times as float32, which is too coarse over a whole run.
                first = window.batches[0].events[0]
                times = [[first.elapsed_time(one) / 1e3 for one in each.events] for each in window.batches]
            except RuntimeError:  # of a lost device, which the next batch says
                return
            copied, hidden = hidden_copies(times, min(self._lanes, WINDOW // 4))
            self._copied_s += copied
            self._hidden_s += hidden
            self._batches += len(times)

    def read(self) -> dict[str, Any]:
        """For `Backend.device`: `transfers`, of the batches that were timed; nothing before the first of them."""
        with self._lock:
            figures = {"copied_s": self._copied_s, "hidden_s": self._hidden_s, "batches": self._batches}
        return {"transfers": figures} if figures["batches"] else {}
