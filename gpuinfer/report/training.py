"""What a run of games for training adds to the report, from the facts that the workload tells of itself.

Of the facts (`Progress.facts`) that it knows, those that apply: `calls` (answers that came), `games_failed`,
`groups_in_flight` (on average), `environment_share` and `reference_share` (of a game's, and a group's time). With a
trainer: `steps`, `trained_groups`, `wait_s`, `train_s`, `absent_s`, `adapter_load_s`, `step_rollout_s` (sums over all
steps), `buffer_depth`, `buffer_batch`, `buffer_waiting`, `groups_dropped`, `max_staleness`, `staleness_mean`,
`staleness_max`, `policy_version`, `adapter_loads`, `kl`, `kl_coefficient`, and `stall: KIND` for each kind of stall,
the seconds that it cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.report.evidence import Lane, busy_s, is_forward

STALL = "stall: "  # before a kind


def of_training(
    facts: Mapping[str, float], counts: Mapping[str, float], lanes: Sequence[Lane], wall_s: float
) -> dict[str, Any] | None:
    """The report's `rollouts`; None of a run that plays no games for training. `counts` are of this run alone."""
    if "calls" not in facts:
        return None
    inference_s = inference(lanes, wall_s)
    games, calls, drawn = counts.get("games", 0.0), facts["calls"], counts.get("output_tokens", 0.0)
    return {
        "calls": calls,
        "games_failed": facts.get("games_failed", 0.0),
        "groups_in_flight": facts.get("groups_in_flight", 0.0),
        "tokens_per_game": drawn / games if games else None,
        "tokens_per_call": drawn / calls if calls else None,
        "inference_s": inference_s,
        **{f"{way}_tokens_per_s": _rates(counts.get(f"{way}_tokens", 0.0), wall_s, inference_s) for way in WAYS},
        "environment_share": min(1.0, facts.get("environment_share", 0.0)),
        "reference_share": min(1.0, facts.get("reference_share", 0.0)),
        "adapter_loads": facts.get("adapter_loads", 0.0),
        "trainer": _trainer(facts) if "steps" in facts else None,
    }


WAYS = ("input", "output")


def inference(lanes: Sequence[Lane], wall_s: float) -> float:
    """Seconds in which the busiest engine was at work."""
    return min(wall_s, max((busy_s([lane]) for lane in lanes if is_forward(lane["name"])), default=0.0))


def _rates(tokens: float, wall_s: float, inference_s: float) -> dict[str, float | None]:
    return {
        "wall": tokens / wall_s if wall_s > 0 else 0.0,
        "inference": tokens / inference_s if inference_s > 0 else None,
    }


def _trainer(facts: Mapping[str, float]) -> dict[str, Any]:
    def told(*names: str) -> dict[str, float]:
        return {name: facts.get(name, 0.0) for name in names}

    return {
        **told("steps", "trained_groups", "wait_s", "train_s", "absent_s", "adapter_load_s"),
        "wait_share": facts.get("wait_s", 0.0) / attended_s(facts) if attended_s(facts) > 0 else 0.0,
        "version": facts.get("policy_version", 0.0),
        "buffer": {name: facts.get(f"buffer_{name}", 0.0) for name in ("depth", "batch", "waiting")},
        "groups_dropped": facts.get("groups_dropped", 0.0),
        "staleness": {
            "mean": facts.get("staleness_mean", 0.0),
            "max": facts.get("staleness_max", 0.0),
            "allowed": facts.get("max_staleness", 0.0),
        },
        "kl": facts.get("kl"),
        "kl_coefficient": facts.get("kl_coefficient"),
        "stalls": stalls(facts),
    }


def attended_s(facts: Mapping[str, float]) -> float:
    """Seconds of all steps in which a trainer was there."""
    return sum(facts.get(name, 0.0) for name in ("wait_s", "train_s", "adapter_load_s"))


def stalls(facts: Mapping[str, float]) -> dict[str, float]:
    """Kind → the share of the trainer's time that it cost, the largest first."""
    whole = attended_s(facts)
    found = {name.removeprefix(STALL): lost for name, lost in facts.items() if name.startswith(STALL)}
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return {kind: min(1.0, lost / whole) for kind, lost in ordered if whole > 0 and lost > 0}
