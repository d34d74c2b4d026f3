"""The report's section on games for training, and the causes in trainer, environment and concurrency.

The section comes from the facts (`Progress.facts`) that apply: `calls` (answers), `games_failed`, `groups_in_flight`
(on average), `environment_share` and `reference_share` (of a game's, and a group's time). With a trainer: `steps`,
`trained_groups`, `wait_s`, `train_s`, `absent_s`, `adapter_load_s`, `step_rollout_s` (sums over all steps),
`buffer_depth`, `buffer_batch`, `buffer_waiting`, `groups_dropped`, `max_staleness`, `staleness_mean`, `staleness_max`,
`policy_version`, `adapter_loads`, `kl`, `kl_coefficient`, and `stall: KIND` for each kind of stall, the seconds that it
cost.

The causes come before those of the model's steps, which say how the engine used its requests; these say why there were
no more requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gpuinfer.config.options import OptionChange
from gpuinfer.report import thresholds
from gpuinfer.report.document import RolloutsSection, TokenRates, VerdictClass
from gpuinfer.report.evidence import Evidence, Lane, busy_s, is_forward
from gpuinfer.report.forecast import Gain, RunCase, Verdict

STALL = "stall: "  # before a kind


def of_training(
    facts: Mapping[str, float], counts: Mapping[str, float], lanes: Sequence[Lane], wall_s: float
) -> RolloutsSection | None:
    """The report's `rollouts`; None of a run that plays no games for training. `counts` are of this run alone."""
    if "calls" not in facts:
        return None
    inference_s = inference(lanes, wall_s)
    games, calls, drawn = counts.get("games", 0.0), facts["calls"], counts.get("output_tokens", 0.0)

    def rates(tokens: float) -> TokenRates:
        within = tokens / inference_s if inference_s > 0 else None
        return {"wall": tokens / wall_s if wall_s > 0 else 0.0, "inference": within}

    return {
        "calls": calls,
        "games_failed": facts.get("games_failed", 0.0),
        "groups_in_flight": facts.get("groups_in_flight", 0.0),
        "tokens_per_game": drawn / games if games else None,
        "tokens_per_call": drawn / calls if calls else None,
        "inference_s": inference_s,
        "input_tokens_per_s": rates(counts.get("input_tokens", 0.0)),
        "output_tokens_per_s": rates(drawn),
        "environment_share": min(1.0, facts.get("environment_share", 0.0)),
        "reference_share": min(1.0, facts.get("reference_share", 0.0)),
        "adapter_loads": facts.get("adapter_loads", 0.0),
        "trainer": _trainer(facts) if "steps" in facts else None,
    }


def inference(lanes: Sequence[Lane], wall_s: float) -> float:
    """Seconds in which the busiest engine was at work."""
    return min(wall_s, max((busy_s([lane]) for lane in lanes if is_forward(lane["name"])), default=0.0))


def _trainer(facts: Mapping[str, float]) -> Any:
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


def slow_trainer(case: RunCase) -> Verdict | None:
    """A trainer took the groups: either it was busy all the time, or a stall kept it waiting."""
    run, facts = case.run, case.run.facts
    if facts.get("steps", 0) < thresholds.LEAST_TRAINER_STEPS or attended_s(facts) <= 0:
        return None
    lost = stalls(facts)
    if sum(lost.values()) < thresholds.LOST_BY_STALLS:
        why = f"The trainer was at work {facts.get('train_s', 0.0) / attended_s(facts):.0%} of the time."
        advice = "Nothing needs mending in the rollouts: only a faster trainer makes more steps."
        return Verdict("trainer-bound", "idle", why, advice, healthy=True)
    kind, share = next(iter(lost.items()))
    others = "".join(f", {other} {part:.0%}" for other, part in lost.items() if other != kind and part >= 0.01)
    waited = facts.get("wait_s", 0.0) / attended_s(facts)
    why = f"{kind.capitalize()} cost {share:.0%} of the trainer's time{others}; it waited for rollouts {waited:.0%}."
    advice, change = CURES[kind](run) if kind in CURES else ("See the verdicts of --steps FILE.", None)
    return Verdict(cast(VerdictClass, kind), "idle", why, advice, change, Gain.up_to(1 / max(1 - share, 0.01)))


def slow_environment(case: RunCase) -> Verdict | None:
    """Games are in their environment while the engine has room."""
    run, share = case.run, case.run.facts.get("environment_share", 0.0)
    if "calls" not in run.facts or share < thresholds.SLOW_ENVIRONMENT or offered_share(run) >= thresholds.ENGINE_FULL:
        return None
    why = f"Games were in their environment, and asked for nothing, {share:.0%} of their time: {_asked(run)}."
    advice = "Make its calls quicker, or play more groups at once, so that others ask meanwhile."
    change = _more_groups(run)
    return Verdict("environment slow", "idle", why, advice, change, _gain(run, change))


