"""What people see of games for training: in the final panel, and while they are played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.screen.rows import PanelRow
from gpuinfer.units import number, short, whole

LEAST = 0.005  # a smaller share is not worth a word


def rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `rollouts`; none where there is none."""
    if not found:
        return
    yield PanelRow("games", ", ".join(_games(found)))
    if rates := ", ".join(_rates(found)):
        yield PanelRow("tokens", rates)
    if trainer := found.get("trainer"):
        yield PanelRow("trainer", ", ".join(_trainer(trainer)))
        yield PanelRow("buffer", ", ".join(_buffer(trainer)))
        if lost := ", ".join(f"{kind} {share:.0%}" for kind, share in trainer["stalls"].items() if share >= LEAST):
            yield PanelRow("stalls", f"of the trainer's time: {lost}", "warning")


def _games(found: Mapping[str, Any]) -> Iterator[str]:
    if found["tokens_per_game"]:
        yield f"{number(found['tokens_per_game'])} tokens a game, {number(found['tokens_per_call'] or 0.0)} a call"
    yield f"{found['groups_in_flight']:.1f} groups at once"
    for name, what in (("environment_share", "in the environment"), ("reference_share", "in the reference pass")):
        if found[name] >= LEAST:
            yield f"{found[name]:.0%} of the time {what}"
    if found["games_failed"]:
        yield f"{whole(found['games_failed'])} played again"


def _rates(found: Mapping[str, Any]) -> Iterator[str]:
    for way in ("output", "input"):
        rates = found[f"{way}_tokens_per_s"]
        if rates["wall"] and rates["inference"]:
            yield f"{way} {number(rates['wall'])}/s, {number(rates['inference'])}/s while the engine was at work"


def _trainer(trainer: Mapping[str, Any]) -> Iterator[str]:
    yield f"{whole(trainer['steps'])} steps"
    yield f"waited {short(trainer['wait_s'])}, {trainer['wait_share']:.0%} of its time"
    if trainer["adapter_load_s"]:
        yield f"new weights {short(trainer['adapter_load_s'])}"
    if trainer["kl"] is not None:
        yield f"KL {trainer['kl']:.3g} from the reference"


def _buffer(trainer: Mapping[str, Any]) -> Iterator[str]:
    buffer, staleness = trainer["buffer"], trainer["staleness"]
    yield f"{whole(buffer['waiting'])} of {whole(buffer['depth'])} groups"
    yield f"staleness {staleness['mean']:.1f}, most {whole(staleness['max'])} of {whole(staleness['allowed'])}"
    if trainer["groups_dropped"]:
        yield f"{whole(trainer['groups_dropped'])} dropped as too old"


def live(facts: Mapping[str, float]) -> list[str]:
    """How the trainer does, while games are played; nothing where there is none."""
    if "buffer_depth" not in facts:
        return []
    there = sum(facts.get(name, 0.0) for name in ("wait_s", "train_s", "adapter_load_s"))
    told = [f"buffer {whole(facts.get('buffer_waiting', 0.0))} of {whole(facts['buffer_depth'])}"]
    told += [f"trainer waited {facts.get('wait_s', 0.0) / there:.0%}"] if there > 0 else []
    told += [f"version {whole(facts['policy_version'])}"] if facts.get("policy_version") else []
    return told
