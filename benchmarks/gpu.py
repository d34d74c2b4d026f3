"""All of it on a CUDA machine, in ten minutes: the GPU tests, then figures of each part, as one table and as JSON.

`benchmarks/gpu.sh` makes an environment and starts this; its header has the settings. Each part is given its share of
the time that is left. A command that has not ended by then is asked to stop, and what it had measured is taken; a part
that has no time left is skipped. Both are said in the table. The files are written anew with each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "gpuinfer.gpu/1"
LEAST_S = 8.0  # of a command: less is not begun
STOPPING_S = 10.0  # for a command to end by itself once it was asked to
AIM_GAMES, FIRST_STEP_GAMES = 300_000, 100_000  # games/min of Blob on one H200 with 16 cores
AIM_OVER_ONE_ROW = 30  # times


@dataclass(frozen=True)
class Size:
    """How much is asked of a device: of a GPU, or of a CPU on which the program itself is tried."""

    model: str
    workers: tuple[int, ...]
    seconds: float  # of one run
    whole_games: int  # of self-play
    rows: tuple[int, ...]  # of text at once
    tokens: int  # of an answer
    diffusion_rows: int
    block: int
    games: int  # whose positions are trained on
    steps: int
    batch: int  # of training
    rounds: int  # of two models
    text: Mapping[str, int]  # sizes of the Llama and the GPT-2 whose memory is looked at


ON_CUDA = Size(
    model="blobnet",
    workers=(16, 8, 4, 2, 1),  # the most first: whatever is cut short, they are there
    seconds=4.0,
    whole_games=30_000,
    rows=(1, 16, 64, 256),
    tokens=128,
    diffusion_rows=16,
    block=32,
    games=400,
    steps=60,
    batch=4096,
    rounds=3,
    text={"width": 1024, "layers": 8},
)
ON_CPU = Size(
    model="blobnet-small",
    workers=(1,),
    seconds=2.0,
    whole_games=6,
    rows=(1, 4),
    tokens=8,
    diffusion_rows=2,
    block=4,
    games=8,
    steps=4,
    batch=32,
    rounds=1,
    text={"width": 64, "layers": 2},
)


@dataclass
class Figure:
    """One row of the table."""

    part: str
    case: str
    figures: dict[str, float | None]
    status: str = "done"  # or shortened, failed, skipped
    why: str = ""


class Clock:
    """What is left of the time."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._now, self._began = seconds, now, now()

    @property
    def spent(self) -> float:
        return self._now() - self._began

    @property
    def left(self) -> float:
        return self.seconds - self.spent


