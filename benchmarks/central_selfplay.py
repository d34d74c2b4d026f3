"""Self-play with one server for two workers, against the roofline and against no server at its best settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from selfplay import GAME, Case, games_for, run

CENTRAL = ["--backend", "central", "--workers", "2"]
INPROCESS = {  # what somebody who looks for the best setting without a server would try
    "2 workers": ["--workers", "2"],
    "1 worker": ["--workers", "1"],
    "1 worker, 2 forwards": ["--workers", "1", "-B", "in_flight=2", "-B", "threads=1"],
    "2 workers, 1,024 games": ["--workers", "2", "--games-in-flight", "1024"],
}
LEAST_GAMES = 400  # fewer cannot fill batches of a thousand rows
FIRST_GUESS = {"blobnet": 15.0, "blobnet-small": 500.0}  # games a second


class Contest:
    """One model, all settings, interleaved; every run plays the same number of games."""

    def __init__(self, model: str) -> None:
        self.rates: dict[str, list[float]] = {name: [] for name in ("central", *INPROCESS)}
        self._model = model
        self._games = 0

    def _case(self, flags: Sequence[str]) -> Case:
        return Case([*GAME, "--model", self._model, *flags], "games_per_min", 0.0, FIRST_GUESS[self._model])

    def once(self, seconds: float) -> dict[str, float]:
        """One round of all settings: how central did, and the games a minute of each."""
        central = self._case(CENTRAL)
        self._games = self._games or max(LEAST_GAMES, games_for(central, seconds))
        report = run(central, self._games)
        self.rates["central"].append(report["throughput"]["games_per_min"])
        for name, flags in INPROCESS.items():
            self.rates[name].append(run(self._case(flags), self._games)["throughput"]["games_per_min"])
        return {
            "efficiency": report["roofline"]["efficiency"],
            "mean batch": report["batches"]["rows_mean"],
            **{f"{name} games/min": rates[-1] for name, rates in self.rates.items()},
        }

    def best(self) -> str:
        """The inprocess setting with the highest median."""
        return max(INPROCESS, key=lambda name: statistics.median(self.rates[name]))

    def ratios(self) -> list[float]:
        """Central over the best inprocess setting, round by round."""
        return [ours / theirs for ours, theirs in zip(self.rates["central"], self.rates[self.best()], strict=True)]
