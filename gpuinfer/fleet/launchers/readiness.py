"""Waiting for a replica's ready file, and what its log says when none comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpuinfer.errors import WorkError

LOOK_S = 0.05  # between two looks at the file
SHOWN, READ = 3, 8 << 10  # lines of last words; bytes of the log that are looked at
LINE = 300  # characters of one line


class Address(msgspec.Struct, frozen=True):
    """What a replica writes into its ready file."""

    host: str
    port: int
    pid: int = 0


def read(path: Path) -> Address | None:
    """None while it is not there. The file is written elsewhere and moved into place, so it is never half there."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return msgspec.json.decode(path.read_bytes(), type=Address)
        except msgspec.MsgspecError as error:
            raise WorkError(f"{path} is no ready file: {error}. Do not write to the fleet's folder.") from None
    return None


async def wait(path: Path, within_s: float, alive: Callable[[], bool], failed: Callable[[str], WorkError]) -> Address:
    """Look until the file is there. Raises `failed(why)` when the replica has ended, or the time is over."""
    until = time.monotonic() + within_s
    while True:
        was_alive = alive()  # before the look: one that wrote its file and then ended is told by its end
        if (address := read(path)) is not None:
            return address
        if not was_alive:
            raise failed("ended before it served")
        if time.monotonic() > until:
            raise failed(f"did not come up within {within_s:g} s (--start-timeout)")
        await asyncio.sleep(LOOK_S)


def last_words(log: Path | None, after: int = 0) -> str:
    """The last lines of a log from this byte on that say something; empty when there are none. In a log that somebody
    has cut shorter since, all of it is later.
    """
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(after if after <= end else 0, end - READ))
            said = file.read(READ).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip()[:LINE] for line in said.splitlines() if line.strip()]
    return "\n".join(lines[-SHOWN:])


def failure(name: str, why: str, words: str, log: Path | None) -> WorkError:
    """A replica that never came up, with what it said last and where there is more."""
    quoted = f' Its last words: "{words}".' if words else " It said nothing."
    return WorkError(f"{name} {why}.{quoted}" + (f"\nMore is in {log}." if log else ""))
