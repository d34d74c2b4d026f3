"""Command lines as people would type them, from the values of flags."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.cli import flags

SHORTS = {"backend_options": "-B", "strategy_options": "-S"}
SHOWN_ONLY = ("json", "trace", "live", "quiet", "verbose", "trial")  # how a run is shown, not what it does
PLACES = ("out", "output")  # options of workloads that name where records or answers go
GOING_ON = ("resume", "retry_errors")  # and those that go on with what is there


def spelled(name: str, values: Mapping[str, Any]) -> str:
    """The command line of these flags (None: not given), without what only says how the run is shown."""
    words = ["gpuinfer", name]
    for key, value in values.items():
        if value is None or key in SHOWN_ONLY:
            continue
        if isinstance(value, bool):
            words.append(flags.flag(key if value else f"no_{key}"))
        else:
            several = value if isinstance(value, list) else [value]
            words += [word for one in several for word in (SHORTS.get(key, flags.flag(key)), str(one))]
    return shlex.join(words)


def anew(name: str, values: Mapping[str, Any], options: Any) -> str:
    """The command line that does the same work from its start, beside what this run writes: the verdict's advice is a
    change to it, and would be refused by records that were made with another setting.
    """
    own = dict(values)
    for key in GOING_ON:
        if getattr(options, key, False):
            own[key] = None if values.get(key) else False  # what the environment or the file says needs a flag against
    for key in PLACES:
        if (place := getattr(options, key, None)) and _is_written(Path(place)):
            own[key] = str(_free(Path(place)))
    return spelled(name, own)


def _is_written(path: Path) -> bool:
    """Whether there is, or will be, a file or a folder: not standard output, a pipe or a device."""
    return str(path) != "-" and (path.is_file() or path.is_dir() or not path.exists())


def _free(path: Path) -> Path:
    """`records-2` for `records`, `out-3.jsonl` for `out.jsonl` where there is an `out-2.jsonl`."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())