@dataclass
class Bench:
    """What parts need: devices, sizes, a clock, and where their figures go."""

    device: str
    dtype: str
    size: Size
    results: Path
    clock: Clock
    text_model: str
    diffusion_model: str
    found: list[Figure] = field(default_factory=list)
    part: str = ""
    until: float = 0.0  # what the clock has left when the part has to be over
    commands: int = 1  # of the part that are still to come: they share its time, and what one leaves goes to the others

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def begin(self, part: str, share: float) -> float:
        """Give a part its share of what is left; how many seconds that is."""
        self.part, self.commands, allowed = part, 1, max(0.0, self.clock.left) * share
        self.until = self.clock.left - allowed
        return allowed

    def add(self, case: str, figures: Mapping[str, float | None], status: str = "done", why: str = "") -> None:
        self.found.append(Figure(self.part, case, dict(figures), status, why))
        write(self)

    def skip(self, case: str, why: str) -> None:
        self.add(case, {}, "skipped", why)

    def figures(self) -> list[dict[str, float | None]]:
        """Of this part, so far."""
        return [one.figures for one in self.found if one.part == self.part]

    @property
    def of_rows(self) -> list[object]:
        return [*SELFPLAY, "--model", self.size.model, "--device", self.device, "--dtype", self.dtype]

    def compared(self, case: str, target: str, *words: object) -> None:
        """A `gpuinfer bench` of one repeat: a row for each of its variants."""
        course = ["--seconds", self.size.seconds, "--warmup", self.size.seconds / 4, "--repeats", 1]
        course += [] if self.cuda else ["--no-roofline"]
        if (found := self.gpuinfer(case, "bench", target, *words, *course)) is None:
            return
        document, status = found
        runs = {one["variant"]: run for one, run in zip(document["samples"], document["runs"], strict=True)}
        for row in document["comparison"]:
            unit = UNITS.get(row["metric"], row["metric"])
            self.add(f"{case}: {row['name']}", {unit: row["median"], **of_run(runs.get(row["name"], {}))}, status)
        for kind in ("skipped", "failed"):
            for one in document[kind]:
                self.add(f"{case}: {one['name']}", {}, kind, one["reason"])
        if not any(document[kind] for kind in ("comparison", "skipped", "failed")):
            self.add(case, {}, status, "it had measured nothing yet")

    def text(self, case: str, rows: Sequence[int], model: str, *more: object) -> None:
        """Answers to prompts, so many rows at once."""
        words = ["--model", model, "--device", self.device, "--dtype", self.dtype, "--temperature", 0, "--ignore-eos"]
        words += ["--max-new-tokens", self.size.tokens, "--compare", f"batch-size={','.join(map(str, rows))}"]
        with tempfile.TemporaryDirectory() as folder:
            self.compared(case, "generate", "--prompts", prompts(Path(folder), 8 * max(rows)), *words, *more)

    def gpuinfer(self, case: str, *words: object) -> tuple[dict[str, Any], str] | None:
        """Run `gpuinfer` with a `--json` of its own: what it wrote, and `done` or `shortened`. One that fails may have
        written what it found until then, and says there what failed.
        """
        file = self.results / f"{name_of(f'{self.part}-{case}')}.json"
        file.unlink(missing_ok=True)
        status = self.run(case, [sys.executable, "-m", "gpuinfer", *words, "--json", file])
        if status is None:
            return None
        try:
            return json.loads(file.read_text()), status.replace("failed", "done")
        except (OSError, ValueError):
            self.add(case, {}, status, self.last(case) if status == "failed" else "it had measured nothing yet")
            return None

    def run(self, case: str, words: Sequence[object]) -> str | None:
        """`done`, `shortened` or `failed`; None where there was no time for it, which the table then says."""
        allowed = (self.clock.left - self.until) / max(1, self.commands)
        self.commands -= 1
        if allowed < LEAST_S:
            self.skip(case, "no time left")
            return None
        print(f"gpu: {self.part}: {case}", file=sys.stderr, flush=True)
        with self.log(case).open("wb") as log:
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = ended(process, max(LEAST_S, allowed - STOPPING_S))
        return "shortened" if code is None else "failed" if code else "done"

    def log(self, case: str) -> Path:
        return self.results / f"{name_of(f'{self.part}-{case}')}.log"

    def last(self, case: str) -> str:
        """The last words of what it printed."""
        said = self.log(case).read_text(errors="replace").strip().splitlines()
        return said[-1].strip() if said else "it said nothing"


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; None where it had to be stopped. Nothing of it is left."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def name_of(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


UNITS = {"evaluations_per_s": "evaluations/s", "rows_per_s": "rows/s", "output_tokens_per_s": "tokens/s"}


def of_run(report: Mapping[str, Any]) -> dict[str, float | None]:
    """What a report says beside the rate; what it does not say is left out."""
    found = {
        "games/min": ("throughput", "games_per_min"),
        "rows a batch": ("batches", "rows_mean"),
        "of the roofline": ("roofline", "efficiency"),
        "device use": ("device", "utilisation"),
        "device peak MB": ("memory", "device_peak_mb"),
        "fragmentation": ("memory", "fragmentation"),
        "tokens a forward": ("unmasking", "tokens_per_forward"),
        "bubbles": ("stages", "bubble_share"),
    }
    figures = {name: value for name, path in found.items() if (value := at(report, *path)) is not None}
    return {name: value for name, value in figures.items() if value or name != "games/min"}  # no game has ended yet


def at(report: Any, *path: str) -> Any:
    for key in path:
        report = report.get(key) if isinstance(report, Mapping) else None
    return report


