"""The adapters of a generator: versions side by side, the newest under the bare name.

A version is loaded between two steps, and from then on the bare name means it. Answers under way keep their version; a
version without a name is unloaded when its last answer is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.text.transformer import Decoder

SHOWN = 8  # names in a message
MOST_NAME = 128  # characters


@dataclass(slots=True)
class AdapterVersion:
    """One version of one adapter. `number` is never used again, so its pages never serve another version."""

    number: int
    name: str
    version: str
    answers: int = 0  # under way with it
    used: int = field(default=0)  # when a prompt asked for it last, by a count of such moments

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


class AdapterVersions:
    """At most `most` versions; more for as long as answers are under way with them. All but `find`, `known` and
    `refuse_unknown` belong to the thread that steps.

    `on_gone` is called with the number of each that has been unloaded.
    """

    def __init__(self, decoder: Decoder, most: int, on_gone: Callable[[int], None] = lambda number: None) -> None:
        self._decoder, self._most, self._on_gone = decoder, most, on_gone
        self._loaded: dict[int, AdapterVersion] = {}
        self._meant: dict[str, AdapterVersion] = {}  # by the names that prompts may use: "policy", "policy@v7"
        self._numbers, self._moments = itertools.count(1), itertools.count(1)

    @property
    def known(self) -> tuple[str, ...]:
        """The names that prompts may use: bare, and with versions."""
        return tuple(sorted(self._meant.copy()))

    def refuse_unknown(self, asked: str) -> None:
        """Raises `BadPrompt`, from any thread."""
        if asked not in self._meant:
            raise BadPrompt(self._unknown(asked))

    def refuse_full(self, name: str) -> None:
        """Raises `UsageError` where there is no room for an adapter of another name than those that are loaded."""
        names = {one.name for one in self._meant.copy().values()} - {name}
        if len(names) >= self._most:
            raise UsageError(
                f"{self._most} adapters are loaded ({_listed(sorted(names))}), and there is room for no more. "
                f"Unload one, or start with -B max_adapters={2 * self._most}."
            )

    def load(self, name: str, version: str, packed: object) -> None:
        """From the next step on `name` means this version. Raises `UsageError`, with nothing changed."""
        check_name(name)
        self.refuse_full(name)
        one = AdapterVersion(next(self._numbers), name, version, used=next(self._moments))
        self._decoder.load(one.number, packed)
        self._loaded[one.number] = one
        replaced = self._meant.get(one.label)
        self._meant[one.label] = self._meant[name] = one
        if replaced is not None:
            self._let_go(replaced)
        self._trim()

    def unload(self, asked: str) -> None:
        """No prompt may ask for it any more: all its versions, where a bare name is given. Raises `UsageError`."""
        if asked not in self._meant:
            raise UsageError(self._unknown(asked))
        whole = "@" not in asked
        gone = [one for one in self._loaded.values() if one.label == asked or (whole and one.name == asked)]
        for one in gone:
            self._forget(one)

    def take(self, asked: str) -> AdapterVersion:
        """The version that the name means now, for one more prompt. Raises `BadPrompt`."""
        self.refuse_unknown(asked)
        one = self._meant[asked]
        one.answers += 1
        one.used = next(self._moments)
        return one

    def give_back(self, one: AdapterVersion) -> None:
        """A prompt that has taken it is answered, failed or cancelled."""
        one.answers -= 1
        self._let_go(one)
        self._trim()

    def _trim(self) -> None:
        """Unload old versions, the least recently used first."""
        while len(self._loaded) > self._most:
            old = [one for one in self._loaded.values() if not one.answers and self._meant.get(one.name) is not one]
            if not old:
                return
            self._forget(min(old, key=lambda one: one.used))

    def _forget(self, one: AdapterVersion) -> None:
        for asked in (one.name, one.label):
            if self._meant.get(asked) is one:
                del self._meant[asked]
        self._let_go(one)

    def _let_go(self, one: AdapterVersion) -> None:
        """Unload a version without a name and without answers under way."""
        listed = self._meant.get(one.label) is one or self._meant.get(one.name) is one
        if not listed and not one.answers and self._loaded.pop(one.number, None) is not None:
            self._decoder.unload(one.number)
            self._on_gone(one.number)

    def _unknown(self, asked: str) -> str:
        known = self.known
        there = f"these are loaded: {_listed(known)}" if known else "this model has none"
        return f"it asks for the adapter '{asked[:MOST_NAME]}', and {there}. Load it first, or leave `adapter` out."


def weights_name(adapter: AdapterVersion | None, version: str) -> str:
    """The name of the weights that compute an answer: the adapter's, followed by the base's `version` unless that is
    the one of the start.
    """
    if adapter is None:
        return version
    return f"{adapter.label}+{version}" if version else adapter.label


def check_name(name: str) -> None:
    """Raises `UsageError` for a name that is empty, too long or ambiguous."""
    if not name or len(name) > MOST_NAME or "@" in name or not name.isprintable() or name != name.strip():
        raise UsageError(
            f"an adapter cannot be called '{name[:MOST_NAME]}'. Use up to {MOST_NAME} characters without '@', which "
            "stands before the version."
        )


def _listed(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
