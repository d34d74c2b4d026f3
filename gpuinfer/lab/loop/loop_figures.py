"""The figures of a loop for trackers (`--track`): by iteration what came of its steps, and the loss by training step,
counted on from iteration to iteration, while the network is trained.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from gpuinfer.lab.loop.loop_runner import LoopPlan, LoopStep, Report, step_seconds
from gpuinfer.lab.loop.loop_summary import device_use, final_loss
from gpuinfer.report import plotting

LOOK_S = 2.0  # from one look at the curve to the next


def step_figures(step: LoopStep, report: Report, has_won: bool) -> dict[str, float]:
    """Of one step of an iteration that is done: `loop/score` and `loop/elo` of a match, `loop/loss` of a training."""
    found: dict[str, float | None] = {f"{step.kind}_s": step_seconds(report)}
    if step.kind == "games":
        found["games"] = report["progress"]["done"]
        found["games_per_min"] = report["throughput"].get("games_per_min")
        found |= {name: value for name, value in device_use(report).items() if name != "device"}
        if behind := report.get("staleness"):
            games = sum(behind.values())
            found["staleness_mean"] = sum(int(versions) * count for versions, count in behind.items()) / games
        found["resigned_share"] = (report.get("resignation") or {}).get("share")
    elif step.kind == "training":
        found["loss"] = final_loss(report)
    else:
        prefix = "gate_" if step.kind == "gate" else ""
        strength = report["strength"]
        low, high = strength["elo_ci95"]
        ratings = {"score": strength["score"], "elo": strength["elo"], "elo_low": low, "elo_high": high}
        found |= {f"{prefix}{name}": value for name, value in ratings.items()}
        if step.kind == "gate":
            found["gate_won"] = float(has_won)
    return {f"loop/{name}": float(value) for name, value in found.items() if value is not None}


class LossFollower:
    """Passes the rows of a training's loss curve to `on_figures` as they come, from a thread, until the context ends.
    None: there is no tracker.
    """

    def __init__(self, plan: LoopPlan, on_figures: Callable[[int, Mapping[str, float]], None] | None) -> None:
        self._plan, self._on_figures = plan, on_figures
        self._iteration = 0  # that is trained; 0: none
        self._read = 0  # rows of its curve so far
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpuinfer loss curve", daemon=True)

    def began(self, step: LoopStep) -> None:
        if step.kind == "training" and self._on_figures is not None:
            with self._lock:
                self._iteration, self._read = step.iteration, 0

    def ended(self, step: LoopStep) -> None:
        """Pass the last rows on."""
        if step.kind == "training":
            self._look()
            with self._lock:
                self._iteration = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LOOK_S)
        self._look()

    def _follow(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            if not self._iteration or self._on_figures is None:
                return
            rows = plotting.read_losses(self._plan.curve(self._iteration))
            before = (self._iteration - 1) * self._plan.training_steps
            for row in rows[self._read :]:
                figures = {f"train/{name}": float(value) for name, value in row.items() if name != "step"}
                self._on_figures(before + int(row["step"]), figures)
            self._read = len(rows)  # fewer than before where a training has gone on from its checkpoint
