"""vLLM's counters, and its forward steps as the run's batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpuinfer.api import Lane


class Counting:
    """Told by vLLM's output handler once a step, on the event loop. All names of vLLM's are read with care: it calls
    these classes unstable.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[int, float], None] | None = None
        self.lane: Lane | None = None
        self.running = self.waiting = 0
        self.preemptions = self.steps = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.cache_usage = self.seconds = self.held_s = 0.0
        self._since: float | None = None  # when the step under way began; None: nothing is under way

    def forget(self) -> None:
        """What has been counted so far was only tried."""
        told = self.on_step, self.lane
        Counting.__init__(self)
        self.on_step, self.lane = told

    def begin(self) -> None:
        """Something has been asked for."""
        if self._since is None:
            self._since = time.monotonic()
            self._enter("forward")

    def rest(self) -> None:
        """Nothing is under way any more."""
        self._since = None
        self._enter("idle")

    def _enter(self, station: str) -> None:
        if self.lane is not None:
            self.lane.enter(station)

    def record(self, scheduler: Any, iteration: Any) -> None:
        """One step's outputs have come."""
        if scheduler is not None:
            self.running, self.waiting = int(scheduler.num_running_reqs), int(scheduler.num_waiting_reqs)
            self.cache_usage = float(scheduler.kv_cache_usage)
            self.prefix_queries += int(scheduler.prefix_cache_stats.queries)
            self.prefix_hits += int(scheduler.prefix_cache_stats.hits)
        if iteration is None:
            return
        prompts = iteration.prompt_token_stats
        drawn = int(iteration.num_generation_tokens)
        self.output_tokens += drawn
        self.prompt_tokens += int(prompts.computed)
        self.cached_tokens += int(prompts.cached_tokens)
        self.preemptions += int(iteration.num_preempted_reqs)
        self._step(drawn)

    def _step(self, rows: int) -> None:
        now = time.monotonic()
        seconds = 0.0 if self._since is None else now - self._since
        self.steps += 1
        self.seconds += seconds
        self.held_s += seconds * (self.waiting > 0)
        if self._since is not None:
            self._since = now
            self._enter("reply")  # so that whoever looks on sees it move
            self._enter("forward")
        if self.on_step is not None and rows:
            self.on_step(rows, seconds)

    def counters(self) -> dict[str, Any]:
        """As our own driver counts."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "preempted_rows": self.preemptions,
            "held_s": self.held_s,
            "echoing_s": 0.0,
        }

    def engine(self) -> dict[str, Any]:
        """What vLLM says of itself: levels of this moment, and totals."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
            "cache_usage": round(self.cache_usage, 4),
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
        }


def factory(counting: Counting) -> Any:
    """What AsyncLLM makes its logger of: an instance for each engine, of which there is one."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **_: Any
        ) -> None:
            counting.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
