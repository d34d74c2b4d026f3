"""One prompt under way, and its rows."""

from __future__ import annotations

from collections.abc import Hashable

from gpuinfer.generation import Completion, Logprob
from gpuinfer.models.text.generator.parts import Growing, Matcher
from gpuinfer.models.text.generator.prepared import Prepared


class Row:
    """One sample of a prompt: it has a slot from its placement until its answer is complete."""

    __slots__ = ("growing", "logprobs", "matcher", "number", "owner", "shared", "slot", "source", "work")

    def __init__(self, work: Work, number: int, slot: int) -> None:
        self.work, self.number, self.slot = work, number, slot
        self.growing: Growing | None = None  # for stop strings
        self.matcher: Matcher | None = None
        self.logprobs: list[Logprob] | None = None
        self.owner: Row | None = None  # whose prefill it waits for
        self.source, self.shared = -1, 0  # the owner's slot, and how many positions of it are wanted


class Work:
    """One prompt: its first row goes through the prompt, the others copy that, and each draws its own answer."""

    __slots__ = ("cached", "completions", "echo", "first_token", "left", "prepared", "rows", "started", "ticket")

    def __init__(self, ticket: Hashable, prepared: Prepared, started: float) -> None:
        self.ticket, self.prepared, self.started = ticket, prepared, started
        self.rows: list[Row] = []  # empty until it is placed
        self.left = prepared.samples
        self.completions: list[Completion | None] = [None] * prepared.samples
        self.cached = 0
        self.echo: list[Logprob | None] | None = None  # of the prompt's tokens
        self.first_token = started
