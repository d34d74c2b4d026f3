"""Whether a variant's answers are the model's own: the same rows by a worker's way in, and through the bare model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpuinfer.api import Channel, Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import WorkerDied
from gpuinfer.models.row_format import BITS, row_dtype
from gpuinfer.runtime.run import RunPlan, RunUpdate, run

BLOCKS = (1, 2, 7, 30, 64, 128, 168)  # rows: 400 in all, asked for at once
TOLERANCES = {
    "float32": 1e-5,
    "bfloat16": 8 * 2.0**-8,
    "float16": 8 * 2.0**-11,
}  # 16 bits: eight units in the last place


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference over all rows, divided by the size of the right answer where that is over 1."""

    difference: float  # infinite when even the shapes differ
    tolerance: float
    rows: int

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance


class ParityCheck(Workload):
    """Asks for the blocks in a worker process, which compares the answers with the bare model's."""

    def __init__(self, setup: Setup, spec: ModelSpec) -> None:
        super().__init__(setup)
        self.difference: float | None = None
        self._arguments = {
            "spec": {**asdict(spec), "arguments": dict(spec.arguments)},
            "device": setup.devices[0],  # the bare model is on one
            "dtype": setup.dtype,
            "seed": setup.seed,
        }

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(0, 1, "checks", note="comparing the answers with the bare model's", setup=True)
        async with infer.workers(f"{__name__}:compare_answers", [self._arguments]) as workers:
            async for _, message in workers:
                if message is not None:
                    self.difference = float(message["difference"])
        yield Progress(1, 1, "checks")


def applies(plan: RunPlan) -> bool:
    """Whether a model of rows is asked: not every workload has one, and a stand-in leaves it alone. What a model of
    text answers is for `gpuinfer verify` to check.
    """
    spec = plan.backend.setup.model
    return plan.workload.asks and spec is not None and spec.kind == "rows"


def check_parity(plan: RunPlan, on_update: Callable[[RunUpdate], None]) -> Parity | None:
    """Compare; None when no model is asked. Raises what hinders the variant, `KeyboardInterrupt` if stopped."""
    setup = plan.backend.setup
    spec = setup.model
    if spec is None or not applies(plan):
        return None
    comparison = ParityCheck(setup, spec)
    report = run(comparison, plan.backend, plan.strategy, roofline=False, on_update=on_update)
    if report["status"] != "done":
        raise KeyboardInterrupt
    if comparison.difference is None:
        raise WorkerDied("the process that compared the answers was killed (out of memory?). Try a smaller model.")
    return Parity(comparison.difference, TOLERANCES[setup.dtype], sum(BLOCKS))


async def compare_answers(infer: Infer, channel: Channel, arguments: Mapping[str, Any]) -> None:
    """The worker: one message, the largest difference."""
    spec = ModelSpec(**arguments["spec"])
    limits = await infer.ready()
    rows = sample(spec, arguments["seed"])
    parts = np.split(packed(rows, spec), np.cumsum(cut(BLOCKS, limits.max_rows))[:-1])
    answers = await asyncio.gather(*(infer(part, rows=len(part)) for part in some_in_place(infer, parts)))
    found = [np.concatenate(column) for column in zip(*map(arrays, answers), strict=True)]
    right = await asyncio.to_thread(direct, spec, arguments, rows)
    await channel.send({"difference": difference(found, right)})


def cut(blocks: Sequence[int], most: int) -> list[int]:
    """The same rows in blocks of at most `most`."""
    return [min(most, rows - done) for rows in blocks for done in range(0, rows, most)]


def sample(spec: ModelSpec, seed: int, rows: int = sum(BLOCKS)) -> np.ndarray:
    """Rows that any model takes, as far as one can know without asking its author: zeros and ones, [rows, features]."""
    random = np.random.default_rng(seed)
    return random.integers(0, 2, (rows, spec.inputs)).astype(row_dtype(spec))


def packed(rows: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """The rows as they travel."""
    return np.packbits(rows, axis=1, bitorder="little") if spec.input_dtype == BITS else rows


def some_in_place(infer: Infer, parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The parts, every second one in the backend's own memory if it has any, which takes another path."""
    for number, part in enumerate(parts):
        block = infer.block(len(part)) if number % 2 else None
        if block is not None:
            block[:] = part
        yield part if block is None else block


def direct(spec: ModelSpec, arguments: Mapping[str, Any], rows: np.ndarray) -> list[np.ndarray]:
    """What the model answers when it is simply called, all rows at once."""
    import torch

    from gpuinfer.models.load import build, resolve_device, resolve_dtype

    device, dtype = resolve_device(arguments["device"]), resolve_dtype(arguments["dtype"])
    module = build(spec, device=device, dtype=dtype, seed=arguments["seed"])
    with torch.inference_mode():
        return arrays(module(torch.from_numpy(rows).to(device=device, dtype=dtype)))


def arrays(answer: Any) -> list[np.ndarray]:
    """An answer's parts in float32 [rows, ...]: of one tensor or array, or a tuple, list or dict of them.

    No answer at all, None, is one part that no model gives.
    """
    parts = [answer[key] for key in sorted(answer)] if isinstance(answer, Mapping) else answer
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    plain = [part.float().cpu() if hasattr(part, "cpu") else part for part in parts]
    return [np.atleast_1d(np.asarray(part, dtype=np.float32)) for part in plain]


def difference(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """The largest over all numbers; masked moves, -inf in both, are equal."""
    if [part.shape for part in found] != [part.shape for part in right]:
        return math.inf
    return max((_apart(one, other) for one, other in zip(found, right, strict=True)), default=0.0)


def _apart(found: np.ndarray, right: np.ndarray) -> float:
    if not found.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - right) / np.maximum(1.0, np.abs(right))
    apart[found == right] = 0.0
    return float(np.nan_to_num(apart, nan=np.inf).max())
