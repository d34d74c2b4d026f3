"""After a step that raised: smaller steps if memory ran out, else the row at fault is found by halving.

A step that raised has changed nothing, so its rows are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

import torch

from gpuinfer.errors import BackendDied, BackendError
from gpuinfer.models.cuda_graphs import release_cached_memory
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory, says_lost
from gpuinfer.text.generator.slotted import AnswerRow

logger = logging.getLogger("gpuinfer")

MOST_FAILURES = 32  # steps in a row: enough to tell any of 16 rows that all fail from a device that is gone


R = TypeVar("R", bound=AnswerRow)


class FaultIsolation(Generic[R]):
    """The bounds of the next step: `most` tokens (None: no bound), and `only` these rows."""

    def __init__(self, seats: list[R | None], model: str | None = None) -> None:
        """`seats`: the row of each slot, now and later; `model`: its name in warnings."""
        self._seats = seats
        self._whose = f" of {model}" if model else ""
        self._suspects: list[list[R]] = []  # groups that are tried one after another, the last first
        self._failures = 0
        self.most: int | None = None

    @property
    def only(self) -> Collection[R] | None:
        """The rows to be tried; None: no row is suspected."""
        while self._suspects:
            group = [row for row in self._suspects[-1] if self._seats[row.slot] is row]
            if group:
                return group
            self._suspects.pop()
        return None

    def passed(self) -> None:
        """The step went through: so none of its rows is at fault."""
        self._failures = 0
        if self._suspects:
            self._suspects.pop()

    def failed(self, rows: Sequence[R], tokens: int, error: Exception) -> R | None:
        """A step of `tokens` tokens of these rows raised `error`. Returns the row to give up, if that is clear now.

        Raises `BackendDied` when there is no use in going on.
        """
        if is_out_of_memory(error):
            if torch.cuda.is_available():
                release_cached_memory()
            if tokens <= 1:
                return rows[0]
            if self.most is None:
                logger.warning(
                    "out of memory at a step of %d tokens%s: going on with fewer at once. "
                    "Set -B slots=%d or -B step_tokens=%d to start there.",
                    tokens,
                    self._whose,
                    max(1, len(rows) // 2),
                    max(1, tokens // 2),
                )
            self.most = tokens // 2
            return None
        self._failures += 1
        if self._failures > MOST_FAILURES or says_lost(error):
            raise model_died(error) from error
        if self._suspects:
            self._suspects.pop()
        if len(rows) == 1:
            return rows[0]
        half = len(rows) // 2
        self._suspects += [list(rows[half:]), list(rows[:half])]
        return None


def model_died(error: Exception) -> BackendDied:
    """The error of a model that fails at every step."""
    return BackendDied(
        f"the model fails at every step ({type(error).__name__}: {first_line(error)}). "
        "Start again; if it stays so, `gpuinfer doctor` may tell why."
    )


def row_failed(error: Exception) -> BackendError:
    """The error of a row that failed in a step of its own."""
    if is_out_of_memory(error):
        return BackendError(
            f"out of memory on a single token: {first_line(error)}. Use fewer slots (-B slots=N), a shorter context "
            "(--context N), or --dtype bfloat16."
        )
    return BackendError(
        f"the model failed on this prompt alone ({type(error).__name__}: {first_line(error)}). "
        "Leave it out; its neighbours are not affected."
    )
