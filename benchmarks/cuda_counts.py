"""What a decode step asks of a CUDA device, counted on fake tensors where there is none.

python benchmarks/cuda_counts.py [--slots 256] [--context 4096]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import unset_fake_temporarily

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in ("cuda", "text")]

from counting import Asked, own_kernels, real_host_memory
from fake_device import fake_device, load_guard
from random_models import LLAMA, random_weights
from steps import step_of

from gpuinfer.text.decoder.torch_decoder import TorchDecoder


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
    Console().print(table)


if __name__ == "__main__":
    main()
