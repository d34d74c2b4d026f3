"""`gpuinfer.LLM` beside `gpuinfer generate`: the same prompts, each way in a process of its own, in turns.

    python benchmarks/llm_face.py [--model FOLDER] [--prompts 64] [--new-tokens 64] [--pairs 5] [--backend inprocess]

FOLDER is SmolLM2 where nothing is said (`python -m tools.real` makes it), or a built-in model such as `tiny`. Compared
are the seconds from the first prompt in to the last answer out, of the model that is loaded, and the seconds of cores
that the process has used for them, which say the same on a machine that others use too. Both as the median of the
pairs' ratios.
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
Took = tuple[float, float]  # seconds, and seconds of cores
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


def by_command(model: str, prompts: list[str], new_tokens: int, backend: str) -> Took:
    with tempfile.TemporaryDirectory() as scratch:
        rows, answers, report = (Path(scratch, name) for name in ("in.jsonl", "out.jsonl", "report.json"))
        rows.write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
        words = ["generate", "--model", model, "--input", rows, "--output", answers, "--json", report, "--ordered"]
        words += ["--max-new-tokens", new_tokens, "--ignore-eos", "--no-live", "--quiet", "--no-roofline"]
        words = [sys.executable, "-m", "gpuinfer", *map(str, words), "--backend", backend]
        subprocess.run(words, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        found = json.loads(report.read_text())
        return found["wall_s"], found["cores"]["busy_s"]


def by_library(model: str, prompts: list[str], new_tokens: int, backend: str) -> Took:
    given = json.dumps([model, prompts, new_tokens, backend])
    words = [sys.executable, __file__, "--one"]
    said = subprocess.run(words, input=given, check=True, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True).stdout
    seconds, busy_s = json.loads(said)
    return seconds, busy_s


def one(model: str, prompts: list[str], new_tokens: int, backend: str) -> None:
    import gpuinfer

    with gpuinfer.LLM(model, backend=backend) as llm:
        began = time.monotonic()
        tokens = sum(len(answer.tokens) for answer in llm.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True))
        seconds = time.monotonic() - began
        busy_s = llm.report()["cores"]["busy_s"]
    if tokens != len(prompts) * new_tokens:
        raise SystemExit(f"{tokens} tokens, and {len(prompts) * new_tokens} were wanted")
    print(json.dumps([seconds, busy_s]))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(ROOT / "build" / "real" / "smollm2"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--backend", default="inprocess")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    own = parser.parse_args(words)
    if own.one:
        one(*json.load(sys.stdin))
        return
    arguments: Any = (own.model, prompts_of(own.prompts), own.new_tokens, own.backend)
    pairs: list[tuple[Took, Took]] = []
    for number in range(own.pairs):
        ways = [by_command, by_library] if number % 2 else [by_library, by_command]
        found = {way: way(*arguments) for way in ways}
        pairs.append((found[by_command], found[by_library]))
        said = [f"{seconds:6.2f} s, {busy_s:6.2f} s of cores" for seconds, busy_s in pairs[-1]]
        print(f"pair {number + 1}: command {said[0]}; LLM {said[1]}", flush=True)
    for place, what in enumerate(("speed", "tokens for each second of a core")):
        ratio = statistics.median(command[place] / library[place] for command, library in pairs)
        print(f"LLM at {ratio:.1%} of the command's {what} (median of {own.pairs} pairs)")


if __name__ == "__main__":
    main()
