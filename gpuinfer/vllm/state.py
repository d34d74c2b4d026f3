"""What an engine that takes a dead one's place must know: adapters and weights that came while that one ran.

One small JSON file in a folder of the owner's, written whole before an update counts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from gpuinfer.errors import UsageError
from gpuinfer.host.files import write_whole

NAME = "engine.json"


class AdapterState(Struct, frozen=True):
    name: str
    version: str
    folder: str


class State(Struct, frozen=True):
    adapters: tuple[AdapterState, ...] = ()  # the newest of each name
    version: str = ""  # of the weights; "" are those of the start
    weights: str | None = None


def read(room: Path) -> State | None:
    """None when nothing has been written."""
    try:
        return msgspec.json.decode((room / NAME).read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{room / NAME} cannot be read: {error}. Start the run again.") from None


def write(room: Path, state: State) -> None:
    write_whole(room / NAME, msgspec.json.encode(state))
