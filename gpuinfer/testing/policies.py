"""What a routing policy promises, tried on fleets of every kind that come, grow, shrink and go."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

from gpuinfer.api import ReplicaLoad, RoutedRequest, RoutingChoice, RoutingPolicy, Setup
from gpuinfer.testing.findings import Examination, Finding, check_build, check_options, run_bounded

ONE_OF = "chooses one of the replicas, and says why"
ALONE = "takes the only replica"
KEEPS = "leaves the loads as they are"
SAME = "chooses the same with the same seed"
ROUNDS = 50

Make = Callable[[], RoutingPolicy]


def check_policy(make: Make, timeout_s: float = 30.0, *, examiner: Examination | None = None) -> list[Finding]:
    """Every promise of `api.RoutingPolicy`; `make` makes a new one whenever one is needed. Each check may take
    `timeout_s`, or what `examiner` allows.
    """
    return run_bounded(functools.partial(_check, make), examiner or Examination(timeout_s))


def _check(make: Make, examiner: Examination) -> None:
    if (policy := check_build(make, RoutingPolicy, examiner)) is None:
        return
    check_options(policy, examiner)
    for name, fault_of in PROMISES.items():
        examiner.check(name, functools.partial(fault_of, make))


def fleets(seed: int = 0) -> Iterator[tuple[str, list[ReplicaLoad], RoutedRequest]]:
    """Replicas and requests that a policy must cope with, one after the other."""
    dice = random.Random(seed)
    yield "replicas with nothing to do", [ReplicaLoad(number) for number in range(4)], RoutedRequest()
    yield "numbers with gaps, out of order", [ReplicaLoad(number) for number in (7, 300, 2)], RoutedRequest()
    yield "a slow start", [ReplicaLoad(0, 3, 0.1), ReplicaLoad(1, 3, 1.0)], RoutedRequest()
    yield "bounds", [ReplicaLoad(0, 3, room=4), ReplicaLoad(1, 0, room=1)], RoutedRequest()
    yield "an affinity", [ReplicaLoad(number, number) for number in range(3)], RoutedRequest(1.0, b"user 1")
    yield (
        "an affinity of any bytes",
        [ReplicaLoad(number) for number in range(3)],
        RoutedRequest(1.0, bytes(range(256))),
    )
    yield "a large request", [ReplicaLoad(0, 9), ReplicaLoad(1, 8)], RoutedRequest(1e5)
    yield "as many as there may be", [ReplicaLoad(number, number % 5) for number in range(512)], RoutedRequest()
    for round_ in range(ROUNDS):
        members = dice.sample(range(16), dice.randint(1, 8))
        loads = [ReplicaLoad(member, dice.randint(0, 20), dice.uniform(0.1, 4.0)) for member in members]
        affinity = b"user %d" % dice.randint(0, 5) if dice.random() < 0.5 else None
        yield f"replicas that come and go, round {round_}", loads, RoutedRequest(1.0, affinity)


def _fault_of_choices(make: Make) -> str | None:
    policy = make()
    for case, loads, request in fleets():
        choice = policy.choose(tuple(loads), request)
        fault = choice.fault(loads) if isinstance(choice, RoutingChoice) else "that is no RoutingChoice"
        if fault is not None:
            return f"{case}: it chose {repr(choice)[:80]}, and {fault}. Return RoutingChoice(load, why)."
    return None


def _fault_alone(make: Make) -> str | None:
    policy = make()
    for number in (0, 5):
        only = ReplicaLoad(number, 1000)
        if policy.choose((only,), RoutedRequest(1.0, b"user")).load is not only:
            return "it was given one replica, and chose another. Choose from `loads`."
    return None


def _fault_of_keeping(make: Make) -> str | None:
    policy = make()
    for case, loads, request in fleets():
        before = _seen(loads)
        policy.choose(tuple(loads), request)
        if _seen(loads) != before:
            return f"{case}: it has changed a load. Leave that to the router, which counts what it sends."
    return None


def _fault_of_repeating(make: Make) -> str | None:
    made = make()
    one, other = (type(made)(Setup(seed=7), **made.options.model_dump()) for _ in range(2))
    for case, loads, request in fleets():
        if one.choose(tuple(loads), request).load is not other.choose(tuple(loads), request).load:
            return f"{case}: two policies of one seed chose differently. Draw from `self.dice` alone."
    return None


def _seen(loads: Sequence[ReplicaLoad]) -> list[tuple[float, ...]]:
    return [(load.member, load.in_flight, load.speed, load.room, load.mark) for load in loads]


PROMISES = {ONE_OF: _fault_of_choices, ALONE: _fault_alone, KEEPS: _fault_of_keeping, SAME: _fault_of_repeating}
