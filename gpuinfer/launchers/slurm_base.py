"""What processes on SLURM have in common, whether each is a job (`slurm`) or a step of a job that runs (`srun`): the
options, how SLURM's own programs are run, each with a timeout, and the address at which a process listens.
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children, installation
from gpuinfer.launchers import base
from gpuinfer.launchers.base import Launcher, ProcessPlan

LIMIT_S = 30.0  # for one of its programs: a controller that is overloaded answers late
NO_SUCH = "Invalid job id"
EVERYWHERE = ("0.0.0.0", "::", "")
WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,:/@%+=&|()\[\]*!~-]*$"  # a value that is nothing but a value
PATH = r"^[A-Za-z0-9_./~][^\x00-\x1f\x7f]*$"

OWN_ADDRESS = """\
address=$(scontrol show node "$SLURMD_NODENAME" 2>/dev/null | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${address:-$SLURMD_NODENAME}"""
"""Shell: the address by which SLURM knows the node, where others reach a process that serves."""


def error_output(ended: children.FinishedProgram) -> str:
    """What a program of SLURM's complained of, in its own words."""
    if ended.code is None:
        return f"it did not answer within {LIMIT_S:g} s"
    lines = [line.strip() for line in ended.err.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])[:600] or f"it ended with {ended.code} and said nothing"


async def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> children.FinishedProgram:
    """Raises `WorkError` where there is no such program."""
    try:
        return await asyncio.to_thread(children.run_program, command, LIMIT_S, b"", environment)
    except OSError as error:
        raise WorkError(f"{command[0]} cannot be run: {error.strerror}. Is SLURM still installed here?") from None


async def cancel(*arguments: str) -> None:
    """Whether a job or step was there to be cancelled does not matter."""
    await run(["scancel", "--quiet", *arguments])


class SlurmOptions(BaseModel):
    """Options of both."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: str | None = Field(None, pattern=WORD, description="of one process: 1, a100:2")
    cpus: int | None = Field(None, ge=1, le=4096, description="cores of one process")
    mem: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description="memory of one process, such as 64G")
    container: str | None = Field(None, pattern=PATH, description="an image for srun --container-image (pyxis)")
    mounts: str | None = Field(None, pattern=PATH, description="its mounts, FROM:TO,…")
    python: str | None = Field(None, pattern=PATH, description="the Python there; default this one, or python3")
    folder: str | None = Field(None, pattern=PATH, description="where both hosts see the same files")
    pending: float = Field(86_400.0, gt=0, description="seconds that a process may wait for its place")


class SlurmBase(Launcher):
    """A launcher by SLURM's programs."""

    programs: Sequence[str]  # those that it runs
    bind = "0.0.0.0"  # a shell on the node names the node's own address in its place
    options: SlurmOptions

    def __init__(self, options: BaseModel | None = None, command: Sequence[str] | None = None) -> None:
        """`command` is for tests: what a plan's arguments follow."""
        super().__init__(options)
        self.shared = Path(self.options.folder or "gpuinfer-fleet").expanduser().absolute()
        self.command = tuple(command) if command else self._program

    @property
    def _program(self) -> tuple[str, ...]:
        """The one file itself, where it is that: the node unpacks it into a cache of its own."""
        ours = installation.one_file()
        if ours is not None and not self.options.python and not self.options.container:
            return (str(ours),)
        python = self.options.python or ("python3" if self.options.container else sys.executable)
        return python, "-m", "gpuinfer"

    def check(self) -> None:
        lacking = [program for program in self.programs if shutil.which(program) is None]
        if lacking:
            raise UsageError(
                f"there is no SLURM here: no {' and no '.join(lacking)} to be found. Run this on a login node of the "
                f"cluster, or leave --launcher {self.name} out."
            )
        if self.options.mounts and not self.options.container:
            raise UsageError("-L mounts goes with -L container=IMAGE. Give both, or leave it out.")
        try:
            ended = children.run_program(["squeue", "--noheader", "--jobs=0"], LIMIT_S)
            why = "" if ended.code == 0 or NO_SUCH in error_output(ended) else error_output(ended)
        except OSError as error:
            why = str(error)
        if why:
            raise UsageError(f"SLURM does not answer here: {why}\nAsk `sinfo`, or leave --launcher {self.name} out.")

    def refuse_named_devices(self, plan: ProcessPlan) -> None:
        if plan.devices is not None:
            raise UsageError("--gpus names devices of this machine, and SLURM chooses them. Say -L gpus=1 instead.")

    def reached_at(self) -> str:
        return base.own_address()

    @property
    def notices(self) -> Sequence[str]:
        full, short = socket.getfqdn(), socket.gethostname()
        where = f"{getpass.getuser()}@{short if full.startswith('localhost') else full}"
        return (f"from your own machine: ssh -N -L {{port}}:127.0.0.1:{{port}} {where}",)

    def srun_words(self, *flags: str, **more: object) -> list[str]:
        """One task, in the container if there is one. `more`: options of srun's, by name; None: leave it out."""
        options = {"container-image": self.options.container, "container-mounts": self.options.mounts, **more}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ["--nodes=1", "--ntasks=1", *flags, *words]
