"""A grid of variants: words such as `key=a,b` as axes, and all combinations of their values."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from gpuinfer.errors import UsageError

Key = TypeVar("Key", bound=Hashable)


def parts(text: str) -> list[str]:
    """`a,b` as its parts, each once; a semicolon, as in `a,b;c`, keeps commas inside them."""
    sign = ";" if ";" in text else ","
    return list(dict.fromkeys(part.strip() for part in text.split(sign) if part.strip()))


def split_axis(word: str) -> tuple[str, list[str]]:
    """`--max-wait=0,5ms` as `max_wait` and its values; without a `=` no key."""
    key, _, values = word.partition("=") if "=" in word else ("", "", word)
    return key.strip().removeprefix("--").replace("-", "_"), parts(values)


def points(axes: Mapping[Key, Sequence[str]]) -> Iterator[dict[Key, str]]:
    """All combinations, a value for each key, in the order in which they are named, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def whole_numbers(name: str, text: str, most: int, example: str) -> list[int]:
    """The numbers that a flag names, ascending. Raises `UsageError` unless each is from 1 to `most`."""
    try:
        found = sorted({int(part) for part in parts(text)})
    except ValueError:
        found = []
    if not found or not 1 <= found[0] <= found[-1] <= most:
        raise UsageError(f"--{name} {text}: not whole numbers from 1 to {most}. Write --{name} {example}.")
    return found
