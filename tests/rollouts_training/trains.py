"""A run's training as a trainer's side sees it, with nothing behind it."""

from __future__ import annotations

from gpuinfer.errors import UsageError


class StandInTraining:
    def __init__(self):
        self.version = self.step = 0
        self.updates = []
        self.stale = lambda group: False
        self.starved_of = "rollouts"

    async def update(self, version, weights=None, adapter=None):
        if version not in (self.version, self.version + 1):
            raise UsageError(f"version {version} cannot come after {self.version}.")
        if version != self.version:
            self.updates.append((version, weights, adapter))
        self.version = version

    def facts(self):
        return {"buffer_waiting": 0}

    def too_old(self, groups):
        return [group for group in groups if self.stale(group)]
