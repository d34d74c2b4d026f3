"""Processes as steps of a SLURM job that runs: `sbatch --wrap 'gpuinfer serve --launcher srun --replicas 4 …'`, or in
`salloc`. Nothing is submitted: each process is an `srun` with its share of the job's GPUs and cores, a child of this
process, and ends with it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gpuinfer.errors import UsageError
from gpuinfer.host import children
from gpuinfer.launchers import local, slurm_base
from gpuinfer.launchers.base import ProcessPlan
from gpuinfer.launchers.local import LocalProcess
from gpuinfer.launchers.slurm_base import SlurmBase, SlurmOptions

log = logging.getLogger(__name__)

PASSED = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_JWT", "SLURM_WORKING_CLUSTER")  # what srun finds its job by
PLACED_S = 5.0  # after which a message names one that waits for its place
LEAVING_S = 5.0  # for srun to end a step and itself
OWN_STEPS = 4_294_967_280  # numbers from here on are SLURM's own steps: batch, interactive, extern


class NodeShare(NamedTuple):
    """What a job holds of one node."""

    cpus: int
    gpus: int
    mem_mb: int  # 0: SLURM counts no memory


@dataclass(frozen=True, slots=True)
class Allocation:
    """The job in which this process runs. `cpus_per_task` and `tasks`: None where it does not say."""

    job: str
    nodes: tuple[NodeShare, ...]
    cpus_per_task: int | None = None
    tasks: int | None = None

    @classmethod
    def of(cls, variables: Mapping[str, str], show: Callable[[str], str]) -> Allocation:
        """From the variables that SLURM sets, and what `scontrol show job --details` says of a job: `show`.

        Raises `UsageError` where there is no job, or this process is a step of it itself.
        """
        job = variables.get("SLURM_JOB_ID")
        if not job:
            raise UsageError(
                "--launcher srun starts processes inside a job of SLURM, and this is none (SLURM_JOB_ID is not set). "
                "Put the command into sbatch --wrap '…' or run it in salloc; --launcher slurm submits jobs itself."
            )
        step = variables.get("SLURM_STEP_ID", "")
        if step.isdigit() and int(step) < OWN_STEPS:
            raise UsageError(
                f"this process is step {step} of job {job} itself, and holds the cores that its processes would get. "
                "Leave out the srun before gpuinfer: sbatch --wrap 'gpuinfer …' --launcher srun starts steps itself."
            )
        nodes = [share for line in show(job).splitlines() for share in _node_shares(line)]
        if not nodes:
            raise UsageError(
                f"SLURM knows no nodes of job {job} (SLURM_JOB_ID). Has it ended? Ask `scontrol show job`."
            )
        numbers = (variables.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_NTASKS"))
        return cls(job, tuple(nodes), *(int(text) if text.isdigit() else None for text in numbers))

    @property
    def least(self) -> NodeShare:
        return min(self.nodes)

    def cores_for(self, gpus: int) -> int:
        """Cores of one process with so many devices: its share of a node's by devices, else what the job gives to a
        task, else a task's share of the node, or all of it.
        """
        if gpus and self.least.gpus:
            return max(1, self.least.cpus * gpus // self.least.gpus)
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        return max(1, self.least.cpus // (-(-self.tasks // len(self.nodes)) if self.tasks else 1))

    def places(self, cpus: int, gpus: int) -> int:
        """Processes that there is room for at once."""
        return sum(min(node.cpus // cpus, node.gpus // gpus if gpus else node.cpus) for node in self.nodes)


HELD = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
GPUS = re.compile(r"\bgpu(?::[^:(,]+)?:(\d+)\(")


def _node_shares(line: str) -> list[NodeShare]:
    """Of `Nodes=n[1-2] CPU_IDs=0-7 Mem=64000 GRES=gpu:a100:2(IDX:0-1)`, for each of its nodes; none of other lines."""
    if (found := HELD.search(line)) is None:
        return []
    nodes, cpus, mem, gres = found.groups()
    share = NodeShare(max(1, _count(cpus)), sum(map(int, GPUS.findall(gres))), int(mem))
    inside = re.findall(r"\[([^\]]*)\]", nodes)
    others = [one for one in re.sub(r"[^,]*\[[^\]]*\][^,]*", "", nodes).split(",") if one]
    return [share] * (sum(map(_count, inside)) + len(others))


def _count(numbers: str) -> int:
    """Of `0-3,8` five."""
    ends = [part.partition("-") for part in numbers.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def show_job(job: str) -> str:
    ended = children.run_program(["scontrol", "show", "job", "--details", job], slurm_base.LIMIT_S)
    return ended.out.decode("utf-8", "replace")


class SrunLauncher(SlurmBase):
    """Steps of the SLURM job in which this runs: one for each process, with its share of the job's GPUs and cores."""

    class Options(SlurmOptions):
        pass

    name = "srun"
    programs = ("srun", "squeue", "scancel", "scontrol")
    options: Options

    @cached_property
    def _allocation(self) -> Allocation:
        return Allocation.of(os.environ, show_job)

    def check(self) -> None:
        super().check()
        allocation = self._allocation
        if not self.capacity:
            raise UsageError(
                f"a process with {self._cpus} cores and {self._gpus} GPUs has no room on a node of job "
                f"{allocation.job}, which has {allocation.least.cpus} cores and {allocation.least.gpus} GPUs there. "
                "Give smaller -L cpus= or -L gpus=, or a larger job."
            )

    @property
    def capacity(self) -> int:  # type: ignore[override]
        return self._allocation.places(self._cpus, self._gpus)

    @property
    def _gpus(self) -> int:
        """Of one process: by default one where the job has any."""
        if self.options.gpus is None:
            return min(1, self._allocation.least.gpus)
        count = self.options.gpus.rpartition(":")[2]
        return int(count) if count.isdigit() else 1

    @property
    def _cpus(self) -> int:
        return self.options.cpus or self._allocation.cores_for(self._gpus)

    @property
    def _memory(self) -> str | None:
        """A step takes all of the job's memory unless it says how much: the next one would wait for it."""
        node = self._allocation.least
        if self.options.mem is not None or not node.mem_mb:
            return self.options.mem
        return f"{max(1, node.mem_mb * self._cpus // node.cpus)}M"

    async def launch(self, plan: ProcessPlan) -> SlurmStep:
        self.refuse_named_devices(plan)
        allocation, gpus = self._allocation, self._gpus
        placed = plan.folder / f"{plan.name}.{plan.attempt}.step"
        options: dict[str, object] = {"cpus_per_task": self._cpus, "mem": self._memory, "export": "ALL"}
        if gpus:
            options["gpus"] = self.options.gpus or gpus
        elif allocation.least.gpus:
            options["gres"] = "none"
        srun = self.srun_words("--exact", job_name=f"gpuinfer-{plan.name}", **options)
        words = ("srun", *srun, "sh", "-c", _shell(plan, placed), "sh", *self.command, *plan.arguments)
        variables = local.process_environment(children.with_our_path(), plan.threads)
        variables = {name: value for name, value in variables.items() if _belongs_to_step(name)}
        return SlurmStep(
            plan, *local.start_logged(plan, words, variables), allocation.job, placed, self.options.pending
        )


