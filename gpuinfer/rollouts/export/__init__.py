"""Records as trainers read them, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.rollouts.export.art import Art
from gpuinfer.rollouts.export.json_formats import PrimeRl, SkyRl, Trl, Verl
from gpuinfer.rollouts.export.trainer_format import Format, Written

FORMATS: Mapping[str, Format[Any]] = {one.name: one for one in (Verl(), SkyRl(), PrimeRl(), Trl(), Art())}

__all__ = ["FORMATS", "Format", "Written"]
