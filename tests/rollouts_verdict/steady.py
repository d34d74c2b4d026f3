"""A trainer and its rollouts in their steady state, by the laws of closed systems: a step's record without a run.

Groups of `rows` games are `asked` at once at most; each asks the engine for `think` seconds of one slot, is
`environment` seconds in its environment and `reference` seconds in its reference pass. `ahead` batches of `batch`
groups may be played ahead of the trainer. Seconds are any unit: all that matters is how they compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuinfer.rollouts.steps import StepRecord


@dataclass(frozen=True)
class Steady:
    train: float = 10.0
    load: float = 0.1
    think: float = 4.0
    environment: float = 0.2
    reference: float = 0.0
    constraint: float = 0.0  # of each of the engine's seconds, one more for constraints
    cold: float = 0.0
    rows: int = 4
    slots: int = 16
    asked: int = 8
    batch: int = 8
    ahead: float = 2.0
    step: int = 5

    def record(self) -> StepRecord:
        think = self.think * (1 + self.constraint)
        alone = think + self.environment + self.reference  # of a group that waits for nobody
        admitted = min(self.asked, max(1.0, self.ahead * self.batch))
        rate = min(admitted / alone, self.slots / (self.rows * think))  # groups for each second: asymptotic bounds
        making = self.batch / rate
        under_way = making / self.batch * admitted if rate < admitted / alone else alone  # a group's time, by Little
        wall = max(self.train + self.load, making) + self.cold
        running = min(admitted, rate * under_way)
        free = making < self.train + self.load  # the rollouts have time to spare: the rule keeps groups back
        gated = wall - making - self.cold if free else wall if admitted < self.asked else 0.0
        busy = min(1.0, self.batch * self.rows * think / (wall * self.slots))
        asking = self.batch / wall * self.rows * (under_way - self.environment - self.reference) / self.slots
        return StepRecord(
            step=self.step,
            version=self.step,
            at_s=wall * (self.step + 1),
            wall_s=wall,
            wait_s=wall - self.train - self.load,
            train_s=self.train,
            adapter_load_s=self.load,
            groups=self.batch,
            games=self.batch * self.rows,
            step_rollout_s=under_way * math.ceil(self.batch / admitted),
            buffer_before=0 if not free else self.batch,
            running=round(running),
            slots=self.slots,
            inference_s=busy * wall,
            occupancy=busy,
            busy=busy,
            offered=max(busy, asking),
            offered_working=max(busy, asking),
            working_s=wall,
            gated_s=max(0.0, gated),
            reference_s=wall if self.reference else 0.0,
            reference_share=self.reference / (under_way if rate == admitted / alone else under_way + self.reference),
            constraint_s=busy * wall * self.constraint / (1 + self.constraint),
            environment_s=self.environment / under_way * wall,
            cold_start_s=self.cold,
        )
