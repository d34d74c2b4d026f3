"""Processes as jobs of a SLURM cluster: one sbatch each, cancelled when this process ends. SLURM's own programs are
run, each with a timeout. A job that waits in the queue does not count as a process that hangs: how long it may wait is
an option of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import getpass
import itertools
import logging
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children, installation
from gpuinfer.launchers import base, local
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan

log = logging.getLogger(__name__)

LIMIT_S = 30.0  # for one of its programs: a controller that is overloaded answers late
LEAVING_S = 10.0  # the same where this process is about to end
FORM = "%i|%T|%N|%r"  # job, state, node, reason
NO_SUCH = "Invalid job id"
ENDED = {"COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "REVOKED", "SPECIAL_EXIT", "REQUEUE_HOLD"}


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


def error_output(ended: children.FinishedProgram) -> str:
    """What a program of SLURM's complained of, in its own words."""
    if ended.code is None:
        return f"it did not answer within {LIMIT_S:g} s"
    said = [line.strip() for line in ended.err.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(said[-3:])[:600] or f"it ended with {ended.code} and said nothing"


async def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> children.FinishedProgram:
    try:
        return await asyncio.to_thread(children.run_program, command, LIMIT_S, b"", environment)
    except OSError as error:
        raise WorkError(f"{command[0]} cannot be run: {error.strerror}. Is SLURM still installed here?") from None


async def _cancel(*arguments: str) -> None:
    """Whether a job was there to be cancelled does not matter."""
    await _run(["scancel", "--quiet", *arguments])


PULSE_LOOK_S = 10  # between two looks at the launcher's pulse
LOOKS = 12  # at one that stands still, after which the launcher is gone: file systems of clusters show news late

# A process that serves listens at the address by which SLURM knows the node, where others reach it.
SCRIPT = """\
#!/bin/bash
# {name} of gpuinfer, whose launcher ends this job when it ends.
set -u
address=$(scontrol show node "$SLURMD_NODENAME" 2>/dev/null | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${{address:-$SLURMD_NODENAME}}

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
            pulse=shlex.quote(str(pulse)),
            look_s=PULSE_LOOK_S,
            looks=LOOKS,
            srun=shlex.join(srun),
            command=shlex.join([*command, *plan.arguments]) + (' --host "$address"' if plan.serves else ""),
        )
    )
    script.chmod(0o700)
    return script


PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
PULSE = "launcher.pulse"  # in the folder of all plans: as long as it changes, the launcher lives
PULSE_S = 5.0
LOOK_S = 2.0  # between two questions how the jobs are, all in one
GONE_S = 15.0  # for a job to be gone, once it is killed
WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,:/@%+=&|()\[\]*!~-]*$"  # a value that is nothing but a value
PATH = r"^[A-Za-z0-9_./~][^\x00-\x1f\x7f]*$"
EVERYWHERE = ("0.0.0.0", "::", "")


class SlurmLauncher(Launcher):
    """Jobs of a SLURM cluster: one for each process."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        account: str | None = Field(None, pattern=WORD, description="who is charged")
        partition: str | None = Field(None, pattern=WORD, description="where the jobs run")
        qos: str | None = Field(None, pattern=WORD, description="quality of service")
        constraint: str | None = Field(None, pattern=WORD, description="what a node must have, such as a100")
        reservation: str | None = Field(None, pattern=WORD, description="the name of a reservation")
        time: str | None = Field(None, pattern=r"^(\d[\d:-]*|UNLIMITED)$", description="of one job, such as 04:00:00")
        gpus: str | None = Field(None, pattern=WORD, description="of one process: 1, a100:2")
        cpus: int | None = Field(None, ge=1, le=4096, description="cores of one process")
        mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description="memory of one process, such as 64G")
        container: str | None = Field(None, pattern=PATH, description="an image for srun --container-image (pyxis)")
        mounts: str | None = Field(None, pattern=PATH, description="its mounts, FROM:TO,…")
        python: str | None = Field(None, pattern=PATH, description="the Python there; default this one, or python3")
        folder: str | None = Field(None, pattern=PATH, description="where both hosts see the same files")
        pending: float = Field(86_400.0, gt=0, description="seconds that a job may wait in the queue")

    name = "slurm"
    bind = "0.0.0.0"  # the script names the node's own address in its place
    options: Options

    def __init__(
        self, options: BaseModel | None = None, command: Sequence[str] | None = None, look_s: float = LOOK_S
    ) -> None:
        """`command` and `look_s` are for tests."""
        super().__init__(options)
        self.shared = Path(self.options.folder or "gpuinfer-fleet").expanduser().absolute()
        self._command = tuple(command) if command else self._program
        self._look_s = look_s
        self._jobs: dict[str, SlurmJob] = {}  # those of which it is not known how they ended
        self._pulses: set[Path] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _program(self) -> tuple[str, ...]:
        """The one file itself, where it is that: the node unpacks it into a cache of its own."""
        ours = installation.one_file()
        if ours is not None and not self.options.python and not self.options.container:
            return (str(ours),)
        python = self.options.python or ("python3" if self.options.container else sys.executable)
        return python, "-m", "gpuinfer"

    def check(self) -> None:
        lacking = [program for program in PROGRAMS if shutil.which(program) is None]
        if lacking:
            raise UsageError(
                f"there is no SLURM here: no {' and no '.join(lacking)} to be found. Run this on a login node of the "
                "cluster, or leave --launcher slurm out."
            )
        if self.options.mounts and not self.options.container:
            raise UsageError("-L mounts goes with -L container=IMAGE. Give both, or leave it out.")
        try:
            ended = children.run_program(["squeue", "--noheader", "--jobs=0"], LIMIT_S)
            why = "" if ended.code == 0 or NO_SUCH in error_output(ended) else error_output(ended)
        except OSError as error:
            why = str(error)
        if why:
            raise UsageError(f"SLURM does not answer here: {why}\nAsk `sinfo`, or leave --launcher slurm out.")

    def reached_at(self) -> str:
        return base.own_address()

    @property
    def notices(self) -> Sequence[str]:
        full, short = socket.getfqdn(), socket.gethostname()
        where = f"{getpass.getuser()}@{short if full.startswith('localhost') else full}"
        return (f"from your own machine: ssh -N -L {{port}}:127.0.0.1:{{port}} {where}",)

    async def launch(self, plan: ProcessPlan) -> SlurmJob:
        if plan.devices is not None:
            raise UsageError("--gpus names devices of this machine, and SLURM chooses them. Say -L gpus=1 instead.")
        pulse, own = plan.folder / PULSE, self.options
        self._pulses.add(pulse)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
        given = {"cpus-per-task": own.cpus, "container-image": own.container, "container-mounts": own.mounts}
        srun = ["--ntasks=1", *(f"--{name}={value}" for name, value in given.items() if value is not None)]
        script = write_batch_script(plan, pulse, self._command, srun)
        begins = plan.log.stat().st_size if plan.log.exists() else 0
        given = {name: getattr(own, name) for name in ("account", "partition", "qos", "constraint", "time")}
        given |= {"reservation": own.reservation, "gpus": own.gpus, "mem": own.mem, "cpus-per-task": own.cpus}
        output = str(plan.log).replace("%", "%%")  # for SLURM a percent sign begins a replacement
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        # not requeued: a job that ends is replaced by its supervisor, which then knows of it
        words += ["--no-requeue", "--nodes=1", "--ntasks=1", "--open-mode=append", f"--output={output}"]
        words += [f"--job-name=gpuinfer-{plan.name}", str(script)]
        environment = local.process_environment(children.with_our_path(), plan.threads)
        ended = await _run(["sbatch", "--parsable", *words], environment)
        number = ended.out.decode("utf-8", "replace").strip().partition(";")[0]
        if ended.code != 0 or not number.isdigit():
            cure = "Correct what it names (-L account=, partition=, …)."
            raise WorkError(f"sbatch refused the job: {error_output(ended)}\n{cure}")
        job = SlurmJob(plan, number, begins, self.options.pending, self._look)
        if not self._jobs:
            atexit.register(self._leave)
        self._jobs[number] = job
        log.info("%s is job %s", plan.name, number)
        return job

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
        """Learn how all jobs are. One of which it is known how it ended is not asked for any more."""
        if not self._jobs:
            return
        jobs = list(self._jobs)
        ended = await _run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={FORM}"])
        if ended.code != 0 and NO_SUCH not in error_output(ended):  # which says nothing about the jobs
            log.info("squeue does not tell how the jobs are: %s", error_output(ended))
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

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GONE_S)
        self._tasks = []
        if self._jobs:
            await _cancel(*self._jobs)
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

    def learn(self, job: SlurmJobState) -> None:
        """How it is now."""
        if job == self.job:
            return
        if job.waits and job.reason not in ("", "None"):
            log.warning("%s waits in the queue of SLURM (job %s): %s", self.plan.name, self.number, job.reason)
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
        return not self.job.ended

    async def terminate(self, within_s: float) -> None:
        if self.alive and not self.job.waits:
            await _cancel("--signal=TERM", self.number)
            await self._gone(within_s)
        await self.kill()

    async def kill(self) -> None:
        if self.alive:
            await _cancel("--signal=KILL", "--full", self.number)
            await _cancel(self.number)  # also one that waits
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
