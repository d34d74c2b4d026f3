"""What is wrong with devices as a user names them, told without asking them. No torch: it takes a second to load."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host import machine

EVERY = ("cuda", "all")  # of several: each CUDA device
UNKNOWN = ("auto", "all")  # of which kind they are depends on the machine


def index_of(name: str) -> int | None:
    """The number of a CUDA device, 0 of `cuda`; None of what is no CUDA device by its name. Raises `UnknownName`."""
    if name in ("cpu", *UNKNOWN):
        return None
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise UnknownName("device", name, ["auto", "all", "cpu", "cuda", "cuda:1"], label="Choices")
    return int(index or 0)


def check_names(names: Sequence[str]) -> None:
    """Raises `UsageError` for a name that is none, for a CPU beside CUDA devices, and for a device that is named twice:
    what can be told from names alone.
    """
    numbers = {name: index_of(name) for name in names}
    kinds = {"cpu" if number is None else "cuda" for name, number in numbers.items() if name not in UNKNOWN}
    if len(kinds) > 1:
        raise mixed(names)
    found = [f"cuda:{numbers[name]}" for name in names if numbers[name] is not None and name not in EVERY]
    if twice := next((one for place, one in enumerate(found) if one in found[:place]), None):
        raise named_twice(names, twice)


def may_be_missing(names: Sequence[str]) -> bool:
    """Whether one of them is a CUDA device that this machine seems not to have: torch is then to be asked."""
    numbers = [number for name in names if (number := index_of(name)) is not None]
    return bool(numbers) and (not machine.has_cuda() or max(numbers) >= machine.cuda_devices())


def mixed(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"--device {','.join(names)} mixes the CPU with CUDA devices, beside which it does next to nothing. "
        "Name devices of one kind."
    )


def named_twice(names: Sequence[str], twice: object) -> UsageError:
    return UsageError(f"--device {','.join(names)} names {twice} twice. Name each device once.")
