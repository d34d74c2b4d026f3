"""What `gpuinfer bench rollouts` compares: small cases, each of a few ways to do the same rollouts.

The first way of a case is the one that the others are measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuinfer.errors import UnknownName

STARVED = 1.5  # the time of one group's rollout over the simulated trainer's step: more than a depth of 1 can hide
SHARED_MACHINE = "All engines share this machine, its cores too: on machines of their own they may bring more."
BUFFERED = 10  # groups that the trainer takes, one a step: enough to see what the steps settle on


@dataclass(frozen=True, slots=True)
class RolloutsVariant:
    """`flags` of `gpuinfer rollouts` and `backend` options, on top of those that were given."""

    name: str
    flags: Mapping[str, str] = field(default_factory=dict)
    backend: Mapping[str, str] = field(default_factory=dict)
    replayed: bool = False  # the prompts of a record are asked again, all at once, for answers of the same lengths
    recorded: bool = False  # the very games of the record, of its seed, whatever the repeat
    led: bool = False  # likewise, played by what was said there, while as much is drawn as was there
    steps: bool = False  # a trainer takes the groups: each of its steps is recorded


@dataclass(frozen=True, slots=True)
class RolloutsCase:
    name: str
    title: str
    ways: Sequence[RolloutsVariant]
    after: bool = False  # it goes by what was played before it: prompts, answers, the time of a game
    caveat: str = ""  # what its figures do not show, a sentence for its verdict


@dataclass(frozen=True, slots=True)
class SelectedCases:
    """How far the cases go."""

    engines: Sequence[int] = (1, 2, 3, 4)
    depths: Sequence[int] = (1, 2, 3, 4)
    backend: str = "inprocess"  # what answers in each engine
    trainer_s: float = 1.0  # of a simulated step; see `STARVED`


def full_name(case: RolloutsCase, way: RolloutsVariant) -> str:
    return f"{case.name}: {way.name}"


def way_of(name: str) -> str:
    """The way's own name, of a full one."""
    return name.partition(": ")[2] or name


def turns(wanted: SelectedCases) -> RolloutsCase:
    """The speed of calls one by one does not depend on how many games there are: one is enough."""
    alone = {"batch_size": "1", "groups": "1", "samples_per_group": "1"}
    return RolloutsCase(
        "turns",
        "All agents at once, against one call after another",
        [RolloutsVariant("one call at a time", alone), RolloutsVariant("all at once")],
    )


def peak(wanted: SelectedCases) -> RolloutsCase:
    """The replay is what `bench generate` does: all prompts are there from the start, no answer waits for another."""
    return RolloutsCase(
        "peak",
        "The game loop, against the engine with all prompts at hand",
        [RolloutsVariant("replayed", replayed=True), RolloutsVariant("played")],
        after=True,
    )


def engines(wanted: SelectedCases) -> RolloutsCase:
    ways = [
        RolloutsVariant(
            f"{count} engine{'s' if count > 1 else ''}",
            {"backend": "fleet"},
            {"replicas": str(count), "backend": wanted.backend},
        )
        for count in wanted.engines
    ]
    return RolloutsCase("engines", "Several engines behind a router", ways, caveat=SHARED_MACHINE)


def buffer(wanted: SelectedCases) -> RolloutsCase:
    own = {
        "groups": str(BUFFERED),
        "samples_per_group": "1",
        "batch_groups": "1",
        "trainer_seconds": f"{wanted.trainer_s:.3f}",
    }
    ways = [
        RolloutsVariant(f"depth {depth}", {**own, "buffer_depth": str(depth)}, steps=True) for depth in wanted.depths
    ]
    return RolloutsCase("buffer", f"A trainer of {wanted.trainer_s:.2g} s a step behind a buffer", ways, after=True)


def reference(wanted: SelectedCases) -> RolloutsCase:
    ways = [RolloutsVariant(f"reference {when}", {"reference": when}) for when in ("none", "inline", "deferred")]
    return RolloutsCase("reference", "The reference's log-probabilities", ways)


def constraint(wanted: SelectedCases) -> RolloutsCase:
    """Free answers are no orders: games that heard them would stand still. So theirs are those of the record."""
    ways = [
        RolloutsVariant("free", {"constrain": "false"}, led=True),
        RolloutsVariant("constrained", {"constrain": "true"}, recorded=True),
    ]
    return RolloutsCase("constraint", "Answers kept to legal orders, against any text", ways, after=True)


CASES: Mapping[str, Callable[[SelectedCases], RolloutsCase]] = {
    "turns": turns,
    "peak": peak,
    "constraint": constraint,
    "reference": reference,
    "buffer": buffer,
    "engines": engines,
}


def named_cases(names: Sequence[str]) -> list[Callable[[SelectedCases], RolloutsCase]]:
    """Raises `UnknownName`."""
    for name in names:
        if name not in CASES:
            raise UnknownName("case", name, CASES, label="Cases")
    return [CASES[name] for name in CASES if name in names]
