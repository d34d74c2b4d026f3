"""Numbers for people: counts, rates, times and bars."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta

EIGHTHS = " ▏▎▍▌▋▊▉"
MAGNITUDES = ("", "k", "M", "G", "T")


def number(value: float) -> str:
    """Three digits and a magnitude: 7, 1.5, 512, 45.2 k, 1.23 M."""
    if not math.isfinite(value):
        return "–"
    magnitude, unit = abs(value), ""
    for unit in MAGNITUDES:
        if magnitude < 999.5:
            break
        if unit != "T":
            magnitude /= 1000
    digits = 0 if magnitude >= 99.95 or (not unit and float(magnitude).is_integer()) else 1 if magnitude >= 9.995 else 2
    sign = "-" if value < 0 else ""
    return f"{sign}{magnitude:.{digits}f} {unit}".rstrip()


def whole(value: float) -> str:
    """A count with thousands apart: 12,345."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """9 s, 4 min 10 s, 2 h 05 min, 3.7 days."""
    if not math.isfinite(seconds):
        return "–"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total >= 2 * 86_400:
        return f"{total / 86_400:.1f} days"
    minutes, rest = divmod(total, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def left(seconds: float) -> str:
    """An estimate, no more exact than it can be: 40 s left, about 2 h 10 min left, about 3 days left."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{duration(seconds)} left"
    if minutes < 60:
        return f"about {minutes} min left"
    hours, rest = divmod(round(minutes / 10) * 10, 60)
    if hours < 10:
        return f"about {hours} h{f' {rest} min' if rest else ''} left"
    hours = round(seconds / 3600)
    return f"about {hours} h left" if hours < 48 else f"about {round(hours / 24)} days left"


def until(seconds: float, now: datetime | None = None) -> str:
    """When that will be: until 02:10, with the day where it is further away than a day; nothing for seconds."""
    if seconds < 60:
        return ""
    try:
        end = (now or datetime.now()) + timedelta(seconds=seconds)
    except OverflowError:  # later than any date
        return ""
    return f"until {end:%H:%M}" if seconds < 86_400 else f"until {end:%a %d %b, %H:%M}"


def left_until(seconds: float, now: datetime | None = None) -> str:
    """Both: about 3 h left, until 02:10."""
    return ", ".join(filter(None, [left(seconds), until(seconds, now)]))


def short(seconds: float) -> str:
    """A time that may be tiny: 350 µs, 1.2 ms, 3.4 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds / 1e-6)} µs" if seconds else "0 s"


def lasting(seconds: float) -> str:
    """A time of any length: 1.2 ms, 3.4 s, 4 min 10 s."""
    return short(seconds) if seconds < 60 else duration(seconds)


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` columns, to an eighth of a column, padded to the width."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[part] if part else "")).ljust(width)


MEMORY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: str) -> int:
    """Bytes of 8GiB, 500 MB, 1.5g or 1048576. Raises `ValueError`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    if found is None:
        raise ValueError(f"'{text}' is no amount of memory. Write it as 8GiB or 500MB")
    return round(float(found[1]) * SIZES[found[2]])


def memory(count: float) -> str:
    """An amount of memory: 512 B, 3.4 MiB, 21.3 GiB."""
    left = list(MEMORY_UNITS)
    while abs(count) >= 1024 and len(left) > 1:
        count /= 1024
        del left[0]
    return f"{count:.0f} {left[0]}" if left[0] == "B" or abs(count) >= 99.95 else f"{count:.1f} {left[0]}"
