"""What a reader has had of an answer, so that a server that takes a dead one's place goes on where that stopped."""

from __future__ import annotations

from msgspec import structs

from gpuinfer.errors import BackendError
from gpuinfer.generation import Part, Prompt


class Had:
    """The parts of one request that have been passed on."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens = [list(tokens) for tokens in prompt.begun] or [list[int]() for _ in range(prompt.samples)]
        self._versions = [list(spans) for spans in prompt.begun_versions] or [[] for _ in range(prompt.samples)]
        self._processed = [list(one) for one in prompt.begun_processed] or [[] for _ in range(prompt.samples)]
        self._whole: set[int] = set()  # samples whose last part has been passed on

    def fresh(self, part: Part) -> Part | None:
        """This part, passed on; None where its sample is whole: a server that has come back says the end again.

        Raises `BackendError` for a sample that nobody has asked for.
        """
        if not 0 <= part.sample < len(self._tokens):
            raise BackendError(f"the server answered sample {part.sample}, which nobody asked for.")
        if part.sample in self._whole:
            return None
        self._tokens[part.sample] += part.tokens
        known = self._versions[part.sample]
        known += [span for span in part.versions if not known or span[0] > known[-1][0]]
        self._processed[part.sample] += part.processed or ()
        if part.finish_reason is not None:
            self._whole.add(part.sample)
        return part

    def rest(self) -> Prompt:
        """What asks for all that has not come yet; the very prompt, where nothing has."""
        if not any(self._tokens):
            return self._prompt
        return structs.replace(
            self._prompt,
            begun=tuple(map(tuple, self._tokens)),
            begun_versions=tuple(map(tuple, self._versions)) if any(self._versions) else (),
            begun_processed=tuple(map(tuple, self._processed)) if any(self._processed) else (),
        )
