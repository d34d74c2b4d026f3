"""What one step of the trainer was: a line of `--steps FILE`, and all that its stall is judged by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import UsageError, WorkError


class Handed(Struct, frozen=True, kw_only=True):
    """Weights that a trainer has handed over; they are as the backend was told of them."""

    version: int
    weights: str
    adapter: str | None = None


class StepRecord(Struct, frozen=True, kw_only=True):
    """Times in seconds. A step lasts from the end of the one before it (of the first: from the run's start) until its
    weights are in force. What the engine did in that time is counted to it, for whichever batch it was.
    """

    step: int  # from 0
    version: int  # of the trainer's weights when it took the batch
    version_after: int = 0  # of those that came of it
    weights: Handed | None = None  # in force at its end; None: those of the start
    at_s: float  # when it ended, since the run began
    wall_s: float
    wait_s: float = 0.0  # the trainer waited for rollouts, or to be heard
    train_s: float = 0.0  # from the batch to the trainer's word that it is done; or less, where it says so
    absent_s: float = 0.0  # no trainer asked for anything, and none was at work
    adapter_load_s: float = 0.0  # until the new weights were in force

    # The batch
    groups: int = 0
    games: int = 0
    numbers: tuple[int, ...] = ()  # of its groups
    tokens_per_game: float = 0.0  # drawn
    tokens_per_call: float = 0.0
    staleness_mean: float = 0.0  # versions between a group's oldest trainable token and `version`
    staleness_max: int = 0
    step_rollout_s: float = 0.0  # from the start of its first group until its last one was ready
    kl: float | None = None  # k3 from the reference, for each token; None: no reference was computed
    kl_k1: float | None = None
    kl_coefficient: float | None = None  # after the step
    ratio_mean: float | None = None  # trainer / sampler, where the trainer told
    ratio_max: float | None = None
    effective: float | None = None  # sample size, as a share
    metrics: Mapping[str, float] = {}  # the trainer's own

    # The buffer
    buffer_before: int = 0  # groups that waited when the trainer asked
    buffer_after: int = 0  # and when the step ended
    running: int = 0  # groups under way at the end
    dropped: int = 0  # as too old, in this step
    tail_s: float = 0.0  # no more groups were there to be begun

    # The engine, in this time
    input_tokens: int = 0
    output_tokens: int = 0
    calls: int = 0  # answers that came
    slots: int = 0  # 0: not known
    inference_s: float = 0.0  # in forward steps; of several engines, or a far one, their mean
    tokens_per_s_wall: float = 0.0  # output
    tokens_per_s_inference: float = 0.0
    occupancy: float = 0.0  # rows in forward steps over slots, the mean over the time that steps ran
    busy: float = 0.0  # rows in forward steps over slots, the mean over all of the step
    offered: float = 0.0  # rows asked for over slots, the mean over all of the step; over 1: some waited for a slot
    offered_working: float = 0.0  # the same over the time in which any group was under way
    working_s: float = 0.0  # any group was under way
    gated_s: float = 0.0  # a group could have been begun, but the capacity rule did not admit it
    reference_s: float = 0.0  # a reference pass was under way
    reference_share: float = 0.0  # of the time from a group's start until it was ready, in its pass; the batch's mean
    constraint_s: float = 0.0  # spent on constraints: compiling them, and cutting the choice down
    environment_s: float = 0.0  # the mean game's time in its environment: the step's length, times that share of games
    cold_start_s: float = 0.0  # before the first answer's first token of an engine that was just started

    verdict: Mapping[str, Any] | None = None


class StepsFile:
    """Writes each step as it ends: one line, whole, in one call, so that it can be followed.

    With `resume` the lines that are there stay, but for one that was half written, and are read into `before`; else the
    file is written anew. Raises `UsageError` where it cannot be written, or gone on with.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.before: list[StepRecord] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
        try:
            self._descriptor = os.open(self.path, flags, 0o666)
            if resume:
                self.before = list(read(self.path))
                self._cut_torn()
        except OSError as error:
            raise UsageError(f"--steps {path} cannot be written ({error.strerror}). Name another file.") from None

    def add(self, record: StepRecord) -> None:
        """Raises `WorkError` when the disk takes no more."""
        try:
            os.write(self._descriptor, msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise WorkError(f"--steps {self.path} cannot be written: {error.strerror}. Free some space.") from None

    def close(self) -> None:
        os.close(self._descriptor)

    def _cut_torn(self) -> None:
        whole = self.path.read_bytes()
        os.ftruncate(self._descriptor, whole.rfind(b"\n") + 1)


def read(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a file, without one that is only half there. Raises `UsageError` for a line that is no step."""
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(Path(path).read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"line {number} of {path} is no step ({error}). Give --steps another file.") from None
