"""Centres → scores. Those of all powers add up to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SOLO = 18  # of 34 centres: who has them has won, and the others have nothing


def scores(centers: Mapping[str, Sequence[str]], score: str) -> dict[str, float]:
    """`share`: of the centres that are owned; `squares`: of the sum of their squares, which favours the leader."""
    owned = {power: len(places) for power, places in centers.items()}
    if max(owned.values()) >= SOLO:
        return {power: float(count >= SOLO) for power, count in owned.items()}
    worth = {power: count**2 if score == "squares" else count for power, count in owned.items()}
    return {power: value / sum(worth.values()) for power, value in worth.items()}
