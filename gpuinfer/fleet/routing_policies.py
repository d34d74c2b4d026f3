"""The built-in routing policies: which replica a request goes to; and the guard that asks any policy.

A policy reads no clock and does no I/O, so that the router and the simulator run the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import ReplicaLoad, RoutedRequest, RoutingChoice, RoutingPolicy, Setup
from gpuinfer.config import blame, options, registry
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError


def hashed(what: bytes) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")


class Random(RoutingPolicy):
    """Any, each as likely as the next."""

    needs_load = False

    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        return RoutingChoice(loads[int(self.dice.random() * len(loads))], "random")


class RoundRobin(RoutingPolicy):
    """Each in turn, by its number, whatever its load and speed: the one after the last that was chosen."""

    needs_load = False
    _last = -1  # member

    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        last, after, lowest = self._last, None, loads[0]
        for load in loads:
            if load.member > last:
                if after is None or load.member < after.member:
                    after = load
            elif load.member < lowest.member:
                lowest = load
        chosen = lowest if after is None else after
        self._last = chosen.member
        return RoutingChoice(chosen, "round-robin")


MOST_KEPT = 4096
_kept: dict[tuple[str, float, float], str] = {}


def load_reason(policy: str, chosen: float, other: float) -> str:
    """Such as `least-loaded 3<5`. Kept, since putting it together takes as long as the choice."""
    key = (policy, chosen, other)
    said = _kept.get(key)
    if said is None:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        sign = "<" if chosen < other else ">" if chosen > other else "="
        said = _kept[key] = f"{policy} {chosen:.4g}{sign}{other:.4g}"
    return said


class LeastLoaded(RoutingPolicy):
    """The one with the least in flight for its speed; of equals any, so that routers do not all run to the same one."""

    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        least = other = math.inf
        chosen, equals, draw = loads[0], 0, self.dice.random
        for load in loads:
            score = load.in_flight / load.speed
            if score < least:
                least, other, chosen, equals = score, least, load, 1
            elif score == least:
                other = score
                equals += 1
                if draw() * equals < 1.0:  # each of the equals so far has the same chance (Vitter's reservoir, 1985)
                    chosen = load
            elif score < other:
                other = score
        return RoutingChoice(
            chosen, "least-loaded alone" if other == math.inf else load_reason("least-loaded", least, other)
        )


class PowerOfTwo(RoutingPolicy):
    """The less loaded of two at random: nearly as good as looking at all, and it does not herd where loads are known
    late (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        count, draw = len(loads), self.dice.random
        if count == 1:
            return RoutingChoice(loads[0], "power-of-two alone")
        first, second = int(draw() * count), int(draw() * (count - 1))
        one, other = loads[first], loads[second + (second >= first)]
        ours, theirs = one.in_flight / one.speed, other.in_flight / other.speed
        if theirs < ours:
            one, ours, theirs = other, theirs, ours
        return RoutingChoice(one, load_reason("power-of-two", ours, theirs))


BITS = (1 << 64) - 1


class Sticky(RoutingPolicy):
    """The favourite of the request's affinity, unless it has more than `margin` more in flight, for its speed, than
    the least loaded, which is then taken. Requests without an affinity go to the least loaded.

    The favourite is the one whose hash with the affinity is the highest (rendezvous hashing: Thaler & Ravishankar,
    "Using name-based mappings to increase hit rates", 1998): when a replica leaves, only what it was the favourite of
    moves, and when one joins, only what it is now the favourite of. Processes need not talk to agree on it.
    """

    needs_affinity = True

    class Options(api.Options):
        margin: float = Field(8.0, ge=0, allow_inf_nan=False, description="requests that it may be ahead of the least")

    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self._margin = self.options.margin
        self._least = LeastLoaded(self.setup)

    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        if request.affinity is None:
            return self._least.choose(loads, request)
        key = hashed(request.affinity)
        # A product with an odd number, modulo 2^64, compared by its high bits, is as even as another blake2b, and takes
        # a tenth of the time (Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair problem",
        # 1997).
        hashes = [key * load.mark & BITS for load in loads]
        favourite = loads[hashes.index(max(hashes))]
        ahead = favourite.in_flight / favourite.speed
        if ahead > self._margin:  # else nobody can be so far behind it
            chosen = self._least.choose(loads, request).load
            least = chosen.in_flight / chosen.speed
            if ahead - least > self._margin:
                return RoutingChoice(chosen, load_reason("sticky-broken", ahead, least))
        return RoutingChoice(favourite, "sticky")


DEFAULT_POLICY = "least-loaded"

KIND = "routing"


def policy_class(name: str) -> type[RoutingPolicy]:
    """The policy of this name. Raises `UnknownName` and `PluginError`."""
    found: type[RoutingPolicy] = registry.load(KIND, name)
    return found


def check_policy_options(name: str, values: Mapping[str, GivenValue]) -> dict[str, Any]:
    """Options as the policy of this name takes them; it is built once, to see that it can be. Raises `UsageError` for
    what it does not take, and `WorkError` for what it raises.
    """
    kind = policy_class(name)
    if (missing := kind.missing()) is not None:
        raise UsageError(f"routing policy '{name}' cannot be used here: {missing}")
    checked = options.check(kind.Options, values, f"routing policy '{name}'")
    blame.make(kind, Setup(), checked)
    return checked


def make_policy(name: str, seed: int, **values: Any) -> RoutingPolicy:
    """The policy of this name; the seed decides what it leaves to chance. Raises as `check_policy_options` does."""
    return blame.make(policy_class(name), Setup(seed=seed), values)


L = TypeVar("L", bound=ReplicaLoad)


class PolicyGuard:
    """Asks a policy. Where that raises, or answers what is no choice, the least loaded replica is taken."""

    def __init__(self, policy: RoutingPolicy, on_fault: Callable[[str], None]) -> None:
        """`on_fault` is called with each fault: whose it is, what was wrong, and the cure."""
        self.policy, self._on_fault = policy, on_fault
        self._fallback = LeastLoaded(policy.setup)
        self._reasons: set[str] = set()  # that have been looked at, and fit a header

    def choose(self, loads: Sequence[L], request: RoutedRequest) -> tuple[L, str]:
        """One of `loads`, which are never empty, and why."""
        try:
            choice = self.policy.choose(loads, request)
            if type(choice) is RoutingChoice and choice[0] in loads and choice[1] in self._reasons:
                return choice  # type: ignore[return-value]
            wrong = choice.fault(loads) if isinstance(choice, RoutingChoice) else "that is no RoutingChoice"
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
            fault = blame.raised_by(self.policy, "choose", error)
        else:
            if wrong is None:
                if len(self._reasons) >= MOST_KEPT:
                    self._reasons.clear()
                self._reasons.add(choice.why)
                return choice  # type: ignore[return-value]
            fault = blame.failure(self.policy, f"choose returned {repr(choice)[:80]}, and {wrong}")
        self._on_fault(f"{fault} The least loaded replica is taken in its place.")
        found: Any = self._fallback.choose(loads, request)
        return found.load, f"fallback {found.why}"