def few_groups(case: RunCase) -> Verdict | None:
    """Fewer groups are played at once than the engine has room for, by an option."""
    run = case.run
    change = _more_groups(run)
    if "calls" not in run.facts or offered_share(run) >= thresholds.ENGINE_FULL or change is None:
        return None
    why = f"{run.facts['groups_in_flight']:,.1f} groups were played at once: {_asked(run)}."
    filling = ": so many fill the slots" if run.total is None or float(change.value) < run.total else ": all of them"
    advice = f"Play {change.value} groups at once{filling}."
    return Verdict("too little concurrency", "idle", why, advice, change, _gain(run, change))


def _gain(run: Evidence, change: OptionChange | None) -> Gain:
    """The gain of so many groups at once: at most what fills the slots, and all groups."""
    most = 1 / max(offered_share(run), 0.01)
    return Gain.up_to(most if change is None else min(most, float(change.value) / run.facts["groups_in_flight"]))


def offered_share(run: Evidence) -> float:
    """Rows asked for at once over slots, on average, by Little's law: those that wait for a slot count too."""
    slots = run.slots * max(1, len(run.forwards))
    return run.latency_s * run.requests / (run.wall_s * slots) if slots and run.wall_s > 0 else 0.0


def _asked(run: Evidence) -> str:
    slots = run.slots * max(1, len(run.forwards))
    return f"{offered_share(run) * slots:,.1f} rows were asked for at once, of {slots:,} slots"


def _more_groups(run: Evidence) -> OptionChange | None:
    """The number of groups that would fill the slots; None without a limit set, or without more groups to play."""
    limit = run.options.get("--", {}).get("groups_in_flight")
    under_way, rows = run.facts.get("groups_in_flight", 0.0), offered_share(run)
    if not run.facts.get("groups_limited") or not limit or under_way <= 0 or rows <= 0:
        return None
    wanted = math.ceil(under_way / rows)
    if wanted <= limit or (run.total is not None and run.total <= limit):
        return None
    return run.change("--", min(wanted, run.total or wanted), "groups_in_flight")


def _starvation(run: Evidence) -> tuple[str, OptionChange | None]:
    facts = run.facts
    rollout_s, train_s = (facts.get(name, 0.0) / facts["steps"] for name in ("step_rollout_s", "train_s"))
    batch = max(1.0, facts.get("buffer_batch", 1.0))
    depth = min(facts.get("buffer_depth", 1.0) / batch, facts.get("max_staleness", math.inf))
    told = (
        f"A step's rollouts took {rollout_s:.2g} s and its training {train_s:.2g} s: a buffer of depth {depth:g} "
        f"starves when rollouts take longer than {depth:g} × {train_s:.2g} s."
    )
    if train_s <= 0 or rollout_s > thresholds.MOST_DEPTH * train_s:
        return f"{told} No buffer hides that: train on larger batches, --batch-groups.", None
    wanted = max(math.ceil(rollout_s / train_s), math.floor(depth) + 1)
    change = run.change("--", round(wanted * batch), "buffer_depth")
    return f"{told} Let {wanted} batches be played ahead.", change


def _reference(run: Evidence) -> tuple[str, OptionChange | None]:
    inline = run.options.get("--", {}).get("reference") == "inline"
    if inline:
        return "Let the pass go beside play.", run.change("--", "deferred", "reference")
    smaller = "A smaller --ref-model, or fewer" if run.options.get("--", {}).get("ref_model") else "Fewer"
    return f"{smaller} tokens a game.", None


def _concurrency(run: Evidence) -> tuple[str, OptionChange | None]:
    change = _more_groups(run)
    many = f"Play {change.value} groups at once: so many fill the slots." if change else "Play more groups at once."
    return many, change


def _engine(run: Evidence) -> tuple[str, OptionChange | None]:
    replicas = run.options.get("-B", {}).get("replicas")
    another = f"More replicas than {replicas}" if replicas else "Another engine (--backend fleet -B replicas=2)"
    return f"{another}, a smaller model, or fewer tokens a game.", None


CURES: Mapping[str, Callable[[Evidence], tuple[str, OptionChange | None]]] = {
    "starvation": _starvation,
    "reference pass": _reference,
    "too little concurrency": _concurrency,
    "adapter load": lambda run: ("Train on more groups at a time: --batch-groups; adapters on a local disk.", None),
    "cold start": lambda run: ("Nothing needs mending: it is paid once, and by a longer run the less.", None),
    "constraint": lambda run: ("Lists of what is legal cost least, patterns and grammars more.", None),
    "engine saturated": _engine,
    "environment slow": lambda run: ("Make its calls quicker, or play more groups at once.", _more_groups(run)),
}
"""Kind of stall → what mends it, in words, and as an option set to another value where there is one."""
