"""What a `Driver` and a `TextModel` need of a generator, whatever order it writes its answers in.

Ours goes from left to right (`generator.py`); one that fills in masked tokens by steps can stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuinfer.api import TextRoofline
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.text.cost import Extent
from gpuinfer.text.generator.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step did."""

    finished: Sequence[tuple[Hashable, Generation | Exception]]
    parts: Sequence[tuple[Hashable, Part]] = ()  # of answers that are given out while they grow, before `finished`
    rows: int = 0  # that took part
    tokens: int = 0  # that went through the decoder
    prompt_tokens: int = 0  # of them, those of prompts
    cached: int = 0  # prompt tokens that did not have to, as another prompt's were taken over
    recomputed: int = 0  # of `tokens`, those that had been computed before, and whose pages were needed elsewhere
    waited: int = 0  # rows that there were no pages for when it was their turn
    preempted: int = 0  # rows that gave back their pages, and go through their tokens again later
    output_tokens: int = 0  # drawn
    held: bool = False  # prompts were cut, or waited, since no more tokens may go in
    echoing: bool = False  # they were for the sake of the logits that prompts' log-probabilities need
    positions: int = 0  # of all canvases in the step, those of guidance too; 0 where the model goes from left to right
    committed: int = 0  # masks that became tokens; `output_tokens` are those that an answer has in the end
    idle: int = 0  # of `rows`, those that committed nothing
    extent: Extent | None = None  # of what the decoder computed: what it costs at least follows from that


class TextGenerator(Protocol):
    """Answers prompts, a step at a time, in a fixed number of slots. All calls come from one thread, but for those that
    say otherwise.
    """

    facts: Mapping[str, Any]  # what was estimated, and what is there: for reports
    enter: Callable[[str], None]  # told what is going on: a station of the time ledger
    goes_ahead: bool  # whether a further step may be at work on the device when `step` returns; told before each

    @property
    def device(self) -> Any:
        """The torch.device that it computes on."""
        ...

    @property
    def slots(self) -> int:
        """How many rows can be under way at once."""
        ...

    @property
    def free_slots(self) -> int:
        """How many more rows may be added."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step would bring anything."""
        ...

    def prepare(self, prompts: Sequence[Prompt], enter: Callable[[str], None] = ...) -> list[Prepared | Exception]:
        """Prompts ready to be added, or the `BadPrompt` that says why one cannot be. From any thread, which `enter` is
        told of: "understand" or "constrain".
        """
        ...

    def add(self, ticket: Hashable, prepared: Prepared) -> None:
        """Take one of `free_slots` for each sample. Its answer is among what a later step has finished.

        Raises `ValueError` when the ticket is in use or there are too few slots.
        """
        ...

    def cancel(self, ticket: Hashable) -> bool:
        """Nobody wants this answer any more: its slots are free at once. False when it is finished or unknown."""
        ...

    def step(self) -> Stepped:
        """Compute the next step, and say what it did; where steps are launched ahead, what the one before it did.

        Raises `BackendDied` when there is no use in going on, nothing for a row's sake.
        """
        ...

    def read_weights(self, place: str) -> object:
        """Other weights for the same model, as `update` takes them. From any thread. Raises `UsageError`."""
        ...

    def update(self, version: str, weights: object) -> None:
        """Compute with these weights from the next step on, and name them so in what is answered.

        Answers under way go on, over what the cache holds of them. Nothing that older weights have computed serves
        another prompt.
        """
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """What `Prompt.adapter` may be: names, and names with versions. From any thread."""
        ...

    def read_adapter(self, name: str, place: str) -> object:
        """An adapter, as `load_adapter` takes it, that is to be called so. From any thread. Raises `UsageError`."""
        ...

    def load_adapter(self, name: str, version: str, adapter: object) -> None:
        """Have `name` mean this one for prompts that are added from now on, and `name@version` while it is there.
        Answers under way keep theirs. Raises `UsageError`, with nothing changed.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """No prompt may ask for it any more; answers under way keep it. Raises `UsageError` for one that is unknown."""
        ...

    def measure(self, rows: int, seconds: float) -> TextRoofline:
        """What this machine does with the model at best: see `text.bare.measure`. Only while nothing is under way;
        what was kept of prompts is forgotten. Raises `UsageError` where it cannot be measured.
        """
        ...

    def use(self, threads: int) -> None:
        """Compute with at most so many threads from the next step on, beside other models that have the other cores."""
        ...

    def rest(self) -> None:
        """Another model has the device until the next step."""
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...
