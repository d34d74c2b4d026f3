"""What steps of a decoder ask of a CUDA device, and the draws behind them, counted on fake tensors where there is none.

python benchmarks/cuda_counts.py [--slots 256] [--context 4096]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in ("cuda", "text")]

from counting import Asked, CountedDownloads, CountedDraws, own_kernels, real_host_memory
from fake_device import fake_device, load_guard
from random_models import LLAMA, random_weights
from steps import step_of

from gpuinfer.api import Roofline, Setup
from gpuinfer.generation import Sampling
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.text.decoder.attention_plan import nothing_shared
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.torch_static import StaticBatches
from gpuinfer.text.sampling import Sampler, torch_path
from gpuinfer.text.transformer import PAGE, Rope, Step
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload

Segment = tuple[int, int, Sequence[int]]

FILTERS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 50}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
DRAWS = {
    "greedy": [Sampling(temperature=0)],
    "greedy, logit bias": [Sampling(temperature=0, logit_bias={3: 1.0})],
    "greedy, 5 logprobs": [Sampling(temperature=0, logprobs=5)],
    "temperature": [Sampling(temperature=0.8)],
    "top-k": [Sampling(top_k=50)],
    "top-p": [Sampling(top_p=0.9)],
    "all filters": [Sampling(**FILTERS)],
    "all filters, penalties": [Sampling(**FILTERS, **PENALTIES)],
    "rows of all kinds": [
        Sampling(temperature=0),
        Sampling(**FILTERS, **PENALTIES, min_tokens=9, logit_bias={3: 1.0}, logprobs=3),
        Sampling(logprobs=0),
        Sampling(processed_logprobs=True),
    ],
}


DECODE = ((0, 35, [5]), (3, 4, [8]), (1, 145, [7]))  # segments of a step: slot, first position, tokens
PROMPTS = ((0, 35, [5]), (3, 0, list(range(40))), (1, 145, [7, 8, 9]))
SAMPLES, PROMPT, ANSWER = 64, 1024, 256  # of one prompt; positions of it, and of each answer
WORKERS, BEST_BATCH = 16, 65_536


def step_of_rows(device: torch.device, segments: Sequence[Segment], layers: int, kernels: bool) -> Asked:
    """In bfloat16, each row's last logits wanted."""
    asked, shape = Asked(), replace(LLAMA, layers=layers)
    with unset_fake_temporarily():
        weights = random_weights(shape)
    with own_kernels(asked):
        one = TorchDecoder(shape, weights, device, torch.bfloat16, slots=5, pages=40, length=160, kernels=kernels)
        asked.kernels.clear()
        with asked:
            one.forward(step_of(*segments, last_only=True))
    return asked


def batches(device: torch.device, slots: int, context: int, kernels: bool) -> StaticBatches:
    """Of one layer whose heads are as those of a model of some billion weights: four share keys."""
    shape = replace(LLAMA, layers=1, positions=context, heads=8, head_dim=64, rope=Rope((1.0,) * 32))
    with unset_fake_temporarily():
        weights = random_weights(shape)
    with own_kernels():
        one = TorchDecoder(
            shape, weights, device, torch.bfloat16, slots=slots, pages=slots, length=context, kernels=kernels
        )
    return one._static


def forms(static: StaticBatches) -> int:
    """Shapes of steps that may each become a graph."""
    return len(static.row_buckets) * len(static.reach_buckets) + len(static.prompt_tokens)


def keys_read(static: StaticBatches, shared: int, ends: NDArray[np.int64], kernels: bool) -> str:
    """Positions of which a decode step reads keys, for each that it needs: of rows that see `ends` positions, and have
    the first `shared` pages in common. A row that only fills up sees one position.
    """
    rows, columns = len(ends), static.cache.columns
    padded = bucket_for(rows, static.row_buckets)
    read = padded * bucket_for(int(ends.max()), static.reach_buckets)
    if kernels:
        pages = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        pages[:, :shared] = pages[0, :shared]
        step = Step(*([np.zeros(rows, np.int32), pages, ends.astype(np.int32) - 1] + 2 * [np.ones(rows, np.int32)]))
        plan = static.shared_by(step, padded) or nothing_shared(rows)
        read = plan.positions_read(ends) + padded - rows
    return f"{read / (shared * PAGE + int((ends - shared * PAGE).sum())):.2f}"


