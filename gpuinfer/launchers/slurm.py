"""Processes as jobs of a SLURM cluster: one sbatch each, cancelled when this process ends. SLURM's own programs are
run, each with a timeout. A job that waits in the queue does not count as a process that hangs: how long it may wait is
an option of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from gpuinfer.errors import WorkError
from gpuinfer.host import children
from gpuinfer.launchers import base, local, slurm_base
from gpuinfer.launchers.base import LaunchedProcess, ProcessPlan
from gpuinfer.launchers.slurm_base import EVERYWHERE, WORD, SlurmBase, SlurmOptions

log = logging.getLogger(__name__)

LEAVING_S = 10.0  # for one of SLURM's programs where this process is about to end
FORM = "%i|%T|%N|%r"  # job, state, node, reason
HELD = {"SPECIAL_EXIT", "REQUEUE_HOLD"}  # it stays in the queue until somebody releases it
ENDED = {"COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "REVOKED", *HELD}
QUOTA = ("QOS", "Assoc")  # how SLURM's words for limits of a user, an account or a QOS begin
VIOLATED = "accounting/QOS policy"
QUOTA_CURE = (
    "That is a limit of your account or QOS (`sacctmgr show associations,qos`): give fewer processes, shorter ones "
    "(-L time=), another -L qos= or account=, or wait for those that run."
)
TIME = r"^((\d+-)?\d+(:\d+){0,2}|UNLIMITED)$"
LEAVE_S = 60  # before the end of its time a node is signalled to leave
LEAVE_FROM_S = 300  # of jobs that have at least so much time: SLURM may be a minute early


@dataclass(frozen=True, slots=True)
class SlurmJobState:
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


GONE = SlurmJobState("COMPLETED", reason="SLURM has forgotten it")


PULSE_LOOK_S = 10  # between two readings of the launcher's pulse
LOOKS = 12  # at one that stands still, after which the launcher is gone: file systems of clusters show news late

SCRIPT = """\
#!/bin/bash
# {name} of gpuinfer, whose launcher ends this job when it ends.
set -u
{own_address}

leave_with_the_launcher() {{
    local seen="" same=0 now
    while kill -0 $$; do
        read -rt {look_s} <> <(:)
        now=$(<{pulse})
        if [ "$now" = "$seen" ]; then same=$((same + 1)); else same=0; seen=$now; fi
        if [ "$same" -ge {looks} ]; then
            echo "what started this job is gone, so it ends"
            scancel "$SLURM_JOB_ID"
            return
        fi
    done
}} 2>/dev/null
leave_with_the_launcher &

srun {srun} {command}
code=$?
kill %1
exit $code
"""


def write_batch_script(plan: ProcessPlan, pulse: Path, command: Sequence[str], srun: Sequence[str]) -> Path:
    """The script, in the plan's folder. `command` runs gpuinfer there; whatever is in it stands for itself."""
    script = plan.folder / f"{plan.name}.sbatch"
    script.write_text(
        SCRIPT.format(
            name=plan.name,
            own_address=slurm_base.OWN_ADDRESS,
            pulse=shlex.quote(str(pulse)),
            look_s=PULSE_LOOK_S,
            looks=LOOKS,
            srun=shlex.join(srun),
            command=shlex.join([*command, *plan.arguments]) + (' --host "$address"' if plan.serves else ""),
        )
    )
    script.chmod(0o700)
    return script


PULSE = "launcher.pulse"  # in the folder of all plans: as long as it changes, the launcher lives
PULSE_S = 5.0
LOOK_S = 2.0  # between two questions how the jobs are, all in one
GONE_S = 15.0  # for a job to be gone, once it is killed


def time_limit_seconds(time_limit: str) -> float:
    """Of a time limit as `sbatch --time` takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours …"""
    if time_limit == "UNLIMITED":
        return float("inf")
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    hours, minutes, seconds = ([*parts, 0, 0] if dash or len(parts) == 3 else [0, *parts, 0])[:3]
    return float(int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds)


