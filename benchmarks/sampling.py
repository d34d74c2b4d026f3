"""What drawing tokens costs, beside the forward step that it follows.

    python benchmarks/sampling.py [--threads N] [--repeats N] [--flat]

The step is estimated by its matrix products, 64 rows in float32, of a shape of 0.5 B parameters (24 layers, hidden
896, 14 heads, 2 of them with keys, inner 4,864, vocabulary 152,064). Step and draws are measured in turn, medians.
Logits are normal with a spread of 2; `--flat`: of 0.2, where no filter narrows the choice much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import Sampler

VOCABULARY = 152_064
LAYERS, HIDDEN = 24, 896
PRODUCTS = ((HIDDEN, 18 * 64), (HIDDEN, HIDDEN), (HIDDEN, 2 * 4864), (4864, HIDDEN))  # in, out: of one layer
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
FILTERS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02}
CASES = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.9),
    "all filters, penalties": Sampling(top_k=50, **FILTERS, **PENALTIES),
    "the same without top-k": Sampling(**FILTERS, **PENALTIES),
    "greedy, 5 logprobs": Sampling(temperature=0, logprobs=5),
}
SIZES = ((64, VOCABULARY), (64, 1024), (256, 257))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--flat", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    step = products(64)
    draws = {
        (rows, vocabulary, name): drawing(rows, vocabulary, sampling, given.threads, 0.2 if given.flat else 2.0)
        for rows, vocabulary in SIZES
        for name, sampling in CASES.items()
    }
    whole, *parts = medians([step, *draws.values()], given.repeats)
    print(f"matrix products of a step of 0.5 B parameters, 64 rows, {given.threads} threads: {whole * 1e3:.1f} ms")
    for (rows, vocabulary, name), seconds in zip(draws, parts, strict=True):
        share = f"  {seconds / whole:6.1%} of the step" if vocabulary == VOCABULARY else ""
        print(f"{rows:4} x {vocabulary:7,}  {name:24} {seconds * 1e3:9.3f} ms{share}")


def products(rows: int) -> Callable[[], object]:
    """A function that multiplies what a step does. All layers share their weights, which no cache of a core holds."""
    layer = [(torch.randn(rows, width), torch.randn(out, width)) for width, out in PRODUCTS]
    head = torch.randn(rows, HIDDEN), torch.randn(VOCABULARY, HIDDEN)

    def run() -> Tensor:
        with torch.inference_mode():
            for _ in range(LAYERS):
                for inputs, weight in layer:
                    torch.nn.functional.linear(inputs, weight)
            return torch.nn.functional.linear(*head)

    return run


def drawing(rows: int, vocabulary: int, sampling: Sampling, threads: int, spread: float) -> Callable[[], object]:
    """A function that draws for all rows, which have prompts of 200 tokens."""
    random = np.random.default_rng(1)
    found = Sampler(rows, vocabulary, "cpu", seed=1, end_tokens=[0], threads=threads)
    for slot in range(rows):
        found.admit(slot, sampling, random.integers(0, vocabulary, 200).astype(np.int32), "row", slot)
    logits = torch.from_numpy(random.standard_normal((rows, vocabulary), np.float32) * np.float32(spread))
    slots = np.arange(rows, dtype=np.int32)
    return lambda: found.draw(logits, slots)


def medians(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds that each takes; all of them in turn, so that a busy moment falls on all alike."""
    for work in works:
        work()
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, own in zip(works, taken, strict=True):
            started = time.perf_counter()
            work()
            own.append(time.perf_counter() - started)
    return [statistics.median(own) for own in taken]


if __name__ == "__main__":
    main()