def prompts(folder: Path, count: int) -> Path:
    """Prompts of 16 to 255 numbers, the same ones each time."""
    dice, file = random.Random(0), folder / "prompts.jsonl"
    rows = (" ".join(f"{dice.random():.2f}" for _ in range(dice.randrange(16, 256))) for _ in range(count))
    file.write_text("".join(json.dumps({"id": str(number), "prompt": text}) + "\n" for number, text in enumerate(rows)))
    return file


# The parts


def kernels(it: Bench) -> None:
    """Compile what searches and samples: on a new machine that would be the time of whichever part needs it first."""
    play = ["selfplay", *SELFPLAY, "--model", "uniform", "--games", 4, "--workers", 1, "--no-roofline", "--quiet"]
    write = ["generate", "--model", it.text_model, "--prompt", "a", "--max-new-tokens", 4, "--quiet"]
    it.commands = 2
    for case, words in {"search": play, "text": [*write, "--device", it.device, "--dtype", it.dtype]}.items():
        before = it.clock.spent
        if (status := it.run(case, [sys.executable, "-m", "gpuinfer", *words])) is not None:
            it.add(case, {"seconds": it.clock.spent - before}, status, it.last(case) if status == "failed" else "")


def tests(it: Bench) -> None:
    if not it.cuda:
        it.skip("GPU tests", "they need a CUDA device")
        return
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    status = it.run("GPU tests", [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files])
    if status is not None:
        said = it.log("GPU tests").read_text(errors="replace").rpartition("\n=")[2]
        counted = re.findall(r"(\d+) (passed|failed|skipped|errors?)", said)
        it.add("GPU tests", {what: float(count) for count, what in counted}, status)


SELFPLAY = ("--game", "blob", "--players", 4, "--cards", 5, "--determinizations", 3, "--simulations", 30)


def selfplay(it: Bench) -> None:
    """Blob 4 × 5, 3 × 30, at 1 to 16 workers: a model in each of them, and one in a server for all. Those are runs of
    seconds, in which hardly a game ends; so many games to their end are played once.
    """
    cores = len(os.sched_getaffinity(0))
    workers = [count for count in it.size.workers if count <= cores]
    it.commands = 3
    for backend in ("central", "inprocess"):
        it.compared(backend, "selfplay", *it.of_rows, "--backend", backend, "--workers", ",".join(map(str, workers)))
    whole = ["--backend", "central", "--workers", max(workers), "--games", it.size.whole_games, "--no-roofline"]
    if (found := it.gpuinfer("whole games", "selfplay", *it.of_rows, *whole)) is not None:
        it.add(f"central: {it.size.whole_games:,} games, {max(workers)} workers", of_run(found[0]), found[1])
    reached = [rate for figures in it.figures() if (rate := figures.get("games/min"))]
    if reached:
        it.add(
            "the fastest", {"games/min": max(reached), "aim": float(AIM_GAMES), "first step": float(FIRST_STEP_GAMES)}
        )


def generation(it: Bench) -> None:
    """Text at several numbers of rows at once, and the most of them in other ways."""
    it.commands = 4 if it.cuda else 1
    it.text("rows at once", it.size.rows, it.text_model)
    rates = [rate for figures in it.figures() if (rate := figures.get("tokens/s"))]
    if len(rates) > 1:
        it.add("over one row at a time", {"times": max(rates) / rates[0], "aim": float(AIM_OVER_ONE_ROW)})
    if it.cuda:
        ways = {
            "without CUDA graphs": "-B graphs=false",
            "torch.compile": "-B compile=true",
            "deterministic": "--deterministic",
        }
        for case, words in ways.items():
            it.text(case, it.size.rows[-1:], it.text_model, *words.split())


def diffusion(it: Bench) -> None:
    ways = (("threshold", "dual"), ("threshold", "none"), ("low-confidence", "none"))
    ways = ways if it.cuda else ways[:1]
    it.commands = len(ways)
    for decoder, cache in ways:
        how = ("--decoder", decoder, "--cache", cache, "--block-length", it.size.block)
        it.text(f"{decoder}, cache {cache}", [it.size.diffusion_rows], it.diffusion_model, *how)


