"""Stands in for the commands of a loop: writes down what it was asked for, and leaves the report that was wanted.

usage: python loop_command.py JOURNAL WAY WORDS…; WAY: done, or how it ends: fails, refuses, stops, dies, hangs
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

ENDS = {
    "fails": (1, "gpuinfer: the disk is full. Make room."),
    "refuses": (2, "gpuinfer: no game named 'blab'."),
    "stops": (3, ""),
}


def main() -> None:
    journal, way, *words = sys.argv[1:]
    given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    if way == "hangs":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    with Path(journal).open("a") as file:
        print(json.dumps({"command": words[0], "pid": os.getpid(), **given}), file=file, flush=True)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "hangs":
        time.sleep(60)
    if way in ENDS:
        code, said = ENDS[way]
        print(said, file=sys.stderr)
        sys.exit(code)
    strength = {"score": 0.75, "score_ci95": [0.7, 0.8], "elo": 190.8, "elo_ci95": [147.2, 240.8], "games": 400}
    Path(given["json"]).write_text(
        json.dumps(
            {
                "status": "done",
                "setup_s": 1.0,
                "wall_s": 2.0,
                "progress": {"done": 30},
                "throughput": {"games_per_min": 900.0},
                "training": {"loss": {"total": 2.5}, "validation": None} if words[0] == "train" else None,
                "strength": strength if "opponent-model" in given else None,
                "environment": {"gpuinfer": "0"},
            }
        )
    )


if __name__ == "__main__":
    main()
