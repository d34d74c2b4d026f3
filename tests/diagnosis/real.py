"""Causes planted into the real commands, self-play and generate, with and without a neighbour on the cores."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIVE_UP_S = 300.0  # for one command: a run that takes longer counts as none
SCHEDULES = ("low-confidence", "random")  # decoders that commit a token a step, unless told of fewer steps
WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


@dataclass(frozen=True)
class Command:
    """A command of ours, and what is slow around it. `{folder}` in its words is a folder of its own."""

    words: Sequence[str]
    rows: Sequence[Mapping[str, Any]] = ()  # of its input file, or of its standard input where `feed_s` is set
    feed_s: float = 0.0  # between two rows of standard input
    drain_s: float = 0.0  # between two looks of whoever reads standard output
    write_s: float = 0.0  # that each write of the output takes longer
    sync_s: float = 0.0  # that each sync takes longer
    touched_mb: int = 0  # of memory that every other step touches for the first time
    neighbours: int = 0  # programs that want a core all the time

    def adding(self, *words: str) -> Command:
        return replace(self, words=[*self.words, *words])


def selfplay(chance: random.Random) -> Command:
    words = ["selfplay", "--model", "blobnet-small", "--workers", "2", "--games", "300"]
    return Command([*words, "--seed", str(chance.randrange(1000)), "--quiet"])


def generate(chance: random.Random, rows: int = 300, words: int = 12, tokens: int = 16) -> Command:
    asked = [{"prompt": " ".join(chance.choice(WORDS) for _ in range(words))} for _ in range(rows)]
    files = ["--input", "{folder}/in.jsonl", "--output", "{folder}/out.jsonl"]
    return Command(
        ["generate", "--model", "tiny", *files, "--max-new-tokens", str(tokens), "--quiet", "--ignore-eos"], asked
    )


def answered(chance: random.Random, rows: int = 400, words: int = 12, tokens: int = 96) -> Command:
    """Long enough for its steps to be seen; what the machine did in an earlier run is not to be the judge."""
    return generate(chance, rows, words, tokens).adding("--no-roofline")


def prompt_heavy(chance: random.Random) -> Command:
    return answered(chance, rows=24, words=400, tokens=8)


def diffusion(chance: random.Random) -> Command:
    """A model that fills masks in: what it is sure of, with a cache."""
    base = generate(chance, rows=64, words=60, tokens=128)
    filled = replace(base, words=["tiny-llada" if word == "tiny" else word for word in base.words])
    return filled.adding("--batch-size", "16", "--block-length", "32", "--decoder", "threshold", "--cache", "dual")


def few_tokens(chance: random.Random) -> Command:
    return generate(chance, tokens=2)


def null(chance: random.Random) -> Command:
    """A model that takes no time: whatever is slow around it shows."""
    base = generate(chance, rows=4000, tokens=32)
    return replace(base, words=["null" if word == "tiny" else word for word in base.words])


def through_pipes(base: Command) -> Command:
    words = ["-" if word == "{folder}/in.jsonl" else word for word in base.words]
    return replace(base, words=words)


def schema(chance: random.Random, name: str) -> dict[str, Any]:
    """No two alike, so that each is compiled."""
    kinds = [
        {"type": "string", "pattern": f"^[a-z]{{3,{chance.randrange(5, 60)}}}-[0-9]{{2,9}}$"},
        {"type": "array", "items": {"enum": [name, *chance.sample(WORDS, 8)]}},
        {"type": "object", "properties": {name: {"type": "number"}}, "required": [name]},
    ]
    properties = {f"{name}_{place}": {"anyOf": kinds} for place in range(48)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def constrained(base: Command, chance: random.Random) -> Command:
    named = [{"name": "a", "schema": schema(chance, f"p{n}")} for n in range(len(base.rows))]
    formats = [{"type": "json_schema", "json_schema": one} for one in named]
    return replace(base, rows=[{**row, "response_format": one} for row, one in zip(base.rows, formats, strict=True)])


@dataclass(frozen=True)
class Real:
    """A base, what is planted into it, and what is to be said of that: the class, and of text the station."""

    expected: str
    base: Callable[[random.Random], Command]
    plant: Callable[[Command, random.Random], Command]
    station: str | None = None


def slow_output(base: Command) -> Command:
    words = ["-" if word == "{folder}/out.jsonl" else word for word in base.words]
    return replace(base, words=words, drain_s=0.05)


def _capped(flag: str) -> Callable[[Command, random.Random], Command]:
    return lambda base, chance: base.adding(flag, f"max_rows={chance.choice([8, 16, 32])}")


def _beside(plant: Callable[[Command, random.Random], Command]) -> Callable[[Command, random.Random], Command]:
    return lambda base, chance: replace(plant(base, chance), neighbours=1)


def _few_games(base: Command, chance: random.Random) -> Command:
    return base.adding("--games-in-flight", str(chance.choice([8, 16, 32])))


def _few_pages(base: Command, chance: random.Random) -> Command:
    return base.adding("--context", "128", "-B", f"pages={chance.choice([8, 12, 16])}")


def _slow(**how: Any) -> Callable[[Command, random.Random], Command]:
    return lambda base, chance: replace(base, **how)


def _with(*words: str) -> Callable[[Command, random.Random], Command]:
    return lambda base, chance: base.adding(*words)


CORES = os.cpu_count() or 1
CAPPED, FEW_GAMES, SMALL_STEPS = _capped("-B"), _few_games, _with("-B", "step_tokens=4")
TABLE = [  # name, class, base, plant, station
    ("self-play, cap of a few rows", "batch cap too small", selfplay, CAPPED),
    ("self-play, cap of a few rows, neighbour", "batch cap too small", selfplay, _beside(CAPPED)),
    ("self-play, few games in flight", "too few rows outstanding", selfplay, FEW_GAMES),
    ("self-play, few games in flight, neighbour", "too few rows outstanding", selfplay, _beside(FEW_GAMES)),
    ("self-play, neighbour", "oversubscribed CPUs", selfplay, _slow(neighbours=CORES)),
    ("text, slow input", "host-bound", generate, lambda base, _: replace(through_pipes(base), feed_s=0.03), "read"),
    ("text, slow output", "host-bound", null, lambda base, _: slow_output(base), "write"),
    ("text, slow disk", "host-bound", null, _slow(write_s=5.0), "write"),
    ("text, slow sync", "host-bound", null, _slow(sync_s=8.0), "sync"),
    ("text, heavy schemas", "host-bound", few_tokens, constrained, "constrain"),
    ("text, small steps", "batch cap too small", generate, SMALL_STEPS, "prefill"),
    ("text, small steps, neighbour", "batch cap too small", generate, _beside(SMALL_STEPS), "prefill"),
    ("masks, no cache", "recomputation", diffusion, _with("--cache", "none")),
    (
        "masks, one a step",
        "few tokens a forward",
        diffusion,
        lambda base, dice: base.adding("--decoder", dice.choice(SCHEDULES)),
    ),
    ("text, long prompts", "device-saturated", answered, lambda base, dice: prompt_heavy(dice), "prefill"),
    ("text, fewer threads than cores", "idle cores", answered, _with("-B", "threads=1"), "forward"),
    ("text, first touch", "first touch", answered, _slow(touched_mb=64), "first touch"),
    ("text, neighbours", "oversubscribed CPUs", answered, _slow(neighbours=2 * CORES)),
    ("text, three prompts", "too few rows outstanding", answered, lambda base, dice: answered(dice, rows=3, tokens=96)),
    ("text, few pages", "too few pages", answered, _few_pages, "idle"),
    ("text, one row", "too few rows outstanding", answered, lambda base, dice: answered(dice, rows=1, tokens=200)),
]
REAL = {name: Real(*given) for name, *given in TABLE}


def observe(command: Command) -> dict[str, Any]:
    """`{evidence, told}` of one run. Raises `RuntimeError` with its last words when it leaves none, and `TimeoutError`
    when it takes longer than `GIVE_UP_S`.
    """
    with tempfile.TemporaryDirectory() as folder, _neighbours(command.neighbours):
        lines = [json.dumps(row).encode() + b"\n" for row in command.rows]
        Path(folder, "in.jsonl").write_bytes(b"".join(lines))
        seen = Path(folder, "seen.json")
        words = [word.replace("{folder}", folder) for word in command.words]
        slowed = (str(seen), str(command.write_s), str(command.sync_s), str(command.touched_mb))
        given = [sys.executable, str(HERE / "observed.py"), *slowed, *words]
        with Path(folder, "said").open("wb+") as said, contextlib.ExitStack() as stack:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
            child = stack.enter_context(subprocess.Popen(given, **pipes))
            stack.callback(child.kill)
            threads = [
                threading.Thread(target=_feed, args=(child.stdin, lines if command.feed_s else [], command.feed_s)),
                threading.Thread(target=_drain, args=(child.stdout, command.drain_s)),
            ]
            for thread in threads:
                thread.start()
            ended = True
            try:
                child.wait(GIVE_UP_S)
            except subprocess.TimeoutExpired:
                ended = False
            child.kill()
            for thread in threads:
                thread.join()
            said.seek(0)
            words_last = said.read()[-300:]
        found = json.loads(seen.read_text()) if seen.exists() else []
    if not ended:
        raise TimeoutError(f"{shlex.join(command.words)}: not done in {GIVE_UP_S:.0f} s. {words_last!r}")
    if not found:
        raise RuntimeError(f"{shlex.join(command.words)}: no report. {words_last!r}")
    return found[0]  # type: ignore[no-any-return]


def _feed(stream: Any, lines: Sequence[bytes], pause_s: float) -> None:
    with contextlib.suppress(OSError), stream:
        for line in lines:
            stream.write(line)
            stream.flush()
            time.sleep(pause_s)


def _drain(stream: Any, pause_s: float) -> None:
    with stream:
        while stream.read1(4096 if pause_s else 1 << 20):
            time.sleep(pause_s)


@contextlib.contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Programs of somebody else: in a session of their own, so that no count of ours has them."""
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def advised(command: Command, told: Mapping[str, Any]) -> Command | None:
    """The command with the option that was advised; None where none was."""
    change = told.get("change")
    if not change:
        return None
    if change["flag"] == "--":
        return command.adding(f"--{change['name'].replace('_', '-')}", str(change["value"]))
    return command.adding(change["flag"], f"{change['name']}={change['value']}")