def games_in_flight() -> int:
    """Of Connect Four, all workers together, for a device that is at its best with batches of so many rows."""
    play = SelfPlayWorkload(Setup(devices=("cuda",)), game="connect-four", workers=WORKERS)
    roofline = Roofline(4e7, BEST_BATCH, "2 forwards × 1 thread")
    return WORKERS * play.slots(SimpleNamespace(roofline=roofline), WORKERS, 1 << 40)


def draw_of_rows(device: torch.device, options: Sequence[Sampling], kernels: bool) -> tuple[int, int, int]:
    """How often the host waits in the second of two draws for eight rows; copies from it; kernels."""
    rows, vocabulary, waits = 8, 1000, CountedDownloads()
    sampler = Sampler(rows, vocabulary, device, seed=1, end_tokens=[0], threads=1)
    for slot in range(rows):
        sampler.admit(slot, options[slot % len(options)], np.arange(9, dtype=np.int32), "", slot)
    logits, slots = torch.empty((rows, vocabulary), device=device), np.arange(rows, dtype=np.int32)
    own = CountedDraws()
    if kernels:
        sampler._path = torch_path.TorchPath(sampler._slots, vocabulary, own)
    with mock.patch.object(torch_path, "Download", waits.of):
        for _ in range(2):
            asked, waits.count = Asked(), 0
            own.launched.clear()
            with asked:
                sampler.draw(logits, slots)
    return waits.count, asked.copies, (asked.kernels + own.launched).total()


def draws_of(device: torch.device) -> Table:
    """A row for each set of options."""
    columns = ("host syncs a decode step", "uploads a step", "kernels a sampled step", "with our kernels")
    table = Table("of a draw", *columns)
    for name, options in DRAWS.items():
        waits, copies, plain = draw_of_rows(device, options, kernels=False)
        own = draw_of_rows(device, options, kernels=True)[2]
        table.add_row(name, *map(str, (waits, copies, plain, own)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    given = parser.parse_args()
    table = Table("of a decoder, Llama's shape, bfloat16", "torch's kernels", "our kernels")
    with tempfile.TemporaryDirectory() as folder:
        if not load_guard(Path(folder)):
            sys.exit("there is no C++ compiler for the device guard that fake CUDA tensors need: install g++")
        with fake_device() as device, real_host_memory():
            ways = (False, True)
            for name, segments in (("decode step", DECODE), ("step with prompts", PROMPTS)):
                steps = [[step_of_rows(device, segments, layers, kernels) for layers in (2, 3)] for kernels in ways]
                counts = [str((of[1].kernels - of[0].kernels).total()) for of in steps]
                table.add_row(f"kernels a layer, {name}", *counts)
                table.add_row(f"copies from the host, {name}", *(str(of[1].copies) for of in steps))
            static = [batches(device, given.slots, given.context, kernels) for kernels in ways]
            table.add_row(f"graph forms, {given.slots} slots × {given.context:,}", *(str(forms(one)) for one in static))
            ends = np.random.default_rng(0).integers(1, given.context, given.slots)
            read = [keys_read(one, 0, ends, kernels) for one, kernels in zip(static, ways, strict=True)]
            table.add_row(f"keys read ÷ needed, {given.slots} rows of 1 to {given.context:,}", *read)
            ends, shared = np.full(SAMPLES, PROMPT + ANSWER), PROMPT // PAGE
            read = [keys_read(one, shared, ends, kernels) for one, kernels in zip(static, ways, strict=True)]
            table.add_row(f"the same, {SAMPLES} answers of {ANSWER} to one prompt of {PROMPT:,}", *read)
            draws = draws_of(device)
    Console().print(table)
    Console().print(draws)
    print(f"games in flight, {WORKERS} workers, a device at its best with {BEST_BATCH:,} rows: {games_in_flight():,}")


if __name__ == "__main__":
    main()
