"""Records the live view of a real run, about half way through it, as an SVG for the README.

    python benchmarks/record_live.py docs/live.svg selfplay games=2000 model=blobnet-small

The options are those of the workload's flags, and `backend`, `device`, `dtype`, … as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpuinfer.cli.building import build, merge
from gpuinfer.runtime.run import Update, run
from gpuinfer.screen.display import frame, svg
from gpuinfer.screen.view import Pace

WIDTH, HEIGHT = 92, 30
HALF_WAY = 0.5


class Camera:
    """Keeps the last view of the first half of the run."""

    def __init__(self, title: str) -> None:
        self.picture = ""
        self._title = title
        self._pace = Pace()

    def update(self, update: Update) -> None:
        self._pace.add(update)
        total = update.progress.total
        if total and update.progress.done <= HALF_WAY * total:
            view = frame(update, self._pace.rates(), self._title, WIDTH, HEIGHT)
            self.picture = svg(view, f"gpuinfer {self._title.partition(' ')[0]}", WIDTH)


def main(target: Path, workload: str, *given: str) -> None:
    merged = merge(workload, dict(pair.split("=", 1) for pair in given))
    plan = build(workload, merged)
    camera = Camera(f"{workload} · {merged.common.backend} · {merged.common.strategy}")
    run(plan.workload, plan.backend, plan.strategy, settings=plan.settings, on_update=camera.update)
    target.write_text(camera.picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
