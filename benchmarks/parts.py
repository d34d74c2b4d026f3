"""What it costs to read answers as they grow, and what one reader that does not read costs the others.

    python benchmarks/parts.py [--backend NAME] [--model FOLDER] [--batch-size N] [--tokens N] [--repeats N]
                               [--only whole|read|deaf]

One backend, opened once. In turn, repeat by repeat: N answers asked for as a whole, and N that are read part by part;
ratios are taken within a repeat. Then for some seconds N - 1 readers that ask again and again, beside one more that
reads, and beside one that opens an answer and reads nothing of it. `--only whole` runs on any commit: compare two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable

from gpuinfer.api import Infer, ModelSpec, Setup
from gpuinfer.config import registry
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.host import event_loop
from gpuinfer.runtime.session import Session

WINDOW_S = 10.0
numbers = itertools.count()

Once = Callable[[Infer, Prompt], Awaitable[int]]  # how many tokens there were


def prompt(tokens: int) -> Prompt:
    number = next(numbers)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return Prompt(tokens=tuple(1 + (number + place) % 50 for place in range(8)), key=str(number), sampling=sampling)


async def whole(infer: Infer, asked: Prompt) -> int:
    return len((await infer(asked)).completions[0].tokens)


async def read(infer: Infer, asked: Prompt) -> int:
    tokens = 0
    async for part in infer.stream(asked):
        tokens += len(part.tokens)
    return tokens


async def rate(infer: Infer, once: Once, given: argparse.Namespace) -> float:
    """Tokens per second of as many answers as there are slots."""
    started = time.perf_counter()
    tokens = await asyncio.gather(*(once(infer, prompt(given.tokens)) for _ in range(given.batch_size)))
    return sum(tokens) / (time.perf_counter() - started)


async def beside(infer: Infer, given: argparse.Namespace, *, deaf: bool) -> float:
    """Tokens per second of all readers but one, which reads nothing of its answer when it is `deaf`."""
    counted = [0]

    async def others() -> None:
        while True:
            async for part in infer.stream(prompt(given.tokens)):
                counted[0] += len(part.tokens)

    async def last() -> None:
        while True:
            stream = infer.stream(prompt(given.tokens))
            async with stream:
                if deaf:
                    await asyncio.sleep(WINDOW_S)
                async for _ in stream:
                    pass

    tasks = [asyncio.create_task(others()) for _ in range(given.batch_size - 1)] + [asyncio.create_task(last())]
    started = time.perf_counter()
    await asyncio.sleep(WINDOW_S)
    found = counted[0] / (time.perf_counter() - started)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return found


async def measure(given: argparse.Namespace) -> None:
    setup = Setup(model=ModelSpec(given.model, kind="text"), devices=("cpu",))
    backend = registry.load("backends", given.backend)(setup, slots=given.batch_size, context=given.tokens + 16)
    modes = {name: once for name, once in (("whole", whole), ("read", read)) if given.only in (None, name)}
    async with Session(backend, registry.load("strategies", "dynamic")(setup)) as infer:
        await rate(infer, whole, given)  # warms up
        rates: dict[str, list[float]] = {name: [] for name in modes}
        for _ in range(given.repeats if modes else 0):
            for name, once in modes.items():
                rates[name].append(await rate(infer, once, given))
        for name, each in rates.items():
            spread = f"{min(each):,.0f} to {max(each):,.0f}"
            print(f"{given.backend}, {name}: {statistics.median(each):10,.0f} tokens/s ({spread})")
        if len(rates) == 2:
            ratios = [one / other for one, other in zip(rates["read"], rates["whole"], strict=True)]
            print(f"read / whole: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        if given.only in (None, "deaf"):
            found = [(await beside(infer, given, deaf=False), await beside(infer, given, deaf=True)) for _ in range(2)]
            ratios = [deaf / reads for reads, deaf in found]
            print(f"the others' tokens/s, one of them deaf / none: {', '.join(f'{one:.3f}' for one in ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inprocess")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["whole", "read", "deaf"])
    with contextlib.suppress(KeyboardInterrupt):
        event_loop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
