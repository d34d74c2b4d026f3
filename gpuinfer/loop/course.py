"""A loop on its way: one command after the other, each in a process of its own, none twice.

A step's report is written at once when all of it is done, and a step that was stopped goes on with what lies in its
folder. So whatever is killed when, the next run does what is left and nothing else. A command ends with this process.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import commands
from gpuinfer.loop.plan import Kind, Plan, Report, Step, reported

STOP_S = 60.0  # for a command to keep what is finished, once it is asked to stop
USAGE, PARTIAL = 2, 3  # exit codes
MARGIN = "gpuinfer: "


class Remaining:
    """How long the rest of a loop takes, by how long the last step of each kind took."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._kinds: dict[Path, Kind] = {}  # of steps that are not done, by their reports
        self._took: dict[Kind, float] = {}
        for step in plan.steps():
            if (report := reported(step)) is None:
                self._kinds[step.report] = step.kind
            else:
                self._took[step.kind] = seconds_of(report)

    def ended(self, step: Step, seconds: float) -> None:
        """A step was done in so many seconds."""
        self._kinds.pop(step.report, None)
        self._took[step.kind] = seconds

    def seconds(self) -> float | None:
        """Of all steps that have not ended; None before one of each kind has."""
        took = dict(self._took)
        if "games" in took:  # games of a match are about as long as those of self-play
            a_game = took["games"] / self._plan.games
            took = {"match": a_game * self._plan.evaluation_games, "gate": a_game * self._plan.gate_games, **took}
        if any(kind not in took for kind in self._kinds.values()):
            return None
        return sum(took[kind] for kind in self._kinds.values())


def seconds_of(report: Report) -> float:
    """All of the command's last run: getting ready and working."""
    return float(report["setup_s"]) + float(report["wall_s"])


def run(step: Step, program: Sequence[str], verbose: bool) -> Report:
    """Do what is left of a step: `program` and the step's words. Its report.

    Raises `UsageError` for what the command refuses, `WorkError` when it fails, and `KeyboardInterrupt` when it was
    stopped, by us or by itself.
    """
    step.report.parent.mkdir(parents=True, exist_ok=True)
    with step.log.open("ab") as log:
        begins = log.tell()
        code = _ended([*program, *step.words], None if verbose else log)
    if code == 0 and (report := reported(step)) is not None:
        return report
    if code == PARTIAL:
        raise KeyboardInterrupt
    raise _failure(step, code, "" if verbose else _said(step.log, begins))


def _ended(command: Sequence[str], log: IO[bytes] | None) -> int:
    """The command's exit code. It holds our standard input's other end, and leaves when we do (`host/leaving.py`)."""
    out = log or subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=log, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            _stop(process)
            raise
        finally:
            commands.kill(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to keep what is finished; a second Ctrl-C waits no longer."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        process.wait(STOP_S)


def _failure(step: Step, code: int, said: str) -> Exception:
    """What to raise for a command that ended with this code, having said this."""
    what = f"{step.kind} of iteration {step.iteration}"
    lines = said.strip().splitlines()
    begins = max((at for at, line in enumerate(lines) if line.startswith(MARGIN)), default=None)
    complaint = "\n".join(line.removeprefix(MARGIN).strip() for line in lines[begins:]) if begins is not None else ""
    if code == USAGE and complaint:
        return UsageError(f"{what}: {complaint}")
    if code < 0:
        complaint = f"it was ended by {signal.Signals(-code).name} (out of memory?)."
    after = f"The whole of it: {step.log}. What is finished is kept: the same command with --resume goes on."
    return WorkError(f"{what} failed: {complaint or f'it ended with code {code}.'}\n{after}")


def _said(log: Path, begins: int) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[begins:].decode("utf-8", "replace")
    return ""


def follow(
    steps: Iterable[Step],
    verbose: bool,
    began: Callable[[Step], None],
    ended: Callable[[Step, Report, float], None],
    program: Sequence[str] = (sys.executable, "-m", "gpuinfer.loop.child"),
) -> None:
    """All steps that are not done. `ended` is told the seconds that each took. Raises what `run` does."""
    for step in steps:
        if (done := reported(step)) is not None:
            continue
        began(step)
        start = time.monotonic()
        done = run(step, program, verbose)
        ended(step, done, time.monotonic() - start)