def devices(it: Bench) -> None:
    """A copy of the model on each device against the first alone; where there is one, that against stand-ins."""
    first, count = ("cuda:0", cuda_devices()) if it.cuda else ("cpu", 0)
    several = "+".join(f"cuda:{number}" for number in range(count)) if count > 1 else "cpu+cpu"
    words = [*it.of_rows[:-4], "--backend", "inprocess", "--workers", 1]  # float32: the CPU may have no other
    it.compared("data parallel", "selfplay", "--compare", f"device={first},{several}", *words)


def stages(it: Bench) -> None:
    """Two stages, also where there is one device: they share it."""
    words = [*it.of_rows, "--backend", "inprocess", "--workers", 1, "-B", "stages=2"]
    it.compared("two stages", "selfplay", "--compare", "parallel=data,layers,pipeline", *words)


def models(it: Bench) -> None:
    """Two models in one server: in turns, at once on streams of their own, and whichever of them it finds faster."""
    pairs = ("rows", "text") if it.cuda else ("rows",)
    it.commands = len(pairs)
    for pair in pairs:
        words = [
            "--pair",
            pair,
            "--ways",
            "turns,at-once,one",
            "--rounds",
            it.size.rounds,
            "--seconds",
            it.size.seconds / 2,
        ]
        file = it.results / f"models-{pair}-found.json"
        file.unlink(missing_ok=True)
        given = [sys.executable, ROOT / "benchmarks" / "models.py", *words, "--device", it.device, "--json", file]
        status = it.run(f"two of {pair}", given)
        if status is not None and not file.exists():
            it.add(f"two of {pair}", {}, status, it.last(f"two of {pair}"))
        for way, rates in (json.loads(file.read_text()) if file.exists() else {}).items():
            figures = {f"{UNIT[pair]} of {name}": rate for name, rate in zip("ab", rates, strict=True)}
            it.add(f"two of {pair}, {WAYS[way]}", figures)


UNIT = {"rows": "rows/s", "text": "tokens/s"}
WAYS = {"turns": "in turns", "at-once": "at once", "one": "as it chooses"}


def memory(it: Bench) -> None:
    """What is estimated beside what was measured."""
    it.commands = 3
    for name, family in {"blobnet": None, "Llama": "llama", "GPT-2": "gpt2"}.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                model = it.size.model if family is None else checkpoint(Path(folder), family, it.size.text)
            except ImportError as error:
                it.skip(name, f"{error}: transformers writes the checkpoint")
                continue
            words = ["--model", model, *([] if family is None else ["--context", 256])]
            found = it.gpuinfer(name, "memory", *words, "--device", it.device, "--dtype", it.dtype)
        if found is None:
            continue
        document, status = found
        (place,) = document["devices"]
        for one in place["tried"]:
            sizes = {f"{which} MB": one[f"{which}_bytes"] / 2**20 for which in ("estimated", "measured")}
            it.add(f"{name}, a batch of {one['batch']:,}", {**sizes, "ratio": one["ratio"]}, status)
        if not place["tried"]:
            it.skip(name, place["not_tried"] or "nothing was tried")


def checkpoint(folder: Path, family: str, sizes: Mapping[str, int]) -> Path:
    """A folder with random weights, as transformers writes it."""
    sys.path.append(str(ROOT / "tests"))
    from text.tiny import tiny_checkpoint

    width, layers = sizes["width"], sizes["layers"]
    changes = {
        "llama": {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers},
        "gpt2": {"n_embd": width, "n_layer": layers},
    }
    return tiny_checkpoint(family, **changes[family]).rename(folder / family)


def training(it: Bench) -> None:
    """`gpuinfer train` with all activations kept, and with those of segments: time and memory."""
    it.commands = 3
    with tempfile.TemporaryDirectory() as place:
        games = ["--games", it.size.games, "--model", "uniform", "--no-roofline", "--out", f"{place}/games", *SELFPLAY]
        if it.gpuinfer("positions", "selfplay", *games) is None:
            return
        for case, more in {"all kept": [], "3 segments": ["-B", "checkpoint_segments=3"]}.items():
            words = ["--records", f"{place}/games", "--out", f"{place}/{name_of(case)}", "--model", "blobnet", *more]
            words += ["--steps", it.size.steps, "--batch-size", it.size.batch, "--dtype", it.dtype]
            if (found := it.gpuinfer(case, "train", *words, "--device", it.device)) is None:
                continue
            report, status = found
            steps = at(report, "training", "steps") or 0
            figures = {
                "ms a step": 1000 * report["wall_s"] / steps if steps else None,
                "activations MB": at(report, "training", "activation_mb"),
            }
            it.add(case, {**figures, **of_run(report)}, status)


