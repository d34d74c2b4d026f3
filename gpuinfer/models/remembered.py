"""With which batch size and arrangement the bare model was at its best, kept in the user's cache: to find that out
takes seconds, and it is the same from run to run. How fast that is, is measured anew each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from gpuinfer.api import ModelSpec, Roofline, TextRoofline
from gpuinfer.host import files
from gpuinfer.models import processor

KEPT_S = 7 * 24 * 3600.0  # then it is looked for again: kernels and microcode change unseen
AHEAD_S = 60.0  # by which the clock of a file system may be ahead of ours
MOST_BYTES = 4096
RATES = ("flops_per_s", "prompt_flops_per_s", "bytes_per_s", "own_flops_per_s")  # of `TextRoofline`
FAR = 1.5  # a rate that is higher or lower by this factor is not of the same machine, or not of the same model


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    at_rows: int
    arrangement: str
    rows_per_s: float  # at that time: to see whether all is still as it was, and never told as a run's
    peak_mb: float  # MiB that the process took which measured it

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.rows_per_s, self.at_rows, self.arrangement)

    def agrees(self, measured: Roofline) -> bool:
        """Whether a new measurement is of the same arrangement, and about as fast."""
        same = (measured.at_rows, measured.arrangement) == (self.at_rows, self.arrangement)
        return same and self.rows_per_s / FAR <= measured.rows_per_s <= self.rows_per_s * FAR


def place_of(spec: ModelSpec, *, dtype: str, compute: str, cores: int, deterministic: bool) -> Path | None:
    """The file for a model on this machine's processor, named by all that decides what is best; None where none can be
    kept. Asks no device, and imports no torch.
    """
    told = {
        "spec": asdict(spec),
        "dtype": dtype,
        "compute": compute,
        "cores": cores,
        "deterministic": deterministic,
        "processor": [processor.cpu_name(processor.CPUINFO), *sorted(processor.flags(processor.CPUINFO))],
        "told to leave unused": [os.environ.get(name, "") for name in processor.WITHOUT_FLOAT16],
        "versions": [_version("torch"), _version("gpuinfer")],
    }
    root = Path(platformdirs.user_cache_dir("gpuinfer"))
    folder = root / "roofline"
    if not (files.make_ours(root) and files.make_ours(folder)):
        return None
    return folder / f"{hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]}.json"


def recall(place: Path | None) -> Found | None:
    """What is kept there; None where that is nothing, too old, or not as `remember` writes it."""
    return _read(_kept(place))


def _kept(place: Path | None) -> Any:
    try:
        if place is None or not -AHEAD_S <= time.time() - place.stat().st_mtime <= KEPT_S:
            return None
        with place.open("rb") as file:
            return json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember(place: Path | None, found: Found) -> None:
    """Keep it there, and nothing else that is too old. What cannot be kept is looked for again by the next run."""
    _keep(place, asdict(found))


def _keep(place: Path | None, told: Mapping[str, Any]) -> None:
    if place is None:
        return
    with contextlib.suppress(OSError):
        for other in place.parent.glob("*.json"):
            if time.time() - other.stat().st_mtime > KEPT_S:
                other.unlink()
    with contextlib.suppress(OSError):
        files.write_whole(place, json.dumps(told).encode())


def recall_text(place: Path | None) -> TextRoofline | None:
    """The same of a model of text: what an earlier run has measured, marked so."""
    told = _kept(place)
    if not isinstance(told, Mapping):
        return None
    rates = {name: told.get(name) for name in RATES}
    sizes = {name: told.get(name) for name in ("at_rows", "at_tokens")}
    if not all(isinstance(rate, float) and 0 < rate < float("inf") for rate in rates.values()):
        return None
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return None
    return TextRoofline(**rates, **sizes, remembered=True)  # type: ignore[arg-type]


def remember_text(place: Path | None, found: TextRoofline) -> None:
    """Keep it there, as `remember` does."""
    _keep(place, asdict(found))


def _read(told: Any) -> Found | None:
    if not isinstance(told, Mapping):
        return None
    rows, arrangement = told.get("at_rows"), told.get("arrangement")
    if type(rows) is not int or rows < 1 or not isinstance(arrangement, str):
        return None
    rate, peak_mb = (told.get(name) for name in ("rows_per_s", "peak_mb"))
    if not isinstance(rate, float) or not isinstance(peak_mb, float) or not 0 < rate < float("inf") or not peak_mb > 0:
        return None
    return Found(rows, arrangement, rate, peak_mb)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
