"""What adapters cost: rows with and without, adapters that are only loaded, and exchanges under load: a Markdown table.

    python benchmarks/adapters.py [--model FOLDER] [--rows N] [--repeats N] [--seconds S] [--swap-every S] [--quick]

All cases of a repeat run in turn, and ratios are taken within a repeat. Time is that of processors (`process_time`), as
other programs take none of it, and beside it that of the clock. Exchanges: prompts under an adapter keep all slots busy
while every so often another version of it is read, packed and loaded, against the same without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint, read_adapter
from gpuinfer.text.checkpoint.peft_adapter import targets_of
from gpuinfer.text.generator import Driver, open_generator
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import Decoder, Step

STEPS = 24  # of one measurement
ALLOWED = 0.02  # of the throughput, that exchanges may take
ANSWER, PROMPT = 48, 32  # tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=42)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one window of exchanges")
    parser.add_argument("--swap-every", type=float, default=1.0, help="seconds between two exchanges")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.repeats, given.seconds, given.swap_every = 2, 1.0, 0.3
    with tempfile.TemporaryDirectory() as scratch:
        steps(given, Path(scratch))
        exchanges(given, Path(scratch))


def peft_folder(folder: Path, checkpoint: Checkpoint, rank: int, seed: int) -> str:
    """An adapter of all linear layers, small enough not to drown the base."""
    from safetensors.torch import save_file

    dice, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(checkpoint.shape.layers):
        for name, target in targets_of(checkpoint.layout).items():
            before = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{before}.lora_A.weight"] = torch.randn(rank, target.inputs, generator=dice) / target.inputs**0.5
            tensors[f"{before}.lora_B.weight"] = 0.02 * torch.randn(target.outputs, rank, generator=dice)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return str(folder)


# Steps


def steps(given: argparse.Namespace, scratch: Path) -> None:
    checkpoint = open_checkpoint(ModelSpec(given.model, kind="text"))
    plain, loaded = (decoder_of(given) for _ in range(2))
    ranks = (8, 64)
    for number, rank in enumerate((*ranks, 8, 8, 8), 1):
        folder = peft_folder(scratch / f"step-{number}", checkpoint, rank, number)
        loaded.load(number, loaded.pack_adapter(read_adapter(checkpoint, folder)))
    some = np.arange(given.rows, dtype=np.int32)
    cases: dict[str, tuple[Decoder, np.ndarray | None]] = {
        "no adapter is loaded": (plain, None),
        "adapters are loaded, no row has one": (loaded, None),
        "one row of all has one": (loaded, (some == 0).astype(np.int32)),
        f"all rows have one of rank {ranks[0]}": (loaded, np.full(given.rows, 1, np.int32)),
        f"all rows have one of rank {ranks[1]}": (loaded, np.full(given.rows, 2, np.int32)),
        "rows have four, of rank 8, and none, in turn": (loaded, np.array([0, 1, 3, 4, 5], np.int32)[some % 5]),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(given.repeats + 1):
        for name, (decoder, adapters) in cases.items():
            seconds = timed(decoder, given.rows, adapters)
            if repeat:  # the first warms up
                times[name].append(seconds)
    print(f"\nA step of {given.rows} rows at position {PROMPT} to {PROMPT + STEPS}, one thread, processor time.\n")
    print("| rows | ms a step | throughput, against no adapter |")
    print("|---|---|---|")
    first = times["no adapter is loaded"]
    for name, own in times.items():
        ratios = [base / one for base, one in zip(first, own, strict=True)]
        print(f"| {name} | {1e3 * statistics.median(own):.2f} | {spread(ratios)} |")


def decoder_of(given: argparse.Namespace) -> Decoder:
    setup = Setup(devices=("cpu",))
    tuning = TorchModelOptions(slots=given.rows, context=256, threads=1)
    return open_generator(ModelSpec(given.model, kind="text"), setup, tuning).decoder


def timed(decoder: Decoder, rows: int, adapters: np.ndarray | None) -> float:
    """Processor seconds of one step, of the quickest half of some steps."""
    wanted, ones, each = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32), decoder.pages // rows
    pages = np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    found = []
    for number in range(STEPS):
        starts = np.full(rows, PROMPT + number, np.int32)
        step = Step(ones, pages, starts, ones, wanted)
        step = step if adapters is None else replace(step, adapters=adapters)
        before = time.process_time()
        decoder.forward(step)
        found.append(time.process_time() - before)
    return statistics.mean(sorted(found)[: STEPS // 2])


# Exchanges


def exchanges(given: argparse.Namespace, scratch: Path) -> None:
    spec = ModelSpec(given.model, kind="text")
    checkpoint = open_checkpoint(spec)
    folders = [peft_folder(scratch / f"v{seed}", checkpoint, 16, seed) for seed in range(2)]
    generator = open_generator(
        spec, Setup(devices=("cpu",)), TorchModelOptions(slots=given.rows, context=256, threads=1)
    )
    driver = Driver(generator)
    try:
        busy = Busy(driver, folders, given.rows)
        busy.swap()
        window(busy, given.seconds / 2, None)
        cases: dict[str, list[tuple[float, float]]] = {"none": [], "exchanged": []}
        for repeat in range(given.repeats):
            order = list(cases) if repeat % 2 else list(cases)[::-1]
            for name in order:
                every = given.swap_every if name == "exchanged" else None
                cases[name].append(window(busy, given.seconds, every))
        busy.stop()
    finally:
        driver.close()
    kept = [[one[at] / none[at] for none, one in zip(cases["none"], cases["exchanged"], strict=True)] for at in (0, 1)]
    print(f"\nA version of rank 16 exchanged every {given.swap_every:g} s, {given.rows} rows under way.\n")
    print("| throughput kept | by processor time | by the clock |")
    print("|---|---|---|")
    print(f"| exchanged against not | {spread(kept[0])} | {spread(kept[1])} |")
    print(f"\n{busy.swaps} exchanges, {busy.answered} answers, {busy.failed} failed, {busy.mixed} of mixed versions.")
    print(
        "Target held."
        if statistics.median(kept[0]) > 1 - ALLOWED and not busy.failed + busy.mixed
        else "Target missed."
    )


class Busy:
    """Keeps all slots busy with prompts for the adapter, and looks at what comes of them."""

    def __init__(self, driver: Driver, folders: Sequence[str], rows: int) -> None:
        self.driver, self.swaps, self.answered, self.failed, self.mixed = driver, 0, 0, 0, 0
        self._folders, self._rows, self._asked, self._stopped = folders, rows, 0, False
        self._begun = False

    def swap(self) -> None:
        """Read and pack the next version, and load it between two steps."""
        self.swaps += 1
        found = self.driver.generator.read_adapter("policy", self._folders[self.swaps % 2])
        self.driver.load_adapter("policy", f"v{self.swaps}", found).result(60)
        if not self._begun:
            self._begun = True
            for _ in range(2 * self._rows):
                self._ask()

    def stop(self) -> None:
        self._stopped = True

    def _ask(self) -> None:
        self._asked += 1
        tokens = tuple(np.random.default_rng(self._asked).integers(32, 127, PROMPT).tolist())
        sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
        [prepared] = self.driver.generator.prepare(
            [Prompt(tokens=tokens, key=str(self._asked), adapter="policy", sampling=sampling)]
        )
        self.driver.submit(prepared, self._done)

    def _done(self, outcome: Generation | Exception) -> None:
        if self._stopped:
            return
        self.answered += 1
        if isinstance(outcome, Exception):
            self.failed += 1
        elif len(outcome.versions) != 1 or len(outcome.completions[0].versions) != 1:
            self.mixed += 1
        self._ask()


def window(busy: Busy, seconds: float, every: float | None) -> tuple[float, float]:
    """Tokens a second of processor time, and of the clock."""
    over = threading.Event()

    def swapping() -> None:
        while every is not None and not over.wait(every):
            busy.swap()

    swapper = threading.Thread(target=swapping)
    counted, ran, began = busy.driver.counters()["output_tokens"], time.process_time(), time.monotonic()
    swapper.start()
    over.wait(seconds)
    tokens = busy.driver.counters()["output_tokens"] - counted
    rates = tokens / (time.process_time() - ran), tokens / (time.monotonic() - began)
    over.set()
    swapper.join()
    return rates


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
