"""A fleet of stand-in replicas, as a program: what `gpuinfer serve --replicas` does, without a model.

    python tests/fleet/standin_fleet.py FOLDER '{"replicas": 3, "standin": {"answer_s": 0.01}}'

Writes FOLDER/ready.json once it serves. The admin key is `fleet_programs.ADMIN_KEY`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fleet_programs

from gpuinfer.cli import serve
from gpuinfer.fleet.plan import Scaling
from gpuinfer.fleet.supervisor import Fleet
from gpuinfer.host import signals
from gpuinfer.host.files import write_whole
from gpuinfer.http.access import Access, Keys


def main(folder: Path, given: dict[str, object]) -> int:
    if scaling := given.pop("scaling", None):
        given["scaling"] = Scaling(**scaling)
    plan = fleet_programs.plan(access=Access(admin=Keys([fleet_programs.ADMIN_KEY])), **given)

    def say(fleet: Fleet) -> None:
        told = {"host": plan.host, "port": fleet.port, "pid": os.getpid(), "folder": fleet.logs}
        write_whole(folder / "ready.json", json.dumps(told).encode())

    signals.own()
    tell = lambda news: print(news, flush=True)  # noqa: E731
    return serve.run(plan, fleet_programs.launcher(), say, tell)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
