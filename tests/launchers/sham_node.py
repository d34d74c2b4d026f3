"""A program that stands for a node where launchers are tried: it says where it is, and leaves on SIGTERM.

`sham_node.py [--stubborn] --leave-with-parent`; other flags mean nothing to it.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def main() -> None:
    def leave(*_: object) -> None:
        print("the sham node leaves in order", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--stubborn" in sys.argv else leave)
    where = os.environ.get("SLURMD_NODENAME", "")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    print(f"the sham node {os.getpid()} is up on {where} with devices {devices} and cores {cores}", flush=True)
    if "--leave-with-parent" in sys.argv:
        sys.stdin.buffer.read()  # until its launcher is gone
    else:
        time.sleep(600)


if __name__ == "__main__":
    main()
