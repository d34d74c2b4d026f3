"""Records as trainers read them, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.rollouts.export.art import Art
from gpuinfer.rollouts.export.form import Format, Written
from gpuinfer.rollouts.export.prime_rl import PrimeRl
from gpuinfer.rollouts.export.skyrl import SkyRl
from gpuinfer.rollouts.export.trl import Trl
from gpuinfer.rollouts.export.verl import Verl

FORMATS: Mapping[str, Format[Any]] = {one.name: one for one in (Verl(), SkyRl(), PrimeRl(), Trl(), Art())}

__all__ = ["FORMATS", "Format", "Written"]
