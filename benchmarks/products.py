"""Products of the CPU decoder beside torch's, in turns: GFLOP/s, and GB/s of weights, at the shapes of real models.

usage: python benchmarks/products.py [--models NAME,…] [--rows N,…] [--threads N,…] [--kinds KIND,…]

Each product meets its weights as a model's step does, long after their last use: copies of a weight, together larger
than the caches, are multiplied one after another. Weights are float32 for `float32`, and bfloat16 for the other kinds;
of torch's arrangements (`linear`, `mm` with a weight turned beforehand) the best counts.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpuinfer.text.decoder.cpu_panels import kind_of_bfloat16, panel_bytes, panels_of
from gpuinfer.text.decoder.cpu_product import product_with
from gpuinfer.text.text_roofline import bytes_per_s

MODELS: Mapping[str, Sequence[tuple[int, int]]] = {  # inner, columns
    "smollm2-135m": ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)),
    "qwen2-402m": ((1024, 2048), (1024, 9728), (4864, 1024)),
    "tinyllama-1.1b": ((2048, 2560), (2048, 11264), (5632, 2048)),
    "llama-7b": ((4096, 11008), (11008, 4096)),
}
ROWS = (1, 8, 16, 32, 64, 128, 512)
BUFFER = 1 << 30  # bytes that no cache holds
COLD = 160 << 20  # bytes of copies
PIECE_ROWS, PIECE_PANELS = 128, 16
TURNS, TURN_S = 3, 0.05


class Crew:
    """Threads that do their parts of the same work at once, again and again."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts, self._over = parts, False
        self._go, self._done = threading.Barrier(len(parts)), threading.Barrier(len(parts))
        for number in range(1, len(parts)):
            threading.Thread(target=self._serve, args=(number,), daemon=True).start()

    def __call__(self) -> None:
        if len(self._parts) > 1:
            self._go.wait()
        self._parts[0]()
        if len(self._parts) > 1:
            self._done.wait()

    def close(self) -> None:
        self._over = True
        self._go.wait()

    def _serve(self, number: int) -> None:
        while True:
            self._go.wait()
            if self._over:
                return
            self._parts[number]()
            self._done.wait()


def ours(kind: str, rows: torch.Tensor, weights: Sequence[torch.Tensor], threads: int) -> Crew:
    """All copies, one after another: each thread its range of the panels, in pieces as the step has them."""
    count, inner = rows.shape
    columns = len(weights[0])
    panels = [panels_of(weight) for weight in weights]
    each, total = panel_bytes(inner, panels[0].itemsize), len(panels[0])
    found = torch.zeros(count, columns)
    function = product_with(kind).ctypes

    def part(thread: int) -> None:
        end = total * (thread + 1) // threads
        for weight in panels:
            for panel in range(total * thread // threads, end, PIECE_PANELS):
                some = min(16 * PIECE_PANELS, columns - 16 * panel, 16 * (end - panel))
                for row in range(0, count, PIECE_ROWS):
                    a = rows.data_ptr() + rows.element_size() * row * inner
                    c = found.data_ptr() + 4 * (row * columns + 16 * panel)
                    high = min(PIECE_ROWS, count - row)
                    function(high, some, inner, a, inner, weight.ctypes.data + each * panel, c, columns)

    return Crew([lambda thread=thread: part(thread) for thread in range(threads)])


def torchs(rows: torch.Tensor, weights: Sequence[torch.Tensor], turned: bool) -> Callable[[], None]:
    kept = [weight.T.contiguous() if turned else weight for weight in weights]

    def run() -> None:
        for weight in kept:
            if turned:
                torch.mm(rows, weight)
            else:
                torch.nn.functional.linear(rows, weight)

    return run


def best_times(runs: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of one run of each, the median of the best of each turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(TURNS):
        for name, run in runs.items():
            times, end = [], time.perf_counter() + TURN_S
            while not times or time.perf_counter() < end:
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            found[name].append(min(times))
    return {name: statistics.median(times) for name, times in found.items()}


def compared(inner: int, columns: int, counts: Sequence[int], threads: int, kinds: Sequence[str]) -> Iterator[str]:
    """A line for each number of rows and number format."""
    torch.set_num_threads(threads)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        mine = [kind for kind in kinds if (kind == "float32") == (dtype == torch.float32)]
        if not mine:
            continue
        copies = max(1, -(-COLD // (size * inner * columns)))
        weights = [torch.randn(columns, inner).to(dtype) for _ in range(copies)]
        for count in counts:
            rows = torch.randn(count, inner)
            crews = {
                kind: ours(kind, rows if kind in ("float32", "widened") else rows.to(dtype), weights, threads)
                for kind in mine
            }
            peers = {"linear": torchs(rows.to(dtype), weights, False), "mm": torchs(rows.to(dtype), weights, True)}
            times = best_times({**crews, **peers})
            for crew in crews.values():
                if threads > 1:
                    crew.close()
            best = min(times[name] for name in peers)
            words = []
            for name in (*mine, *peers):
                each = times[name] / copies
                gflops, gbs = 2e-9 * count * inner * columns / each, 1e-9 * size * inner * columns / each
                words.append(
                    f"{name} {gflops:7.1f} GFLOP/s {gbs:5.1f} GB/s"
                    + (f" {best / times[name]:5.2f}x" if name in mine else "")
                )
            yield f"{inner:5} x {columns:5}, {count:3} rows, {threads} threads: " + " | ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = ["float32", "widened", *([] if kind_of_bfloat16() == "none" else [kind_of_bfloat16()])]
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--kinds", default=",".join(here))
    given: Any = parser.parse_args()
    counts = [int(word) for word in given.rows.split(",")]
    print(
        f"all cores read {bytes_per_s([torch.ones(BUFFER // 4)], torch.device('cpu'), 0.5) / 1e9:.1f} GB/s", flush=True
    )
    for threads in [int(word) for word in given.threads.split(",")]:
        for model in given.models.split(","):
            for inner, columns in MODELS[model]:
                for line in compared(inner, columns, counts, threads, given.kinds.split(",")):
                    print(model, line, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
