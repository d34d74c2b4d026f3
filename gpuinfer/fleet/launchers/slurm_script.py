"""The batch script of one replica."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gpuinfer.fleet.launchers.launcher import ReplicaPlan

LOOK_S = 10  # between two looks at the fleet's pulse
LOOKS = 12  # at one that stands still, after which the fleet is gone: file systems of clusters show news late

# The replica listens at the address by which SLURM knows the node, where the fleet reaches it.
SCRIPT = """\
#!/bin/bash
# {name} of a gpuinfer fleet, which ends this job when it ends.
set -u
address=$(scontrol show node "$SLURMD_NODENAME" 2>/dev/null | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${{address:-$SLURMD_NODENAME}}

leave_with_the_fleet() {{
    local seen="" same=0 now
    while kill -0 $$; do
        read -rt {look_s} <> <(:)
        now=$(<{pulse})
        if [ "$now" = "$seen" ]; then same=$((same + 1)); else same=0; seen=$now; fi
        if [ "$same" -ge {looks} ]; then
            echo "the fleet that started this job is gone, so it ends"
            scancel "$SLURM_JOB_ID"
            return
        fi
    done
}} 2>/dev/null
leave_with_the_fleet &

srun {srun} {command} --host "$address"
code=$?
kill %1
exit $code
"""


def write(plan: ReplicaPlan, pulse: Path, command: Sequence[str], srun: Sequence[str]) -> Path:
    """The script, in the plan's folder. `command` runs gpuinfer there; whatever is in it stands for itself."""
    script = plan.folder / f"{plan.name}.sbatch"
    script.write_text(
        SCRIPT.format(
            name=plan.name,
            pulse=shlex.quote(str(pulse)),
            look_s=LOOK_S,
            looks=LOOKS,
            srun=shlex.join(srun),
            command=shlex.join([*command, *plan.arguments]),
        )
    )
    script.chmod(0o700)
    return script
