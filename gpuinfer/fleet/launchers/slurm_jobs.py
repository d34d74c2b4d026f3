"""What is asked of SLURM: submit a job, how jobs are, cancel them. Its own programs are run, each with a limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuinfer.errors import WorkError
from gpuinfer.host import commands

log = logging.getLogger(__name__)

LIMIT_S = 30.0  # for one of its programs: a controller that is overloaded answers late
LEAVING_S = 10.0  # the same where this process is about to end
FORM = "%i|%T|%N|%r"  # job, state, node, reason
NO_SUCH = "Invalid job id"
ENDED = {"COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "REVOKED", "SPECIAL_EXIT", "REQUEUE_HOLD"}


@dataclass(frozen=True, slots=True)
class Job:
    """How a job is. `state` is SLURM's word for it; `reason` says why one that is pending does not run."""

    state: str
    node: str = ""
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether how it ended is known: while its node tidies up, SLURM says only that it does."""
        return self.ended and self.state != "COMPLETING"

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED")


GONE = Job("COMPLETED", reason="SLURM has forgotten it")


async def submit(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The number of the job. Raises `WorkError` with sbatch's own words."""
    ended = await _run(["sbatch", "--parsable", *arguments], environment)
    number = ended.out.decode("utf-8", "replace").strip().partition(";")[0]
    if ended.code != 0 or not number.isdigit():
        raise WorkError(f"sbatch refused the job: {words(ended)}\nCorrect what it names (-L account=, partition=, …).")
    return number


async def states(jobs: Sequence[str]) -> dict[str, Job] | None:
    """Each job that was asked for; None when SLURM does not answer, which says nothing about them."""
    ended = await _run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={FORM}"])
    if ended.code != 0 and NO_SUCH not in words(ended):
        log.info("squeue does not tell how the jobs are: %s", words(ended))
        return None
    found = {}
    for line in ended.out.decode("utf-8", "replace").splitlines():
        number, state, node, reason = (*map(str.strip, line.split("|", 3)), "", "", "")[:4]
        found[number] = Job(state, node, reason)
    return {job: found.get(job, GONE) for job in jobs}


async def cancel(*arguments: str) -> None:
    """Whether a job was there to be cancelled does not matter."""
    await _run(["scancel", "--quiet", *arguments])


def cancel_now(jobs: Sequence[str]) -> None:
    """The same for a process that is about to end, without an event loop."""
    with contextlib.suppress(OSError):
        commands.run(["scancel", "--quiet", *jobs], LEAVING_S)


def answers() -> str:
    """Why SLURM cannot be asked; empty when it can."""
    try:
        ended = commands.run(["squeue", "--noheader", "--jobs=0"], LIMIT_S)
    except OSError as error:
        return str(error)
    return "" if ended.code == 0 or NO_SUCH in words(ended) else words(ended)


def words(ended: commands.Ended) -> str:
    """What a program of SLURM's complained of, in its own words."""
    if ended.code is None:
        return f"it did not answer within {LIMIT_S:g} s"
    said = [line.strip() for line in ended.err.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(said[-3:])[:600] or f"it ended with {ended.code} and said nothing"


async def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> commands.Ended:
    try:
        return await asyncio.to_thread(commands.run, command, LIMIT_S, b"", environment)
    except OSError as error:
        raise WorkError(f"{command[0]} cannot be run: {error.strerror}. Is SLURM still installed here?") from None
