"""How fast answers of masked diffusion models are filled in, beside the makers' own procedure and the matrix products
of a step alone: a Markdown table.

    python benchmarks/diffusion.py [--repeats N] [--quick] [--only CASE ...] [--hidden N] [--layers N]

`one` and `batch`: 16 prompts of one length with LLaDA's schedule, a token a step, no cache; beside them its procedure
(llada_reference.py) with the same threads, prompt after prompt and all in one batch. `one-ends` and `batch-ends`: the
same of a model that ends its answers somewhere; the procedure fills in the whole length all the same. `ragged`: 200
rows of prompts of 8 to 256 tokens and answers of 32 to 256, four tokens a step, in 16 slots, against the time that as
many positions take where all rows are of the mean lengths. `cached`: the decoder threshold with the cache dual against
the first case's settings, answers of 256 in blocks of 32. `products`: a step's rate against the products alone of whole
canvases: all matrices, queries with keys and weights with values, the head where masks are.

The model is random, of the sizes of tiny-llada unless others are given, written here, its head scaled so that it is
sure of some tokens. Tokens are useful ones, by the wall clock. Everything runs in turn, repeat by repeat, and ratios
are taken within a repeat; the first repeat warms up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import torch
from llada_reference import Reference, Sizes, write_folder

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Generation, Prompt, Sampling, Unmasking
from gpuinfer.host import machine
from gpuinfer.lab.bench.measurement import Interval, interval, ratio
from gpuinfer.stats import DIFFUSION_COUNTS, DiffusionCounters
from gpuinfer.text.generator import Driver, open_generator
from gpuinfer.text.text_options import TorchModelOptions

SLOTS, BLOCK, HEAD = 16, 32, 12.0
PROMPT, ANSWER = 64, 128
LONG = 256  # tokens of an answer, where a cache is at work
ROWS, PROMPTS, ANSWERS, TOGETHER = 200, (8, 256), (32, 256), 4  # ragged: rows, tokens, tokens a step
THRESHOLD = 0.9
SCHEDULE = Unmasking(decoder="low-confidence", block_length=BLOCK, cache="none")
ENDS = 1.5  # how likely the end is, where answers have one
TARGETS = {
    "one": 4.0,
    "one-ends": 4.0,
    "batch": 1.3,
    "batch-ends": 1.3,
    "ragged": 1.35,
    "cached": 5.0,
    "products": 0.75,
}
WAIT_S = 1200.0


@dataclass(frozen=True)
class Measured:
    """One way to do one case: how many, of what, in how many seconds."""

    count: float
    seconds: float
    more: str = ""

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@dataclass(frozen=True)
class Bench:
    """What all cases share."""

    given: argparse.Namespace
    folder: Path
    sizes: Sizes
    reference: Reference

    @property
    def answer(self) -> int:
        return 64 if self.given.quick else ANSWER

    def prompts(self, repeat: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        dice = np.random.default_rng(repeat)
        return [tuple(dice.integers(0, self.sizes.end, length).tolist()) for length in lengths]

    @contextmanager
    def driver(self, slots: int = SLOTS) -> Iterator[Driver]:
        spec = ModelSpec(str(self.folder), arguments={"slots": slots, "context": self.sizes.positions}, kind="text")
        driver = Driver(open_generator(spec, Setup(model=spec, devices=("cpu",)), TorchModelOptions()))
        try:
            yield driver
        finally:
            driver.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="shorter answers, fewer rows and repeats")
    parser.add_argument("--only", choices=list(TARGETS), nargs="+")
    parser.add_argument("--hidden", type=int, default=Sizes.hidden)
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    given = parser.parse_args(arguments)
    given.repeats = given.repeats or (2 if given.quick else 3)
    torch.set_num_threads(machine.cores())
    sizes = Sizes(given.hidden, given.layers, given.hidden // 32, 2 * given.hidden)
    with tempfile.TemporaryDirectory() as scratch:
        benches = {ends: opened(given, sizes, Path(scratch, f"llada-{ends}"), ends) for ends in (0.0, ENDS)}
        print(f"{machine.cores()} cores, {sizes.layers} layers of {sizes.hidden}, median of {given.repeats}\n")
        print("| case | first | second | ratio | asked for |\n|---|---:|---:|---:|---:|", flush=True)
        for name in given.only or TARGETS:
            bench = benches[ENDS if name.endswith("ends") else 0.0]
            with bench.driver() as driver:
                print(row(name, CASES[name](bench, driver)), flush=True)


def opened(given: argparse.Namespace, sizes: Sizes, folder: Path, ends: float) -> Bench:
    write_folder(folder, sizes, HEAD, ends)
    return Bench(given, folder, sizes, Reference(folder))


Case = Callable[[Bench, Driver], "Found"]


@dataclass
class Found:
    """Of all repeats, in turn."""

    unit: str
    first: list[Measured]
    second: list[Measured]
    remark: str = ""


def row(name: str, found: Found) -> str:
    """The second way beside the first; ragged: the first's time over the second's, which is to be small."""
    times = ratio([one.rate for one in found.first], [one.rate for one in found.second])
    if name == "ragged":
        over = ratio([one.seconds for one in found.first], [one.seconds for one in found.second])
        met, asked, times = over.median <= TARGETS[name], f"at most {TARGETS[name]}", over
    else:
        met, asked = times.median >= TARGETS[name], f"{TARGETS[name]}"
    ways = " | ".join(_speed(way, found.unit) for way in (found.first, found.second))
    remark = f" ({found.remark})" if found.remark else ""
    return f"| {name}{remark} | {ways} | {said(times)} | {asked}{'' if met else ' **missed**'} |"


def _speed(way: Sequence[Measured], unit: str) -> str:
    more = f", {way[-1].more}" if way[-1].more else ""
    return f"{interval([one.rate for one in way]).median:,.0f} {unit}{more}"


def said(found: Interval) -> str:
    ends = f" ({found.low:.2f} to {found.high:.2f})" if found.low is not None and found.high is not None else ""
    return f"{found.median:.2f}{ends}"


# Beside the makers' procedure


def one_by_one(bench: Bench, driver: Driver) -> Found:
    return beside(bench, driver, batch=1)


def in_a_batch(bench: Bench, driver: Driver) -> Found:
    return beside(bench, driver, batch=SLOTS)


def beside(bench: Bench, driver: Driver, batch: int) -> Found:
    """The same prompts, both ways. How many answers are the same is told: sums in another order may differ."""
    found, same = Found("tokens/s", [], []), []
    for repeat in range(bench.given.repeats + 1):
        length = bench.answer if repeat else BLOCK
        prompts = bench.prompts(repeat, [PROMPT] * SLOTS)
        ours, answers = ask(driver, [(prompt, length, SCHEDULE) for prompt in prompts])
        theirs, tokens = procedure(bench, prompts, length, batch)
        if repeat:
            found.first.append(ours)
            found.second.append(theirs)
            same.append(np.mean([mine == other for mine, other in zip(answers, tokens, strict=True)]))
            say(f"batch of {batch}: {ours.rate:,.0f} and {theirs.rate:,.0f} tokens/s")
    found.remark = f"{np.mean(same):.0%} of the answers are the same"
    return found


def procedure(
    bench: Bench, prompts: Sequence[tuple[int, ...]], length: int, batch: int
) -> tuple[Measured, list[tuple[int, ...]]]:
    """The useful tokens of its answers, up to the first end."""
    began = time.perf_counter()
    answers = [
        bench.reference.answers(torch.tensor(prompts[first : first + batch]), length, BLOCK, steps=length)
        for first in range(0, len(prompts), batch)
    ]
    seconds = time.perf_counter() - began
    found = [useful(tuple(row), bench.sizes.end) for part in answers for row in part.tolist()]
    return Measured(sum(len(row) for row in found), seconds), found


def useful(tokens: tuple[int, ...], end: int) -> tuple[int, ...]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


# Rows of all lengths


def ragged(bench: Bench, driver: Driver) -> Found:
    """Positions of whole canvases, over all steps: what there is to compute."""
    found = Found("positions/s", [], [])
    rows = 48 if bench.given.quick else ROWS
    dice = np.random.default_rng(1)
    prompts, answers = (dice.integers(*ends, rows, endpoint=True) for ends in (PROMPTS, ANSWERS))
    asked = sum(positions(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
    mean, new = int(prompts.mean()), int(answers.mean())
    for repeat in range(bench.given.repeats + 1):
        uniform, _ = ask(driver, few(bench, repeat, [mean] * SLOTS, [new] * SLOTS))
        if not repeat:
            continue
        rate = SLOTS * positions(mean, new) / uniform.seconds
        seen, _ = ask(driver, few(bench, repeat, prompts, answers))
        found.first.append(Measured(asked, seen.seconds, f"{seen.seconds:.1f} s"))
        found.second.append(Measured(asked, asked / rate, f"{asked / rate:.1f} s"))
        say(f"ragged: {seen.seconds:.1f} s, uniform {asked / rate:.1f} s")
    found.remark = f"{rows} rows"
    return found


def few(bench: Bench, repeat: int, prompts: Sequence[int], answers: Sequence[int]) -> list[Asked]:
    drawn = bench.prompts(repeat, prompts)
    return [
        (prompt, int(length), Unmasking(decoder="low-confidence", cache="none", steps=steps_of(int(length))))
        for prompt, length in zip(drawn, answers, strict=True)
    ]


def steps_of(length: int) -> int:
    return -(-length // TOGETHER)


def positions(prompt: int, answer: int) -> int:
    return int(prompt + answer) * steps_of(int(answer))


# A threshold and a cache


def cached(bench: Bench, driver: Driver) -> Found:
    found = Found("tokens/s", [], [])
    length = LONG // 2 if bench.given.quick else LONG
    fast = Unmasking(decoder="threshold", threshold=THRESHOLD, block_length=BLOCK, cache="dual")
    for repeat in range(bench.given.repeats + 1):
        prompts = bench.prompts(repeat, [PROMPT] * SLOTS)
        several, _ = ask(driver, [(prompt, length, fast) for prompt in prompts])
        plain, _ = ask(driver, [(prompt, length if repeat else BLOCK, SCHEDULE) for prompt in prompts])
        if repeat:
            found.first.append(several)
            found.second.append(plain)
            say(f"threshold with dual: {several.rate:,.0f}, schedule without a cache {plain.rate:,.0f} tokens/s")
    return found


# The products alone


def products(bench: Bench, driver: Driver) -> Found:
    found = Found("steps/s", [], [])
    for repeat in range(bench.given.repeats + 1):
        prompts = bench.prompts(repeat, [PROMPT] * SLOTS)
        length = bench.answer if repeat else BLOCK
        ours, _ = ask(driver, [(prompt, length, SCHEDULE) for prompt in prompts])
        if repeat:
            found.first.append(Measured(length, ours.seconds))
            found.second.append(products_alone(bench.sizes, SLOTS, PROMPT + length, (BLOCK + 1) // 2))
            say(f"products: {found.first[-1].rate:,.1f} of {found.second[-1].rate:,.1f} steps/s")
    return found


@torch.inference_mode()
def products_alone(sizes: Sizes, rows: int, length: int, masks: int, least_s: float = 1.0) -> Measured:
    """Steps of so many canvases in which so many masks' logits are wanted on average. Each layer has weights of its
    own; queries, keys and values of one matrix, gate and value of another, as an engine would have them.
    """
    hidden, inner, heads = sizes.hidden, sizes.inner, sizes.heads
    tokens, middle = torch.randn(rows * length, hidden), torch.randn(rows * length, inner)
    shapes = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    layers = [[torch.randn(shape) for shape in shapes] for _ in range(sizes.layers)]
    head, wanted = torch.randn(sizes.vocabulary, hidden), torch.randn(rows * masks, hidden)
    queries, keys, values = (torch.randn(rows * heads, length, hidden // heads) for _ in range(3))

    def step() -> None:
        for layer in layers:
            for weight in layer:
                torch.nn.functional.linear(middle if weight.shape[1] == inner else tokens, weight)
            torch.bmm(torch.bmm(queries, keys.transpose(1, 2)), values)
        torch.nn.functional.linear(wanted, head)

    step()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < least_s:
        step()
        steps += 1
    return Measured(steps, time.perf_counter() - began)


# Ours

Asked = tuple[tuple[int, ...], int, Unmasking]


def ask(driver: Driver, asked: Sequence[Asked]) -> tuple[Measured, list[tuple[int, ...]]]:
    """Useful tokens of all answers, and the answers; what came of the forwards is told beside them."""
    prompts = [
        Prompt(
            tokens=tokens,
            sampling=Sampling(max_tokens=length, temperature=0, unmasking=unmasking),
            key=str(number),
        )
        for number, (tokens, length, unmasking) in enumerate(asked)
    ]
    before, began = driver.counters(), time.perf_counter()
    answers = answered(driver, prompts)
    seconds, after = time.perf_counter() - began, driver.counters()
    steps = {name: after[name] - before[name] for name in DIFFUSION_COUNTS}
    return Measured(sum(map(len, answers)), seconds, _forwards(steps)), answers


def _forwards(steps: Mapping[str, float]) -> str:
    counted = DiffusionCounters.of(steps)
    if counted is None:
        return ""
    return f"{counted.tokens_per_forward:.2g} a forward, {counted.computed_share:.0%} anew"


def answered(driver: Driver, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Submit all, and wait for the last."""
    finished, outcomes = Semaphore(0), dict[int, Any]()

    def listener(number: int) -> Callable[[Any], None]:
        def done(outcome: Any) -> None:
            outcomes[number] = outcome
            finished.release()

        return done

    for number, prepared in enumerate(driver.generator.prepare(prompts)):
        if isinstance(prepared, Exception):
            raise prepared
        driver.submit(prepared, listener(number))
    for _ in prompts:
        if not finished.acquire(timeout=WAIT_S):
            raise TimeoutError(f"no answer within {WAIT_S:g} s")
    for outcome in outcomes.values():
        if not isinstance(outcome, Generation):
            raise outcome
    return [outcomes[number].completions[0].tokens for number in range(len(prompts))]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


CASES: Mapping[str, Case] = {
    "one": one_by_one,
    "one-ends": one_by_one,
    "batch": in_a_batch,
    "batch-ends": in_a_batch,
    "ragged": ragged,
    "cached": cached,
    "products": products,
}

if __name__ == "__main__":
    main()
