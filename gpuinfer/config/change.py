"""One option set to another value: what an advice says to do, and what a trial does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Flag = Literal["-B", "-S", "--"]  # an option of the backend, of the strategy, of the workload or of every command


@dataclass(frozen=True, slots=True)
class Change:
    """`-B max_rows=512`, `-S max_wait=0` or `--workers 4`, by the option's name in the settings."""

    flag: Flag
    name: str
    value: int | float | str
    without: Sequence[str] = ()  # options of the same plugin that go with the old value alone: they are left out

    @property
    def words(self) -> list[str]:
        """As they stand on a command line."""
        if self.flag == "--":
            return [f"--{self.name.replace('_', '-')}", f"{self.value}"]
        return [self.flag, f"{self.name}={self.value}"]

    def plain(self) -> dict[str, Any]:
        """Its fields, without those that say nothing: `Change(**plain)` is the same."""
        found = asdict(self)
        without = {"without": list(found.pop("without"))}
        return {**found, **without} if self.without else found

    def in_command(self, command: str) -> str:
        """The command with this change: what it said of the option before is gone from it."""
        return shlex.join([*self._without(shlex.split(command)), *self.words])

    def _without(self, words: Sequence[str]) -> Iterator[str]:
        skip = False
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if skip:
                skip = False
            elif self._sets(word, after):
                skip = "=" not in word
            else:
                yield word

    def _sets(self, word: str, after: str) -> bool:
        """Whether this word, with the one after it, gives the option a value."""
        if self.flag == "--":
            return word.partition("=")[0] == self.words[0]
        named = after.partition("=")[0].replace("-", "_")
        return word == self.flag and named in (self.name, *self.without)