class SlurmLauncher(SlurmBase):
    """Jobs of a SLURM cluster: one for each process."""

    class Options(SlurmOptions):
        account: str | None = Field(None, pattern=WORD, description="who is charged")
        partition: str | None = Field(None, pattern=WORD, description="where the jobs run")
        qos: str | None = Field(None, pattern=WORD, description="quality of service")
        constraint: str | None = Field(None, pattern=WORD, description="what a node must have, such as a100")
        reservation: str | None = Field(None, pattern=WORD, description="the name of a reservation")
        time: str | None = Field(None, pattern=TIME, description="of one job, such as 04:00:00")

    name = "slurm"
    programs = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    options: Options

    def __init__(
        self, options: BaseModel | None = None, command: Sequence[str] | None = None, look_s: float = LOOK_S
    ) -> None:
        """`command` and `look_s` are for tests."""
        super().__init__(options, command)
        self._look_s = look_s
        self._jobs: dict[str, SlurmJob] = {}  # those of which it is not known how they ended
        self._pulses: set[Path] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def launch(self, plan: ProcessPlan) -> SlurmJob:
        self.refuse_named_devices(plan)
        pulse = plan.folder / PULSE
        self._pulses.add(pulse)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
        srun = self.srun_words(cpus_per_task=self.options.cpus)
        script = write_batch_script(plan, pulse, self.command, srun)
        begins = plan.log.stat().st_size if plan.log.exists() else 0
        environment = local.process_environment(children.with_our_path(), plan.threads)
        ended = await slurm_base.run(["sbatch", "--parsable", *self._words(plan), str(script)], environment)
        number = ended.out.decode("utf-8", "replace").strip().partition(";")[0]
        if ended.code != 0 or not number.isdigit():
            why = slurm_base.error_output(ended)
            limited = VIOLATED in why or any(f"error: {word}" in why for word in QUOTA)
            cure = QUOTA_CURE if limited else "Correct what it names (-L account=, partition=, …)."
            raise WorkError(f"sbatch refused the job: {why}\n{cure}")
        job = SlurmJob(plan, number, begins, self.options.pending, self._look)
        if not self._jobs:
            atexit.register(self._leave)
        self._jobs[number] = job
        log.info("%s is job %s", plan.name, number)
        return job

    def _words(self, plan: ProcessPlan) -> list[str]:
        """The options of sbatch."""
        own = self.options
        options = {name: getattr(own, name) for name in ("account", "partition", "qos", "constraint", "time")}
        options |= {"reservation": own.reservation, "gpus": own.gpus, "mem": own.mem, "cpus-per-task": own.cpus}
        options |= {"output": str(plan.log).replace("%", "%%")}  # for SLURM a percent sign begins a replacement
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        if plan.serves:  # its supervisor replaces one that ends, and must know of it
            words.append("--no-requeue")
        else:  # one that SLURM starts again dials again
            words.append("--requeue")
            if own.time is not None and time_limit_seconds(own.time) >= LEAVE_FROM_S:
                words.append(f"--signal=TERM@{LEAVE_S}")
        return [*words, "--nodes=1", "--ntasks=1", "--open-mode=append", f"--job-name=gpuinfer-{plan.name}"]

    # While there are jobs

    async def _beat(self) -> None:
        """Show the jobs that this process lives: one that was killed leaves none behind."""
        for beat in itertools.count():
            for pulse in self._pulses:
                with contextlib.suppress(OSError):  # a full disk: the next beat may get through
                    pulse.write_text(f"{beat}\n")
            await asyncio.sleep(PULSE_S)

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._look_s)

    async def _look(self) -> None:
        """Learn how all jobs are. One of which it is known how it ended is not queried any more."""
        if not self._jobs:
            return
        jobs = list(self._jobs)
        ended = await slurm_base.run(
            ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={FORM}"]
        )
        if ended.code != 0 and slurm_base.NO_SUCH not in slurm_base.error_output(
            ended
        ):  # which says nothing about the jobs
            log.info("squeue does not tell how the jobs are: %s", slurm_base.error_output(ended))
            return
        found = dict.fromkeys(jobs, GONE)
        for line in ended.out.decode("utf-8", "replace").splitlines():
            number, state, node, reason = (*map(str.strip, line.split("|", 3)), "", "", "")[:4]
            if number in found:
                found[number] = SlurmJobState(state, node, reason)
        for number, job in found.items():
            if (known := self._jobs.get(number)) is not None:  # another look may have seen its end
                known.learn(job)
            if job.settled:
                self._jobs.pop(number, None)
            if job.state in HELD:
                await slurm_base.cancel(number)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GONE_S)
        self._tasks = []
        if self._jobs:
            await slurm_base.cancel(*self._jobs)
        self._jobs.clear()
        atexit.unregister(self._leave)
        for pulse in self._pulses:
            pulse.unlink(missing_ok=True)

    def _leave(self) -> None:
        """Whatever has ended this process: what it has started goes with it."""
        with contextlib.suppress(OSError):
            if self._jobs:
                children.run_program(["scancel", "--quiet", *self._jobs], LEAVING_S)


