"""`gpuinfer.LLM` beside `gpuinfer generate`: the same prompts, each way in a process of its own, in turns.

    python benchmarks/llm_face.py [--model FOLDER] [--prompts 64] [--new-tokens 64] [--pairs 5] [--backend inprocess]

FOLDER is SmolLM2 where nothing is said (`python -m tools.real` makes it), or a built-in model such as `tiny`. What is
compared is the time from the first prompt in to the last answer out, of the model that is loaded: the median of the
pairs' ratios, as a machine that others use changes from one pair to the next, and the fastest run of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800.0
WORDS = (
    "the sea",
    "was calm",
    "and a small boat",
    "went out",
    "with three men",
    "who had not slept",
    "since the storm",
)


def prompts_of(count: int) -> list[str]:
    """Texts of 3 to 7 of these, each its own."""
    return [
        " ".join(WORDS[(number + place) % len(WORDS)] for place in range(3 + number % 5)) for number in range(count)
    ]


def command_s(model: str, prompts: list[str], new_tokens: int, backend: str) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        rows, answers, report = (Path(scratch, name) for name in ("in.jsonl", "out.jsonl", "report.json"))
        rows.write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
        words = ["generate", "--model", model, "--input", rows, "--output", answers, "--json", report, "--ordered"]
        words += ["--max-new-tokens", new_tokens, "--ignore-eos", "--no-live", "--quiet", "--no-roofline"]
        words = [sys.executable, "-m", "gpuinfer", *map(str, words), "--backend", backend]
        subprocess.run(words, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        return float(json.loads(report.read_text())["wall_s"])


def library_s(model: str, prompts: list[str], new_tokens: int, backend: str) -> float:
    given = json.dumps([model, prompts, new_tokens, backend])
    words = [sys.executable, __file__, "--one", given]
    return float(subprocess.run(words, check=True, timeout=LIMIT_S, capture_output=True, text=True).stdout)


def one(model: str, prompts: list[str], new_tokens: int, backend: str) -> None:
    import gpuinfer

    with gpuinfer.LLM(model, backend=backend) as llm:
        began = time.monotonic()
        tokens = sum(len(answer.tokens) for answer in llm.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True))
        seconds = time.monotonic() - began
    if tokens != len(prompts) * new_tokens:
        raise SystemExit(f"{tokens} tokens, and {len(prompts) * new_tokens} were wanted")
    print(seconds)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(ROOT / "build" / "real" / "smollm2"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--backend", default="inprocess")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    own = parser.parse_args(words)
    if own.one:
        one(*json.loads(own.one))
        return
    arguments: Any = (own.model, prompts_of(own.prompts), own.new_tokens, own.backend)
    tokens, pairs = own.prompts * own.new_tokens, []
    for number in range(own.pairs):
        ways = [command_s, library_s] if number % 2 else [library_s, command_s]
        found = {way: way(*arguments) for way in ways}
        pairs.append((found[command_s], found[library_s]))
        print(f"pair {number + 1}: command {pairs[-1][0]:.2f} s, LLM {pairs[-1][1]:.2f} s", flush=True)
    ratio = statistics.median(command / library for command, library in pairs)
    fastest = [min(one) for one in zip(*pairs, strict=True)]
    print(f"command {tokens / fastest[0]:,.0f} tokens/s, LLM {tokens / fastest[1]:,.0f} tokens/s at their fastest")
    print(f"LLM at {ratio:.1%} of the command's speed (median of {own.pairs} pairs)")


if __name__ == "__main__":
    main()