def fragmentation(it: Bench) -> None:
    """Prompts of all lengths, one run: what torch's allocator had reserved and no tensor ever filled."""
    if not it.cuda:
        it.skip("ragged prompts", "it is counted on CUDA alone")
        return
    it.text("ragged prompts", [it.size.diffusion_rows], it.text_model, "--max-new-tokens", "200")


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "kernels": (kernels, 60),
    "tests": (tests, 90),
    "selfplay": (selfplay, 140),
    "generation": (generation, 90),
    "diffusion": (diffusion, 50),
    "devices": (devices, 40),
    "stages": (stages, 40),
    "models": (models, 60),
    "memory": (memory, 45),
    "training": (training, 35),
    "fragmentation": (fragmentation, 10),
}
"""And the seconds that each is thought to take on a GPU: by these they share what is left."""


def run(it: Bench, parts: Sequence[str]) -> None:
    for number, name in enumerate(parts):
        part, weight = PARTS[name]
        if it.begin(name, weight / sum(PARTS[later][1] for later in parts[number:])) < LEAST_S:
            it.skip("all of it", "no time left")
        else:
            try:
                part(it)
            except Exception as error:  # noqa: BLE001 (the other parts go on)
                it.add("all of it", {}, "failed", f"{type(error).__name__}: {error}")
        write(it)


# What is told


def write(it: Bench) -> None:
    document = {
        "schema": SCHEMA,
        "device": it.device,
        "device_name": device_name(it.device),
        "tried_on_a_cpu": not it.cuda,
        "budget_s": it.clock.seconds,
        "spent_s": round(it.clock.spent, 1),
        "figures": [asdict(one) for one in it.found],
    }
    (it.results / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (it.results / "gpu.md").write_text(table(document))


def table(document: Mapping[str, Any]) -> str:
    said = f"{document['device_name']}, {document['spent_s']:.0f} s of {document['budget_s']:.0f} s."
    if document["tried_on_a_cpu"]:
        said += " **The program was tried on a CPU, with small counts: these are no figures of a GPU.**"
    rows = [f"| {one['part']} | {one['case']} | {shown(one)} |" for one in document["figures"]]
    return "\n".join([said, "", "| part | case | found |", "|---|---|---|", *rows, ""])


def shown(figure: Mapping[str, Any]) -> str:
    cells = [f"{name} {number(value)}" for name, value in figure["figures"].items()]
    if figure["status"] != "done":
        cells.append(" ".join(filter(None, [f"**{figure['status']}**", figure["why"].replace("|", "/")])))
    return "; ".join(cells)


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@functools.cache
def device_name(device: str) -> str:
    from gpuinfer.models.device import device_name, resolve_device

    return device_name(resolve_device(device))


def cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu tries the program itself, with small counts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--text-model", default="tiny")
    parser.add_argument("--diffusion-model", default="tiny-llada")
    own = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended, and what is written stays
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have us and ours ignore
    parts = own.parts.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}. There are {', '.join(PARTS)}.")
    cuda = own.device != "cpu"
    if cuda and not cuda_devices():
        parser.error(
            "torch sees no CUDA device. Run it on a machine with one (nvidia-smi tells whether the driver works)."
        )
    own.results.mkdir(parents=True, exist_ok=True)
    clock, size = Clock(own.seconds), ON_CUDA if cuda else ON_CPU
    it = Bench(own.device, own.dtype, size, own.results.resolve(), clock, own.text_model, own.diffusion_model)
    run(it, parts)
    print((it.results / "gpu.md").read_text())
    return int(any(one.status == "failed" for one in it.found))


if __name__ == "__main__":
    sys.exit(main())
