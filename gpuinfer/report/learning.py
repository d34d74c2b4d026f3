"""What the training of a network adds to the report, from the facts that the workload tells of itself.

Of the facts (`Progress.facts`) that it knows: `training_steps` (done, by earlier runs too), `batch_size`,
`training_positions`, `validation_positions`, `epochs`, `checkpoint` (the step of the last one), `learning_rate`,
`gradient_norm`, `first_loss`, `loss` (a mean over the latest steps), `validation`, and `loss: PART`, `validation: PART`
for the parts of the loss; `activation_bytes`, `forward_s`, `backward_s`, `optimizer_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN = ("epochs", "learning_rate", "gradient_norm", "first_loss", "forward_s", "backward_s", "optimizer_s")


def of_learning(facts: Mapping[str, float]) -> dict[str, Any] | None:
    """The report's `training`; None of a run that trains nothing. What is not known yet is null."""
    if "training_steps" not in facts:
        return None
    return {
        "steps": facts["training_steps"],
        "batch_size": facts.get("batch_size", 0),
        "positions": facts.get("training_positions", 0),
        "validation_positions": facts.get("validation_positions", 0),
        "checkpoint": facts.get("checkpoint", 0),
        **{name: facts.get(name) for name in PLAIN},
        "loss": _loss(facts, "loss"),
        "validation": _loss(facts, "validation"),
        "activation_mb": facts["activation_bytes"] / 2**20 if facts.get("activation_bytes") else None,
    }


def _loss(facts: Mapping[str, float], name: str) -> dict[str, float] | None:
    """`{total, …parts}`."""
    if name not in facts:
        return None
    before = f"{name}: "
    parts = {key.removeprefix(before): value for key, value in facts.items() if key.startswith(before)}
    return {"total": facts[name], **parts}
