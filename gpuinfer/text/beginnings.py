"""Where the beginnings of prompts have been computed: a device that still holds one need not compute it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from gpuinfer.generation import Prompt

MOST = 8192  # beginnings that are remembered, those seen last
CHARACTERS, TOKENS = 256, 64  # of a beginning, and of what each longer one has more
LONGEST = 32  # beginnings of one prompt: of those of a longer prompt the first tell enough


class Beginnings:
    """Remembers who had which. What is cached there may be gone: it is a guess, which costs nothing where it fails."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, str] = OrderedDict()

    def find(self, prompt: Prompt) -> str | None:
        """Who had the longest beginning of this prompt; None: nobody that is remembered."""
        found = None
        for key in _keys(prompt):
            if (who := self._seen.get(key)) is None:
                break
            found = who
        return found

    def note(self, prompt: Prompt, who: str) -> None:
        for key in _keys(prompt):
            self._seen[key] = who
            self._seen.move_to_end(key)
        while len(self._seen) > MOST:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """Other weights: nothing that was computed serves anybody any more."""
        self._seen.clear()


def _keys(prompt: Prompt) -> Iterator[int]:
    """One for each beginning, the shortest first; each says all that comes before it too."""
    known: Hashable = prompt.adapter
    for number, piece in enumerate(_pieces(prompt)):
        if number == LONGEST:
            return
        yield (known := hash((known, piece)))


def _pieces(prompt: Prompt) -> Iterator[Hashable]:
    if prompt.messages is not None:
        for message in prompt.messages:
            yield repr(message)
    elif prompt.text is not None:
        yield from (prompt.text[at : at + CHARACTERS] for at in range(0, len(prompt.text), CHARACTERS))
    elif prompt.tokens is not None:
        yield from (tuple(prompt.tokens[at : at + TOKENS]) for at in range(0, len(prompt.tokens), TOKENS))