class SlurmJob(LaunchedProcess):
    """A process that is a job."""

    def __init__(
        self, plan: ProcessPlan, number: str, begins: int, pending_s: float, look: Callable[[], Awaitable[None]]
    ) -> None:
        self.number = number
        self.job = SlurmJobState("PENDING")
        super().__init__(plan, begins)
        self._pending_s, self._look = pending_s, look
        self._changed = asyncio.Event()
        self._requeues = not plan.serves

    def learn(self, job: SlurmJobState) -> None:
        """How it is now."""
        if job == self.job:
            return
        if job.waits and job.reason not in ("", "None"):
            cure = f". {QUOTA_CURE}" if job.reason.startswith(QUOTA) else ""
            log.warning("%s waits in the queue of SLURM (job %s): %s%s", self.plan.name, self.number, job.reason, cure)
        self.job = job
        self._changed.set()

    async def ready(self, within_s: float) -> tuple[str, int]:
        """`within_s` counts from when the job runs."""
        await self._until(lambda: not self.job.waits, self._pending_s)
        if self.job.waits:
            raise self.failure(
                f"waited {self._pending_s:g} s in the queue ({self.job.reason}), which -L pending bounds"
            )
        # not `alive`: the failure tells how the job ended, which SLURM knows a moment after its last process has
        address = await base.wait_until_ready(
            self.plan.ready_file, within_s, lambda: not self.job.settled, self.failure
        )
        return (self.job.node if address.host in EVERYWHERE else address.host), address.port

    @property
    def alive(self) -> bool:
        """Of one that SLURM may start again also while its node tidies up, after which it is in the queue."""
        return not (self.job.settled if self._requeues else self.job.ended)

    async def terminate(self, within_s: float) -> None:
        self._requeues = False
        if self.alive and not self.job.waits:
            await slurm_base.cancel("--signal=TERM", self.number)
            await self._gone(within_s)
        await self.kill()

    async def kill(self) -> None:
        self._requeues = False
        if self.alive:
            await slurm_base.cancel("--signal=KILL", "--full", self.number)
            await slurm_base.cancel(self.number)  # also one that waits
            if not await self._gone(GONE_S):
                log.warning("%s: job %s is cancelled, and not gone yet", self.plan.name, self.number)

    async def _gone(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while self.alive and time.monotonic() < until:
            await self._look()
            if self.alive:
                await self._until(lambda: not self.alive, min(0.25, max(0.0, until - time.monotonic())))
        return not self.alive

    async def _until(self, done: Callable[[], bool], within_s: float) -> None:
        """Wait until news of the job make it so, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def called(self) -> str:
        return f"{self.plan.name} (job {self.number}, {self.job.state})"
