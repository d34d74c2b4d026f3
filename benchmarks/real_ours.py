"""`gpuinfer generate` as a user runs it: a process of its own for each run, and what its report says of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 1800.0
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took."""

    tokens: int  # of all answers
    seconds: float  # from the first prompt in to the last answer out
    setup_s: float  # before that: the process's start, imports, loading
    idle: float  # share of the cores that did not compute though nobody else had them, as the verdict counts it
    between_s: float  # between two tokens of an answer, the median
    resident: int  # bytes, the most seen after its start
    report: dict[str, Any]


def generate(
    model: Path | str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    dtype: str,
    threads: int | None = None,
    samples: int = 1,
    options: Sequence[str] = (),
) -> Run:
    """Answer the prompts with so many tokens each, greedily where there is one sample of each.

    Raises `SystemExit` with the last words of a run that has failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rows, answers, report = (Path(scratch, name) for name in ("prompts.jsonl", "answers.jsonl", "report.json"))
        rows.write_text("".join(json.dumps({"prompt_token_ids": list(prompt)}) + "\n" for prompt in prompts))
        words = ["--model", str(model), "--input", str(rows), "--output", str(answers), "--json", str(report)]
        words += ["--max-new-tokens", str(new_tokens), "--ignore-eos", *format_flags(dtype), "--no-live", "--quiet"]
        words += ["--temperature", "0"] if samples == 1 else ["--num-samples", str(samples)]
        words += [] if threads is None else ["-B", f"threads={threads}"]
        resident = run([*words, *options])
        return reported(json.loads(report.read_text()), len(prompts) * samples * new_tokens, resident)


def format_flags(dtype: str) -> list[str]:
    """Of a number format, or of weights rounded to int8 or int4, whose rest is float32."""
    return ["--dtype", "float32", "-B", f"weights={dtype}"] if dtype in ("int8", "int4") else ["--dtype", dtype]


def run(words: Sequence[str]) -> int:
    """Run `gpuinfer generate`; the most memory that was resident, in bytes."""
    command = [sys.executable, "-m", "gpuinfer", "generate", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    most = [0]
    watching = threading.Thread(target=watch, args=(process, most))
    watching.start()
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        watching.join()
    if process.returncode:
        raise SystemExit(f"gpuinfer generate has failed: {said.decode(errors='replace').strip()[-500:]}")
    return most[0]


def watch(process: subprocess.Popen[bytes], most: list[int]) -> None:
    """Anonymous memory that is resident, over and over: pages of files are anybody's."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            line = status.read_text().partition("RssAnon:")[2].split()
            most[0] = max(most[0], int(line[0]) * 1024)
        time.sleep(LOOK_S)


def reported(report: dict[str, Any], expected: int, resident: int) -> Run:
    seconds, cores = report["wall_s"], report["cores"]
    tokens = round(report["throughput"]["output_tokens_per_s"] * seconds)
    if tokens != expected:
        raise SystemExit(f"gpuinfer generate made {tokens} tokens where {expected} were asked for.")
    between = (report["between_tokens_s"] or {}).get("p50", 0.0)
    return Run(tokens, seconds, report["setup_s"], share_idle(cores, seconds), between, resident, report)


def share_idle(cores: dict[str, Any], seconds: float) -> float:
    """Of all cores: what nobody wanted, and what threads had that waited actively for one another."""
    all_s: float = cores["count"] * seconds
    unused: float = all_s - cores["busy_s"] if cores["idle_s"] is None else cores["idle_s"]
    waited: float = cores["threads_waited_s"]
    return min(1.0, (unused + waited) / all_s)


def first_token_s(model: Path | str, dtype: str) -> float:
    """From the start of the process until its first token is on standard output, which is its only one."""
    command = [sys.executable, "-m", "gpuinfer", "generate", "--model", str(model), "--prompt", "Hello"]
    command += ["--max-new-tokens", "1", *format_flags(dtype), "--no-live", "--quiet"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"{' '.join(command[1:])} gave no answer.")
        return time.perf_counter() - began
    finally:
        process.communicate(timeout=LIMIT_S)