def _shell(plan: ProcessPlan, placed: Path) -> str:
    """What a step does: say which it is, and become the words that follow."""
    says = f'echo "$SLURM_STEP_ID" > {shlex.quote(str(placed))}'
    if plan.serves:
        return f'{says}\n{slurm_base.OWN_ADDRESS}\nexec "$@" --host "$address"'
    return f'{says}\nexec "$@"'


def _belongs_to_step(variable: str) -> bool:
    """The job's own size (SLURM_NTASKS, SLURM_GPUS …) is no size of a step, for which srun would take it."""
    return not variable.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")) or variable in PASSED


class SlurmStep(LocalProcess):
    """A process that is a step of this job. Its `srun` is a child of this process, and leaves with it."""

    def __init__(
        self,
        plan: ProcessPlan,
        process: subprocess.Popen[bytes],
        begins: int,
        job: str,
        placed: Path,
        pending_s: float,
    ) -> None:
        super().__init__(plan, process, begins)
        self._job, self._placed, self._pending_s = job, placed, pending_s

    @property
    def step(self) -> str:
        """JOB.STEP once it runs; empty while it waits for its place."""
        try:
            number = self._placed.read_text().strip()
        except OSError:
            return ""
        return f"{self._job}.{number}" if number else ""

    async def ready(self, within_s: float) -> tuple[str, int]:
        """`within_s` counts from when the step has its place."""
        for seconds in (min(PLACED_S, self._pending_s), self._pending_s - PLACED_S):
            if await local.wait_until(lambda: bool(self.step) or not self.alive, max(0.0, seconds)):
                return await super().ready(within_s)
            log.warning(
                "%s waits for its place: the steps of job %s hold all its cores or GPUs", self.called, self._job
            )
        raise self.failure(f"waited {self._pending_s:g} s for its place, which -L pending bounds")

    @property
    def suspended(self) -> bool:
        return False  # srun may run on another host than the step

    @property
    def called(self) -> str:
        return f"{self.plan.name} (step {step})" if (step := self.step) else self.plan.name

    async def terminate(self, within_s: float) -> None:
        """The signal goes to the step: one to srun would kill it."""
        if self.alive and (step := self.step):
            await slurm_base.cancel("--signal=TERM", step)
            await local.wait_until(lambda: not self.alive, within_s)
        await self.kill()

    async def kill(self) -> None:
        if self.alive:
            if step := self.step:
                await slurm_base.cancel("--signal=KILL", step)
            else:
                self._process.terminate()  # srun takes its request for a step back
            await local.wait_until(lambda: not self.alive, LEAVING_S)
        await super().kill()
        self._placed.unlink(missing_ok=True)
