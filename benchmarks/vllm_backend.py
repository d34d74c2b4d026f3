"""The backend vllm beside vLLM driven directly, in turns: the same requests, the same engine arguments. Markdown.

    python benchmarks/vllm_backend.py [--repeats N] [--rows N] [--tokens N] [--model DIR]

Directly: `AsyncLLM.generate` for each request at once, in a process of its own. Ours: the run's engine, the way to the
engine's process, and what stands in front of AsyncLLM there. Tokens are those that were drawn, times the wall clock's;
ratios are taken within a repeat. Needs vLLM (docs/vllm.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.vllm import Vllm
from gpuinfer.backends.vllm_engine.engine_arguments import engine_arguments
from gpuinfer.backends.vllm_engine.engine_process import folder_of, has_tokenizer
from gpuinfer.backends.vllm_engine.vllm_requests import sampling_parameters, vllm_seed
from gpuinfer.engine.engine import Engine
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.host import machine
from gpuinfer.strategies.dynamic import Dynamic

SLOTS = 64
CASES = {
    "greedy": Sampling(temperature=0.0, ignore_eos=True),
    "drawn, seeded": Sampling(temperature=1.0, ignore_eos=True),
    "with log-probabilities": Sampling(temperature=1.0, ignore_eos=True, processed_logprobs=True),
}


def prompts(rows: int, sampling: Sampling, repeat: int) -> list[Prompt]:
    """Others in each repeat, so that no cache has them."""
    chance = random.Random(repeat)
    lengths = [chance.randint(16, 128) for _ in range(rows)]
    tokens = [tuple(chance.randrange(32, 127) for _ in range(length)) for length in lengths]
    return [Prompt(tokens=one, key=str(n), sampling=sampling) for n, one in enumerate(tokens)]


def direct(line: Connection, arguments: dict[str, Any]) -> None:
    """Answers each batch that comes on the line with its seconds and tokens."""
    import os

    from gpuinfer.backends.vllm_engine.async_llm import USUAL

    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    asyncio.run(_direct(line, arguments))


async def _direct(line: Connection, arguments: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def one(number: str, tokens: list[int], fields: dict[str, Any]) -> int:
        sampling = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in llm.generate({"prompt_token_ids": tokens}, sampling, number):
            drawn = len(output.outputs[0].token_ids)
        return drawn

    line.send_bytes(b"{}")
    while asked := json.loads(await asyncio.to_thread(line.recv_bytes)):
        began = time.perf_counter()
        drawn = await asyncio.gather(*(one(f"{began}-{n}", *each) for n, each in enumerate(asked)))
        line.send_bytes(json.dumps([time.perf_counter() - began, sum(drawn)]).encode())
    llm.shutdown()


async def ours(engine: Engine, asked: Sequence[Prompt]) -> tuple[float, int]:
    began = time.perf_counter()
    answers = await asyncio.gather(*map(engine.submit, asked))
    return time.perf_counter() - began, sum(len(one.completions[0].tokens) for one in answers)


def asked_of(prompt: Prompt, seed: int) -> tuple[list[int], dict[str, Any]]:
    """The same, as vLLM is asked directly."""
    sampling = prompt.sampling
    logprobs = 0 if sampling.processed_logprobs else None
    own = vllm_seed(seed, sampling, prompt.key, 0)
    fields = sampling_parameters(
        sampling, limit=sampling.max_tokens, seed=own, ends=(), logprobs=logprobs, growing=False
    )
    return list(prompt.tokens or ()), fields


async def measured(given: argparse.Namespace, setup: Setup, arguments: dict[str, Any]) -> None:
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    child = context.Process(target=direct, args=(theirs, arguments))
    child.start()
    backend = Vllm(setup, max_num_seqs=SLOTS)
    engine = Engine(backend, Dynamic(setup))
    try:
        await engine.start()
        await asyncio.to_thread(line.recv_bytes)
        for name, sampling in CASES.items():
            wanted = Sampling(**{**_fields(sampling), "max_tokens": given.tokens})
            print(await row(name, wanted, given, engine, line, setup.seed), flush=True)
    finally:
        line.send_bytes(b"[]")
        await engine.close(drain=False)
        child.join(30)
        child.kill()


async def row(
    name: str, sampling: Sampling, given: argparse.Namespace, engine: Engine, line: Connection, seed: int
) -> str:
    first, second = list[float](), list[float]()
    for repeat in range(given.repeats + 1):  # the first only warms up
        asked = prompts(given.rows, sampling, repeat)
        for way in ("direct", "ours") if repeat % 2 else ("ours", "direct"):
            if way == "ours":
                seconds, tokens = await ours(engine, asked)
                second.append(tokens / seconds)
                continue
            line.send_bytes(json.dumps([asked_of(one, seed) for one in asked]).encode())
            seconds, tokens = json.loads(await asyncio.to_thread(line.recv_bytes))
            first.append(tokens / seconds)
    ratios = [mine / other for mine, other in zip(second[1:], first[1:], strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    speeds = f"{statistics.median(first[1:]):,.0f} | {statistics.median(second[1:]):,.0f}"
    return f"| {name} | {speeds} | {statistics.median(ratios):.2f} ({spread}) |"


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args(arguments)
    setup = Setup(ModelSpec(given.model, kind="text"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(setup.model, Path(scratch))
        options = Vllm.Options(max_num_seqs=SLOTS)
        on_cpu = not machine.wants_cuda(setup.devices)
        made = engine_arguments(
            options, setup, str(folder), tokenizer=has_tokenizer(folder), on_cpu=on_cpu, adapters=0, positions=2048
        )
        made = {name: value for name, value in made.items() if name != "worker_extension_cls"}
        print(f"{machine.cores()} cores, {given.model}, {given.rows} rows of {given.tokens} tokens, {SLOTS} slots\n")
        print("| case | vLLM directly, tokens/s | backend vllm, tokens/s | ratio |\n|---|---:|---:|---:|")
        asyncio.run(measured(given, setup, made))


if __name__ == "__main__":
    main()
