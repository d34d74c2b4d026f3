"""How fast text is generated, beside transformers, vLLM, and the matrix products of a step alone: a Markdown table.

    python benchmarks/generation.py [--python vllm=PATH] [--model FOLDER] [--repeats N] [--quick] [--only speed|ragged]

Everything runs in turn, repeat by repeat, and ratios are taken within a repeat. A peer that cannot be had is left out.
The products are those of a model of the same sizes, each layer with weights of its own. Ragged: 500 rows with prompts
of 8 to 512 tokens and answers of 8 to 256, against the time that uniform work of the same mean lengths would take.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import WorkError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.host import machine
from gpuinfer.lab.bench.generators import DrawnPrompts
from gpuinfer.lab.bench.measurement import Interval, interval, ratio
from gpuinfer.lab.peers.peer_process import PROGRAMS, PeerProcess, python_of, pythons
from gpuinfer.text.checkpoint import open_checkpoint, save_folder
from gpuinfer.text.generator import Driver, open_generator
from gpuinfer.text.text_options import TorchModelOptions

NAMES = ("batched", "transformers", "vllm")
PRODUCTS, PEERS = "products", "best peer"
CASES = {"float32": (1, 8, 64, 256), "bfloat16": (1, 8, 64, 256)}
QUICK = {"float32": (1, 64), "bfloat16": (64,)}
TARGETS = {  # number format, batch size, against → at least
    ("float32", 64, "vllm"): 1.5,
    ("float32", 64, "transformers"): 3.0,
    ("float32", 64, PRODUCTS): 0.80,
    ("float32", 1, PEERS): 1.3,
    ("bfloat16", 256, "vllm"): 1.5,
}
PRODUCTS_S = 0.5
SLOTS, ROWS, PROMPT, ANSWER = 64, 500, (8, 512), (8, 256)  # ragged: rows, tokens
RAGGED = 1.33  # times the uniform time, at most

Rates = dict[tuple[str, int, str], list[float]]  # by number format, batch size, name: tokens/s of each repeat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="fewer cases, repeats and tokens")
    parser.add_argument("--only", choices=["speed", "ragged"])
    given = parser.parse_args(arguments)
    given.new_tokens = given.new_tokens or (32 if given.quick else 128)
    given.repeats = given.repeats or (2 if given.quick else 3)
    if given.only != "ragged":
        speed(given)
    if given.only != "speed":
        ragged(given)


# Beside peers


def speed(given: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(ModelSpec(given.model, kind="text"))
    rates: Rates = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.folder or Path(scratch, "model")
        if checkpoint.folder is None:
            save_folder(checkpoint, folder)
        for dtype, sizes in (QUICK if given.quick else CASES).items():
            beside(given, checkpoint, folder, dtype, sizes, Path(scratch), rates)
    print(f"\n{machine.cores()} cores, {given.new_tokens} new tokens, median of {given.repeats}, tokens/s\n")
    print("\n".join(table(rates)))
    print("\n".join(["", *verdicts(rates)]))


def beside(
    given: argparse.Namespace, checkpoint: Any, folder: Path, dtype: str, sizes: Sequence[int], logs: Path, rates: Rates
) -> None:
    """One number format: all children, and the products, in turn."""
    drawn = DrawnPrompts(checkpoint.shape.vocabulary, checkpoint.shape.end_tokens, seed=1)
    with ExitStack() as ends:
        children = {}
        for name in NAMES:
            child = started(name, given, ends, logs / f"{name}-{dtype}.log")
            try:
                child.load(
                    {
                        "model": given.model if name == "batched" else str(folder.resolve()),
                        "weights": None,
                        "arguments": {},
                        "dtype": dtype,
                        "device": "cpu",
                        "seed": 0,
                        "rows": max(sizes),
                        "length": drawn.longest + given.new_tokens,
                    }
                )
                children[name] = child
            except WorkError as error:
                say(f"{name} is left out: {error}")
        for repeat in range(given.repeats + 1):  # the first warms up
            tokens = given.new_tokens if repeat else min(8, given.new_tokens)
            for size in sizes:
                for name, child in children.items():
                    ran = child.run(drawn.of(repeat, size), tokens)
                    child.rest()
                    if repeat:
                        rates.setdefault((dtype, size, name), []).append(ran.tokens / ran.seconds)
                        say(f"{dtype}, batch size {size}, {name}: {ran.tokens / ran.seconds:,.0f} tokens/s")
                if repeat:
                    found = products(checkpoint.shape, getattr(torch, dtype), size)
                    rates.setdefault((dtype, size, PRODUCTS), []).append(found)


def started(name: str, given: argparse.Namespace, ends: ExitStack, log: Path) -> PeerProcess:
    child = PeerProcess(name, PROGRAMS[name].command(python_of(name, pythons(given.python))), log)
    ends.callback(child.close)
    return child


def products(shape: Any, dtype: torch.dtype, rows: int) -> float:
    """Rows per second that go through the matrices of all layers and the head, and nothing else."""
    torch.set_num_threads(machine.cores())
    keys, width = 2 * shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    up = shape.intermediate * (2 if shape.gated else 1)
    sizes = (
        (shape.hidden, width + keys),
        (width, shape.hidden),
        (shape.hidden, up),
        (shape.intermediate, shape.hidden),
    )
    inputs = {inner: torch.randn(rows, inner, dtype=dtype) for inner, _ in sizes}
    layers = [[torch.randn(outer, inner, dtype=dtype) for inner, outer in sizes] for _ in range(shape.layers)]
    head = torch.randn(shape.vocabulary, shape.hidden, dtype=dtype)

    def step() -> None:
        for layer in layers:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(inputs[shape.hidden], head)

    with torch.inference_mode():
        for _ in range(5):
            step()
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < PRODUCTS_S:
            step()
            steps += 1
        return steps * rows / (time.perf_counter() - began)


def table(rates: Rates) -> list[str]:
    names = list(dict.fromkeys(name for _, _, name in rates))
    others = [name for name in names if name != "batched"]
    lines = [f"| | {' | '.join(names)} | {' | '.join(f'÷ {name}' for name in others)} |"]
    lines.append(f"|---|{'---:|' * (len(names) + len(others))}")
    for dtype, size in dict.fromkeys((dtype, size) for dtype, size, _ in rates):
        speeds = [f"{interval(rates[dtype, size, name]).median:,.0f}" for name in names]
        over = [said(against(rates, dtype, size, name)) for name in others]
        lines.append(f"| {dtype}, batch size {size} | {' | '.join([*speeds, *over])} |")
    return lines


def against(rates: Rates, dtype: str, size: int, name: str) -> Interval:
    """Ours over the other, or over the best of the peers in each repeat."""
    theirs = [rates[dtype, size, peer] for peer in NAMES[1:] if (dtype, size, peer) in rates]
    best = [max(each) for each in zip(*theirs, strict=True)]
    return ratio(rates[dtype, size, "batched"], best if name == PEERS else rates[dtype, size, name])


def verdicts(rates: Rates) -> list[str]:
    lines = ["| case | at least | found |", "|---|---:|---:|"]
    for (dtype, size, name), least in TARGETS.items():
        peers = [peer for peer in NAMES[1:] if (dtype, size, peer) in rates]
        if (dtype, size, "batched") in rates and (peers if name == PEERS else (dtype, size, name) in rates):
            found = against(rates, dtype, size, name)
            met = "" if found.median >= least else " **missed**"
            lines.append(f"| {dtype}, batch size {size}, against {name} | {least:.2f} | {said(found)}{met} |")
    return lines


def said(found: Interval) -> str:
    ends = f" ({found.low:.2f} to {found.high:.2f})" if found.low is not None and found.high is not None else ""
    return f"{found.median:.2f}{ends}"


# Ragged


def ragged(given: argparse.Namespace) -> None:
    """Rows of all lengths, beside uniform ones of the mean lengths, at the same slots."""
    rows = 100 if given.quick else ROWS
    random = np.random.default_rng(1)
    prompts, answers = random.integers(*PROMPT, rows, endpoint=True), random.integers(*ANSWER, rows, endpoint=True)
    mean, new = int(prompts.mean()), int(answers.mean())
    arguments = {"slots": SLOTS, "context": PROMPT[1] + ANSWER[1]}
    spec = ModelSpec(given.model, arguments=arguments, kind="text")
    generator = open_generator(spec, Setup(model=spec, devices=("cpu",)), TorchModelOptions())
    driver, vocabulary = Driver(generator), generator.decoder.shape.vocabulary

    def seconds(lengths: Sequence[int], wanted: Sequence[int]) -> float:
        texts = [
            Prompt(
                tokens=tuple(random.integers(0, vocabulary, length).tolist()),
                sampling=Sampling(max_tokens=int(tokens), temperature=0, ignore_eos=True),
                key=str(number),
            )
            for number, (length, tokens) in enumerate(zip(lengths, wanted, strict=True))
        ]
        return timed(lambda: answered(driver, texts))

    shares = []
    try:
        seconds([mean] * SLOTS, [8] * SLOTS)
        for repeat in range(given.repeats):
            prefill = 2 * SLOTS * mean / seconds([mean] * 2 * SLOTS, [1] * 2 * SLOTS)
            decode = SLOTS * new / (seconds([mean] * SLOTS, [new] * SLOTS) - SLOTS * mean / prefill)
            found, uniform = seconds(prompts, answers), prompts.sum() / prefill + answers.sum() / decode
            shares.append(found / uniform)
            say(f"ragged, repeat {repeat + 1}: {found:.1f} s, uniform {uniform:.1f} s")
    finally:
        driver.close()
    print(f"\n{rows} ragged rows, {SLOTS} slots: prompts {prompts.sum():,} tokens, answers {answers.sum():,}")
    print(f"uniform: prefill {prefill:,.0f} tokens/s, decode {decode:,.0f} tokens/s (last repeat)\n")
    middle = interval(shares)
    missed = "" if middle.median <= RAGGED else " **missed**"
    print(
        f"| case | at most | found |\n|---|---:|---:|\n| ragged over uniform time | {RAGGED} | {said(middle)}{missed} |"
    )


def answered(driver: Driver, prompts: Sequence[Prompt]) -> None:
    """Submit all, and wait for the last."""
    finished, failures = Semaphore(0), []

    def done(outcome: object) -> None:
        if isinstance(outcome, Exception):
            failures.append(outcome)
        finished.release()

    for prepared in driver.generator.prepare(prompts):
        if isinstance(prepared, Exception):
            raise prepared
        driver.submit(prepared, done)
    for _ in prompts:
        if not finished.acquire(timeout=600):
            raise TimeoutError("no answer within 600 s")
    if failures:
        raise failures[0]


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
