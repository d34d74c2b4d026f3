"""What a run says of itself beside its counts, for the report and the verdict (`gpuinfer.report.training`)."""

from __future__ import annotations

import time

from gpuinfer.workloads.rollouts.playing import Player
from gpuinfer.workloads.rollouts.running import Tally


def facts(tally: Tally, player: Player, limit: int | None) -> dict[str, float]:
    """`groups_in_flight` is a mean, by Little's law; `groups_limited`: somebody has said how many there may be."""
    elapsed_s, counts = time.monotonic() - player.began, player.counts
    told = {
        "calls": float(counts.calls),
        "games_failed": float(tally.failed),
        "groups_in_flight": tally.group_s / elapsed_s if elapsed_s > 0 else 0.0,
        "environment_share": counts.environment_s / tally.game_s if tally.game_s else 0.0,
        "reference_share": tally.reference_s / whole if (whole := tally.played_s + tally.reference_s) else 0.0,
    }
    return told if limit is None else {**told, "groups_limited": float(limit)}
