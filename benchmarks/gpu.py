"""What can be learnt on a CUDA machine in ten minutes: a part of the findings after another, as one table and as JSON.

`benchmarks/gpu.sh` makes an environment and starts this; its header says what each part does. A part is given its share
of the time that is left, and ends within it: a command that has not ended by then is asked to stop, and killed if it
does not; what it had found is taken. A part that has no time left is skipped. Both are said in the table. The files are
written anew with each finding. This process imports nothing heavy: its parts start while torch would be read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
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
SCHEMA = "gpuinfer.gpu/2"
LEAST_S = 16.0  # of a command, of which the last STOPPING_S are for its end: less is not begun
STOPPING_S = 8.0  # for a command to end by itself once it was asked to
LOOK_S = 0.5  # between two looks at what a command has found so far
AIM_GAMES, FIRST_STEP_GAMES = 300_000, 100_000  # games/min of Blob on one H200 with 16 cores
COMMANDS = "commands"  # the folder of what commands wrote, within the results


@dataclass(frozen=True)
class Size:
    """How much is asked of a device: of a GPU, or of a CPU on which the program itself is tried."""

    model: str
    workers: int
    seconds: float  # of one run
    in_flight: tuple[int, ...]  # batches at once
    games_in_flight: int
    whole_games: int  # of self-play
    tokens: int  # of an answer
    diffusion_rows: int
    block: int
    games: int  # whose positions are trained on
    steps: int
    batch: int  # of training
    text: Mapping[str, int]  # sizes of the Llama whose memory is looked at


ON_CUDA = Size(
    model="blobnet",
    workers=16,
    seconds=4.0,
    in_flight=(4, 2),
    games_in_flight=20_000,
    whole_games=20_000,
    tokens=64,
    diffusion_rows=16,
    block=32,
    games=400,
    steps=40,
    batch=4096,
    text={"width": 1024, "layers": 8, "vocabulary": 32_000},
)
ON_CPU = Size(
    model="blobnet-small",
    workers=1,
    seconds=2.0,
    in_flight=(1,),
    games_in_flight=8,
    whole_games=4,
    tokens=8,
    diffusion_rows=2,
    block=4,
    games=6,
    steps=2,
    batch=32,
    text={"width": 64, "layers": 2, "vocabulary": 300},
)


@dataclass
class Figure:
    """One row of the table."""

    part: str
    case: str
    figures: dict[str, float | None]
    status: str = "done"  # or shortened, failed, skipped
    why: str = ""  # what was found in words, or why nothing was


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

    @property
    def allowed(self) -> float:
        """Seconds for the next command: its share of what the part has left, and LEAST_S if there is as much."""
        left = self.clock.left - self.until
        return min(left, max(LEAST_S, left / max(1, self.commands)))

    def begin(self, part: str, share: float) -> float:
        """Give a part its share of what is left; how many seconds that is."""
        self.part, self.commands, allowed = part, 1, max(0.0, self.clock.left) * share
        self.until = self.clock.left - allowed
        return allowed

    def add(self, case: str, figures: Mapping[str, float | None], status: str = "done", why: str = "") -> None:
        self.found.append(Figure(self.part, case, dict(figures), status, why))
        print(f"gpu: {self.part}: {case}: {shown(asdict(self.found[-1]))}", file=sys.stderr, flush=True)
        write(self)

    def skip(self, case: str, why: str) -> None:
        self.add(case, {}, "skipped", why)

    def figures(self) -> list[dict[str, float | None]]:
        """Of this part, so far."""
        return [one.figures for one in self.found if one.part == self.part]

    @property
    def of_rows(self) -> list[object]:
        return [*SELFPLAY, "--model", self.size.model, "--device", self.device, "--dtype", self.dtype]

    def probes(self) -> None:
        """The part of that name in `gpu_probes.py`: one process, whose findings are taken as it writes them."""
        file = self.file("", "findings")
        file.unlink(missing_ok=True)
        taken = 0

        def take() -> None:
            nonlocal taken
            lines = file.read_text().split("\n")[:-1] if file.exists() else []  # what follows the last is not whole
            for line in lines[taken:]:
                one = json.loads(line)
                self.add(one["case"], one["figures"], one["status"], one["why"])
            taken = len(lines)

        own = [sys.executable, ROOT / "benchmarks" / "gpu_probes.py", self.part, "--file", file]
        own += ["--device", self.device, "--dtype", self.dtype, "--seconds", max(1.0, self.allowed - 2 * STOPPING_S)]
        status = self.run("probes", own, take)
        if status in ("failed", "shortened"):
            self.add("the rest", {}, status, self.last("probes") if status == "failed" else "no time left")

    def compared(self, case: str, target: str, *words: object, roofline: bool = False) -> None:
        """A `gpuinfer bench` of one repeat: a row for each of its variants. `roofline`: measure the bare model, whose
        best batch decides how many games are in flight.
        """
        course = ["--seconds", self.size.seconds, "--warmup", self.size.seconds / 4, "--repeats", 1]
        course += [] if roofline else ["--no-roofline"]
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
        file = self.file(case, "json")
        file.unlink(missing_ok=True)
        status = self.run(case, [sys.executable, "-m", "gpuinfer", *words, "--json", file])
        if status is None:
            return None
        try:
            return json.loads(file.read_text()), status.replace("failed", "done")
        except (OSError, ValueError):
            self.add(case, {}, status, self.last(case) if status == "failed" else "it had measured nothing yet")
            return None

    def run(
        self,
        case: str,
        words: Sequence[object],
        meanwhile: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> str | None:
        """`done`, `shortened` or `failed`; None where there was no time for it, which the table then says. `meanwhile`
        is called now and then, and once at the end; `environment` is added to ours.
        """
        allowed = self.allowed
        self.commands -= 1
        if allowed < LEAST_S:
            self.skip(case, "no time left")
            return None
        print(f"gpu: {self.part}: {case} …", file=sys.stderr, flush=True)
        with self.file(case, "log").open("wb") as log:
            process = subprocess.Popen(
                list(map(str, words)),
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = ended(process, allowed - STOPPING_S, meanwhile)
        meanwhile()
        return "shortened" if code is None else "failed" if code else "done"

    def file(self, case: str, kind: str) -> Path:
        """Where something of a command is kept."""
        folder = self.results / COMMANDS
        folder.mkdir(exist_ok=True)
        return folder / f"{name_of(f'{self.part}-{case}')}.{kind}"

    def last(self, case: str) -> str:
        """The last words of what it printed."""
        said = self.file(case, "log").read_text(errors="replace").strip().splitlines()
        return said[-1].strip() if said else "it said nothing"


def ended(process: subprocess.Popen[bytes], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> int | None:
    """Its exit code; None where it had to be stopped. Nothing of it is left."""
    stops = time.monotonic() + max(0.0, seconds)
    try:
        while (left := stops - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(LOOK_S, left))
            meanwhile()
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
        "setup s": ("setup_s",),
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


PYTEST = ("-m", "gpu", "-W", "default", "--maxfail=15", "--timeout=45", "-p", "no:cacheprovider", "-v")
SENSITIVE = "weights or stream or flight or exchanged or stages or pinned or two_models"  # to what a sanitizer sees


def tests(it: Bench) -> None:
    """The GPU tests but the one that compiles with torch."""
    tried(it, "not torch_compiles")


def sanitizer(it: Bench) -> None:
    """Those of streams and weights with torch's sanitizer, which finds kernels that nothing keeps apart."""
    tried(it, f"({SENSITIVE}) and not torch_compiles", {"TORCH_CUDA_SANITIZER": "1"})


