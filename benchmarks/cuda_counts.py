"""What a decode step asks of a CUDA device, and the draw behind it, counted on fake tensors where there is none.

python benchmarks/cuda_counts.py [--slots 256] [--context 4096]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in ("cuda", "text")]

from counting import Asked, CountedDraws, own_kernels, real_host_memory
from fake_device import fake_device, load_guard
from random_models import LLAMA, random_weights
from steps import step_of

from gpuinfer.generation import Sampling
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.sampling import Sampler, torch_path

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


def step_of_rows(device: torch.device, layers: int, kernels: bool) -> Asked:
    """One token each of three rows, in bfloat16."""
    asked, shape = Asked(), replace(LLAMA, layers=layers)
    with unset_fake_temporarily():
        weights = random_weights(shape)
    with own_kernels(asked):
        one = TorchDecoder(shape, weights, device, torch.bfloat16, slots=5, pages=40, length=160, kernels=kernels)
        asked.kernels.clear()
        with asked:
            one.forward(step_of((0, 35, [5]), (3, 4, [8]), (1, 145, [7])))
    return asked


def forms(device: torch.device, slots: int, context: int, kernels: bool) -> int:
    """Shapes of a decode step that may each become a graph."""
    shape = replace(LLAMA, layers=1, positions=context)
    with unset_fake_temporarily():
        weights = random_weights(shape)
    with own_kernels():
        one = TorchDecoder(
            shape, weights, device, torch.bfloat16, slots=slots, pages=slots, length=context, kernels=kernels
        )
    return len(one._static.row_buckets) * len(one._static.reach_buckets)


def draw_of_rows(device: torch.device, options: Sequence[Sampling], kernels: bool) -> tuple[int, int, int]:
    """How often the host waits in the second of two draws for eight rows; copies from it; kernels."""
    rows, vocabulary, waits = 8, 1000, 0

    def to_host(values: Tensor) -> Any:
        nonlocal waits
        waits += 1
        with unset_fake_temporarily():
            return torch.ones(values.shape, dtype=values.dtype).numpy()

    sampler = Sampler(rows, vocabulary, device, seed=1, end_tokens=[0], threads=1)
    for slot in range(rows):
        sampler.admit(slot, options[slot % len(options)], np.arange(9, dtype=np.int32), "", slot)
    logits, slots = torch.empty((rows, vocabulary), device=device), np.arange(rows, dtype=np.int32)
    own = CountedDraws()
    if kernels:
        sampler._path = torch_path.TorchPath(sampler._slots, vocabulary, own)
    with mock.patch.object(torch_path, "to_host", to_host):
        for _ in range(2):
            asked, waits = Asked(), 0
            own.launched.clear()
            with asked:
                sampler.draw(logits, slots)
    return waits, asked.copies, (asked.kernels + own.launched).total()


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
    table = Table("of a decode step, Llama's shape, bfloat16", "torch's kernels", "our kernels")
    with tempfile.TemporaryDirectory() as folder:
        if not load_guard(Path(folder)):
            sys.exit("there is no C++ compiler for the device guard that fake CUDA tensors need: install g++")
        with fake_device() as device, real_host_memory():
            ways = (False, True)
            steps = {kernels: [step_of_rows(device, layers, kernels) for layers in (2, 3)] for kernels in ways}
            table.add_row("kernels a layer", *(str((of[1].kernels - of[0].kernels).total()) for of in steps.values()))
            table.add_row("copies from the host", *(str(of[1].copies) for of in steps.values()))
            counts = [str(forms(device, given.slots, given.context, kernels)) for kernels in ways]
            table.add_row(f"graph forms, {given.slots} slots × {given.context:,}", *counts)
            draws = draws_of(device)
    Console().print(table)
    Console().print(draws)


if __name__ == "__main__":
    main()
