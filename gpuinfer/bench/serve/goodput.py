"""Goodput: requests per second that are answered within all the times that were promised.

After DistServe (Zhong et al., "Disaggregating prefill and decoding for goodput-optimized large language model serving",
2024).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuinfer.bench.serve.record import Record
from gpuinfer.config.options import natural
from gpuinfer.errors import UsageError

NAMES = ("ttft", "tpot", "e2e")
EXAMPLE = "--goodput ttft:200ms,tpot:20ms,e2e:1s"


def promises(text: str) -> dict[str, float]:
    """`ttft:200ms,tpot:20ms` as seconds by name. Raises `UsageError`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, said = (word.strip().lower() for word in part.partition(":"))
        try:
            seconds = float(natural(said, float))
        except (TypeError, ValueError):
            seconds = 0.0
        if name not in NAMES or not 0 < seconds < float("inf"):
            raise UsageError(f"--goodput {text}: '{part}' promises nothing. Write {EXAMPLE}, or some of these.")
        found[name] = seconds
    return found


def kept(record: Record, promised: Mapping[str, float]) -> bool:
    """Whether it was answered, and in time. What nobody can tell of it, such as the TPOT of one token, is no matter."""
    if record.error is not None:
        return False
    taken = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((seconds := taken[name]) is None or seconds <= most for name, most in promised.items())
