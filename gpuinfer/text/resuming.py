"""What a reader has had of an answer, so that a server that takes a dead one's place goes on where that stopped."""

from __future__ import annotations

from gpuinfer.errors import BackendError
from gpuinfer.generation import Part


class Had:
    """The parts of one request that have been passed on.

    A server that has come back begins the answer anew. As it draws with the same seed and key it says the same again:
    that is compared and left out.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def begin_anew(self) -> None:
        """What comes from now on comes from the answer's beginning."""
        for sample in self._samples.values():
            sample.begin_anew()

    def fresh(self, part: Part) -> Part | None:
        """What is new of this part; None when nothing is. Raises `BackendError` when it is of another answer."""
        return self._samples.setdefault(part.sample, _Sample()).fresh(part)


class _Sample:
    __slots__ = ("_again", "_characters", "_drawn", "_texts", "_tokens", "_whole")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._whole = False  # its last part has been passed on
        self._again = False  # it is being said again
        self._characters = self._drawn = 0  # so far, of what is said again

    def begin_anew(self) -> None:
        self._texts = ["".join(self._texts)]
        self._again, self._characters, self._drawn = True, 0, 0

    def fresh(self, part: Part) -> Part | None:
        if not self._again:
            return self._passed_on(part)
        text = self._texts[0]
        said = text[self._characters : self._characters + len(part.text)]
        drawn = tuple(self._tokens[self._drawn : self._drawn + len(part.tokens)])
        self._characters += len(said)
        self._drawn += len(drawn)
        lacks = self._characters < len(text) or self._drawn < len(self._tokens)
        adds = len(said) < len(part.text) or len(drawn) < len(part.tokens)
        ends = part.finish_reason is not None
        alike = part.text.startswith(said) and part.tokens[: len(drawn)] == drawn
        if not alike or (lacks and (adds or ends)) or (adds and self._whole):
            raise BackendError(
                "the server was gone in the middle of this answer, and the one in its place gives another. "
                "Ask again; with --deterministic an answer is the same in any company."
            )
        self._again = lacks or (self._whole and not ends)
        if self._whole or not (adds or ends):
            return None
        return self._passed_on(_rest(part, len(said), len(drawn)))

    def _passed_on(self, part: Part) -> Part:
        self._texts.append(part.text)
        self._tokens += part.tokens
        self._whole = part.finish_reason is not None
        return part


def _rest(part: Part, characters: int, tokens: int) -> Part:
    return Part(
        sample=part.sample,
        text=part.text[characters:],
        tokens=part.tokens[tokens:],
        logprobs=None if part.logprobs is None else part.logprobs[tokens:],
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
    )
