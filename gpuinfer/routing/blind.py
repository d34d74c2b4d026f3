"""Policies that look at nothing: to compare with, or where all requests and replicas are alike."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.routing.choosing import Asking, Choice, Load, Policy


class Random(Policy):
    """Any, each as likely as the next."""

    needs_load = False

    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
        return Choice(loads[int(self._dice.random() * len(loads))], "random")


class RoundRobin(Policy):
    """Each in turn, by its number, whatever its load and speed: the one after the last that was chosen."""

    needs_load = False
    _last = -1  # member

    def choose(self, loads: Sequence[Load], asking: Asking) -> Choice:
        last, after, lowest = self._last, None, loads[0]
        for load in loads:
            if load.member > last:
                if after is None or load.member < after.member:
                    after = load
            elif load.member < lowest.member:
                lowest = load
        chosen = lowest if after is None else after
        self._last = chosen.member
        return Choice(chosen, "round-robin")
