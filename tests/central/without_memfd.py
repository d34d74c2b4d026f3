"""A program on a system without memfd: its server and its client share files that have no name.

The server process imports this file too, so that neither has it.
"""

from __future__ import annotations

import os
from pathlib import Path

if hasattr(os, "memfd_create"):
    del os.memfd_create

import numpy as np
from programs import named, wrong

from gpuinfer.central.server import CentralServer


def main() -> None:
    before = set(Path("/dev/shm").iterdir())
    with CentralServer("models:tagged", inputs=8, in_flight=1, threads=1) as server, server.client() as client:
        block = client.block(100)
        block[:] = named(1, 1, 100)
        faults = [wrong(block, client.evaluate(block)), wrong(named(1, 2, 3), client.evaluate(named(1, 2, 3)))]
        maps = Path("/proc/self/maps").read_text()
        left = {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("tmp")}
    print({"faults": faults, "memfd": "memfd:gpuinfer" in maps, "left": len(left), "rows": int(np.sum(block[:, 0]))})


if __name__ == "__main__":
    main()