def tried(it: Bench, chosen: str, environment: Mapping[str, str] | None = None) -> None:
    """How many tests there were, and each that failed."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    files.sort(key=lambda path: path.parent.name in ("central", "serving") or "memory" in path.name)  # start processes
    words = [sys.executable, "-m", "pytest", *PYTEST, "-k", chosen, *files]
    wide = {"COLUMNS": "250"}  # else pytest cuts off why a test has failed
    if (status := it.run("GPU tests", words, environment={**wide, **(environment or {})})) is None:
        return
    said = it.file("GPU tests", "log").read_text(errors="replace")
    for name, why in re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", said, re.M):
        it.add(name, {}, "failed", why[:200])
    counted = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", said.strip().rpartition("\n")[2])
    it.add("GPU tests", {what: float(count) for count, what in counted}, status)


SELFPLAY = ("--game", "blob", "--players", 4, "--cards", 5, "--determinizations", 3, "--simulations", 30)


def kernels(it: Bench) -> None:
    """Compile what searches and samples: on a new machine that would be the time of whichever part needs it first."""
    play = ["selfplay", *SELFPLAY, "--model", "uniform", "--games", it.size.games, "--workers", 1, "--no-roofline"]
    play += ["--quiet", "--out", positions(it)]
    shutil.rmtree(positions(it), ignore_errors=True)
    write = ["generate", "--model", it.text_model, "--prompt", "a", "--max-new-tokens", 4, "--quiet"]
    it.commands = 2
    for case, words in {"search": play, "text": [*write, "--device", it.device, "--dtype", it.dtype]}.items():
        before = it.clock.spent
        if (status := it.run(case, [sys.executable, "-m", "gpuinfer", *words])) is not None:
            it.add(case, {"seconds": it.clock.spent - before}, status, it.last(case) if status == "failed" else "")


def positions(it: Bench) -> Path:
    """Where part kernels leaves positions to train on."""
    return it.results / COMMANDS / "positions"


def central(it: Bench) -> None:
    """Blob 4 × 5, 3 × 30: all workers, one server; so many games at once and as many as it chooses, several batches in
    flight. Those are runs of seconds, in which hardly a game ends; so many games to their end are played once. The
    first command has half of the time, and the second half of the rest.
    """
    workers = min(it.size.workers, len(os.sched_getaffinity(0)))
    rows = [*it.of_rows, "--backend", "central", "--workers", workers]
    batches = ("--compare", f"in_flight={','.join(map(str, it.size.in_flight))}")
    it.commands = 2
    it.compared(
        f"{it.size.games_in_flight:,} games", "selfplay", *rows, "--games-in-flight", it.size.games_in_flight, *batches
    )
    it.commands = 2
    it.compared("as many games as it chooses", "selfplay", *rows, *batches, roofline=it.cuda)
    whole = ["--games", it.size.whole_games, "--no-roofline", "--games-in-flight", it.size.games_in_flight]
    if (found := it.gpuinfer("whole games", "selfplay", *rows, *whole)) is not None:
        it.add(f"{it.size.whole_games:,} games, {workers} workers", of_run(found[0]), found[1])
    reached = [rate for figures in it.figures() if (rate := figures.get("games/min"))]
    if reached:
        it.add(
            "the fastest", {"games/min": max(reached), "aim": float(AIM_GAMES), "first step": float(FIRST_STEP_GAMES)}
        )


def diffusion(it: Bench) -> None:
    ways = (("threshold", "dual"), ("threshold", "none")) if it.cuda else (("threshold", "dual"),)
    for decoder, cache in ways:
        how = ("--decoder", decoder, "--cache", cache, "--block-length", it.size.block)
        it.text(f"{decoder}, cache {cache}", [it.size.diffusion_rows], it.diffusion_model, *how)


def stages(it: Bench) -> None:
    """Two stages, also where there is one device: they share it."""
    words = [*it.of_rows, "--backend", "inprocess", "--workers", 1, "-B", "stages=2"]
    it.compared("two stages", "selfplay", "--compare", "parallel=data,pipeline", *words)


def memory(it: Bench) -> None:
    """What is estimated beside what was measured. The first has all the time that it needs."""
    for name in ("Llama", "blobnet"):
        with tempfile.TemporaryDirectory() as folder:
            text = name == "Llama"
            model = llama_folder(Path(folder), it.size.text) if text else it.size.model
            words = ["--model", model, *(["--context", 256] if text else [])]
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


def llama_folder(folder: Path, sizes: Mapping[str, int]) -> Path:
    """A Llama as transformers writes it, with random weights, and tokens that are bytes."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    width, layers, vocabulary = sizes["width"], sizes["layers"], sizes["vocabulary"]
    heads, inner = width // 16 if width < 256 else width // 64, 2 * width
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "vocab_size": vocabulary, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float16", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    letters = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    dice = np.random.default_rng(0)

    def drawn(out: int, into: int) -> Any:
        return (dice.standard_normal((out, into), np.float32) / into**0.5).astype(np.float16)

    tensors = {"model.embed_tokens.weight": drawn(vocabulary, width), "lm_head.weight": drawn(vocabulary, width)}
    tensors["model.norm.weight"] = np.ones(width, np.float16)
    for number in range(layers):
        of = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{of}{norm}.weight"] = np.ones(width, np.float16)
        for name, out in {"q": width, "k": width // 2, "v": width // 2, "o": width}.items():
            tensors[f"{of}self_attn.{name}_proj.weight"] = drawn(out, width)
        for name, (out, into) in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
            tensors[f"{of}mlp.{name}_proj.weight"] = drawn(out, into)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def training(it: Bench) -> None:
    """`gpuinfer train` with all activations kept, and with those of segments if there is time: time and memory."""
    if not positions(it).is_dir():
        it.skip("all of it", "part kernels, which plays the games, has left no positions")
        return
    with tempfile.TemporaryDirectory() as place:
        for case, more in {"all kept": [], "3 segments": ["-B", "checkpoint_segments=3"]}.items():
            words = ["--records", positions(it), "--out", f"{place}/{name_of(case)}", "--model", "blobnet", *more]
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


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "versions": (Bench.probes, 25),
    "attention": (Bench.probes, 40),
    "tests": (tests, 90),
    "sanitizer": (sanitizer, 30),
    "blobnet": (Bench.probes, 45),
    "batcher": (Bench.probes, 30),
    "kernels": (kernels, 40),
    "central": (central, 140),
    "text": (Bench.probes, 65),
    "permuted": (Bench.probes, 25),
    "prefixes": (Bench.probes, 20),
    "memory": (memory, 35),
    "training": (training, 25),
    "stages": (stages, 30),
    "diffusion": (diffusion, 20),
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
        "device_name": device_name(it),
        "tried_on_a_cpu": not it.cuda,
        "dtype": it.dtype,
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
    status = "" if figure["status"] == "done" else f"**{figure['status']}**"
    if said := " ".join(filter(None, [status, figure["why"].replace("|", "/")])):
        cells.append(said)
    return "; ".join(cells)


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def device_name(it: Bench) -> str:
    """As the probe of versions has found it."""
    named = [one.why for one in it.found if (one.part, one.case, one.status) == ("versions", "device", "done")]
    return named[0] if named else it.device


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
    if cuda and not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
        parser.error("there is no NVIDIA driver here. DEVICE=cpu tries the program itself, with small counts.")
    own.results.mkdir(parents=True, exist_ok=True)
    clock, size = Clock(own.seconds), ON_CUDA if cuda else ON_CPU
    it = Bench(own.device, own.dtype, size, own.results.resolve(), clock, own.text_model, own.diffusion_model)
    run(it, parts)
    print((it.results / "gpu.md").read_text())
    return int(any(one.status == "failed" for one in it.found))


if __name__ == "__main__":
    sys.exit(main())
