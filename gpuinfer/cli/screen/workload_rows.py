"""What people see of what only some runs have, in the final panel and while they go on: resignation, matches against an
opponent, games for training, a network's training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpuinfer.report.game_statistics import in_elo, in_rate, in_score, in_share, of_resignation, of_strength
from gpuinfer.units import number, short, whole


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A line of the panel. The tone says how it should look."""

    name: str
    text: str
    tone: Literal["plain", "strong", "command", "bad", "warning"] = "plain"


def resignation_rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `resignation`; none where there is none."""
    if not found:
        return
    yield PanelRow("resigned", f"{in_share(found)}\n{in_rate(found)}")
    if found["advice"]:
        yield PanelRow("", found["advice"], "warning")


def resignation_live(facts: Mapping[str, float]) -> list[str]:
    """The share of games that were resigned; nothing where players may not resign."""
    found = of_resignation(facts)
    free = found["games"] - found["checked"] if found else 0
    return [f"{found['resigned'] / free:.0%} resigned"] if found and free else []


LEAST = 0.005  # a smaller share is not worth a word


def rollouts_rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
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


def rollouts_live(facts: Mapping[str, float]) -> list[str]:
    """How the trainer does, while games are played; nothing where there is none."""
    if "buffer_depth" not in facts:
        return []
    there = sum(facts.get(name, 0.0) for name in ("wait_s", "train_s", "adapter_load_s"))
    told = [f"buffer {whole(facts.get('buffer_waiting', 0.0))} of {whole(facts['buffer_depth'])}"]
    told += [f"trainer waited {facts.get('wait_s', 0.0) / there:.0%}"] if there > 0 else []
    told += [f"version {whole(facts['policy_version'])}"] if facts.get("policy_version") else []
    return told


def strength_rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `strength`; none where there is none."""
    if found:
        counts = ", ".join(f"{whole(found[name])} {name}" for name in ("wins", "draws", "losses"))
        yield PanelRow("strength", f"{in_elo(found)}\n{in_score(found)}: {counts}", "strong")


def strength_live(facts: Mapping[str, float]) -> list[str]:
    """How the games stand, while they are played; nothing where there is no opponent."""
    return [in_elo(found)] if (found := of_strength(facts)) else []


def training_rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `training`; none where there is none."""
    if not found:
        return
    if found["loss"]:
        from_first = "" if found["first_loss"] is None else f", {found['first_loss']:.4g} at first"
        yield PanelRow("loss", f"{_loss(found['loss'])}{from_first}", "strong")
    if found["validation"]:
        yield PanelRow(
            "validation", f"{_loss(found['validation'])}, on {whole(found['validation_positions'])} positions"
        )
    yield PanelRow("trained on", f"{whole(found['positions'])} positions, {found['epochs']:.1f} epochs")
    spent = [
        f"{name} {short(found[f'{name}_s'])}" for name in ("forward", "backward", "optimizer") if found[f"{name}_s"]
    ]
    if found["activation_mb"]:
        spent.append(f"{number(found['activation_mb'] * 2**20)}B of activations")
    if spent:
        yield PanelRow("gradients", ", ".join(spent))


def training_live(facts: Mapping[str, float]) -> list[str]:
    """How it goes; nothing where nothing is trained."""
    if "training_steps" not in facts:
        return []
    told = [f"{name} {facts[name]:.4g}" for name in ("loss", "validation") if name in facts]
    return [*told, f"epoch {facts['epochs']:.1f}"]


def _loss(found: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in found.items() if name != "total")
    return f"{found['total']:.4g}" + (f" ({parts})" if parts else "")
