"""What one process can find out on a device, part by part: `python benchmarks/gpu_probes.py PART --file FINDINGS`.

`benchmarks/gpu.py` starts it, once for each part. A finding is appended to the file as soon as it is known, a JSON
object a line, so that a process that is killed keeps all but the probe under way. A probe that fails is a finding too,
and the others go on; one that needs CUDA says so where there is none. What may spoil the process comes last.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpuinfer.api import ModelSpec
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.cuda_graphs import captured
from gpuinfer.text.transformer import PAGE, Layer, Linear, Norm, Rope, Shape, Step, Weights

NO_DEVICE = "no CUDA device"
FEATURES, ACTIONS, SEATS = 320, 52, 4  # about Blob's
CLIENTS = 16  # whose blocks make a batch
Figures = Mapping[str, float | None]


class NotHere(Exception):
    """What a probe needs is not on this machine, and why."""


@dataclass(frozen=True)
class Counts:
    """How much is measured."""

    rows: tuple[int, ...]  # of a batch of a network, the largest first
    text_rows: tuple[int, ...]
    text: Shape
    context: int  # positions of a row of text
    begun: int  # of them, those in the cache when decoding is timed
    answer: int  # tokens, by the generator
    attention: tuple[int, int, int, int, int]  # rows, heads of keys, heads that share one, values of a head, positions
    prompts: tuple[int, int]  # the shortest and the longest of ragged prompts
    shared_mb: int
    permuted: int  # rows
    prefixes: tuple[int, int, int, int]  # rows, of which so many sample one prompt; positions of that, and of an answer
    timed: int  # calls, at most
    callers: tuple[int, ...]  # rows that are outstanding in a batcher
    asked_s: float  # seconds of asking a batcher


LLAMA_1B = Shape(
    family="llama", vocabulary=128_256, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192,
    positions=4096, rope=Rope(tuple(500_000 ** (-i / 32) for i in range(32))), tied=True,
)  # fmt: skip
SMALL = Shape(
    family="llama", vocabulary=300, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48,
    positions=256, rope=Rope(tuple(10.0 ** (-i / 2) for i in range(8))), tied=True,
)  # fmt: skip
ON_CUDA = Counts(
    rows=(65_536, 32_768, 16_384, 8192, 4096, 2048),
    text_rows=(256, 64),
    text=LLAMA_1B,
    context=1024,
    begun=512,
    answer=64,
    attention=(256, 8, 4, 128, 512),
    prompts=(100, 1000),
    shared_mb=256,
    permuted=2048,
    prefixes=(256, 64, 1024, 256),
    timed=200,
    callers=(256, 64),
    asked_s=1.5,
)
ON_CPU = Counts(
    rows=(64, 32, 16),
    text_rows=(4, 2),
    text=SMALL,
    context=128,
    begun=40,
    answer=4,
    attention=(4, 2, 2, 16, 64),
    prompts=(10, 30),
    shared_mb=1,
    permuted=64,
    prefixes=(8, 4, 64, 32),
    timed=3,
    callers=(8,),
    asked_s=0.2,
)


@dataclass
class Probes:
    """Where findings go, and the time that is left for them."""

    part: str
    device: torch.device
    dtype: torch.dtype
    counts: Counts
    file: Path
    seconds: float = 60.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.began)

    def add(self, case: str, figures: Figures | None = None, why: str = "", status: str = "done") -> None:
        found = {"part": self.part, "case": case, "figures": figures or {}, "status": status, "why": why}
        with self.file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")

    def attempt(self, case: str, probe: Callable[..., Figures | str], *given: Any, cuda: bool = False) -> None:
        """Write down what a probe returns, figures or a word, or why it did not. `cuda`: it needs a CUDA device."""
        if cuda and not self.cuda:
            self.add(case, why=NO_DEVICE, status="skipped")
            return
        if self.left <= 0:
            self.add(case, why="no time left", status="skipped")
            return
        try:
            found = probe(*given)
        except NotHere as reason:
            self.add(case, why=str(reason), status="skipped")
        except Exception as error:  # noqa: BLE001 (the other probes go on)
            self.add(case, why=f"{type(error).__name__}: {first_line(error)}", status="failed")
        else:
            self.add(case, why=found) if isinstance(found, str) else self.add(case, found)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def ms(self, work: Callable[[], object], seconds: float = 0.5) -> float:
        """Milliseconds of a call: of many in a row, as many as fit in `seconds`, after two that do not count."""
        for _ in range(2):
            work()
        self.wait()
        once = max(self.first_ms(work), 1e-3)
        calls = max(1, min(self.counts.timed, int(1000 * min(seconds, max(self.left, 0.0)) / once)))
        started = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return 1000 * (time.perf_counter() - started) / calls

    def first_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds of one call."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return 1000 * (time.perf_counter() - started)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def profile(self, case: str, work: Callable[[], object], calls: int) -> None:
        """The kernels of so many calls: their table beside the findings, and those that took most."""

        def measured() -> str:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            work()
            self.wait()
            with profile(activities=kinds) as seen:
                started = time.perf_counter()
                for _ in range(calls):
                    work()
                self.wait()
                wall = time.perf_counter() - started
            key, kind = ("self_device_time_total", "CUDA") if self.cuda else ("self_cpu_time_total", "CPU")
            averages = seen.key_averages()
            name = f"{self.part}-{case}".replace(" ", "-")
            (self.file.parent / f"{name}.txt").write_text(averages.table(sort_by=key, row_limit=40))
            events = [event for event in averages if event.device_type.name == kind]  # an operator's kernels come again
            busiest = sorted(events, key=lambda event: -getattr(event, key))
            whole = sum(getattr(event, key) for event in events) or 1.0  # microseconds
            shares = "; ".join(f"{event.key[:40]} {getattr(event, key) / whole:.0%}" for event in busiest[:5])
            launches = sum(event.count for event in events) / calls
            of = "kernels" if self.cuda else "operators"
            return (
                f"busy {whole / 1e6 / wall:.0%} of {1000 * wall / calls:.3g} ms, {launches:.0f} {of} a call: {shares}"
            )

        self.attempt(f"profile of {case}", measured)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["without a word"])[0][:200]


# Versions, memory and captures


def versions(it: Probes) -> None:
    """What is there, and how CUDA behaves where gpuinfer's code relies on it. A capture that fails may spoil a process:
    it has one of its own, which writes to the same file.
    """
    own = [sys.executable, __file__, "failed-capture", "--file", it.file, "--device", it.device.type]
    failing = subprocess.Popen(own, stdin=subprocess.DEVNULL) if it.cuda else None
    for name in ("torch", "numpy", "numba", "llvmlite", "triton"):
        it.attempt(name, installed, name)
    it.add("python", why=f"{platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    it.attempt("numba compiles", numba_compiles)
    it.attempt("varlen_attn", varlen_signature)
    it.attempt("device", device_facts, it, cuda=True)
    it.attempt("cuDNN", lambda: str(torch.backends.cudnn.version()), cuda=True)
    it.attempt("copies of pageable memory", pageable_copies, it, cuda=True)
    it.attempt("copies of pinned memory", pinned_copies, it, cuda=True)
    it.attempt("copies of a registered memfd", registered_memfd, it, cuda=True)
    it.attempt("another stream waits during a capture", during_a_capture, it, wait_for_stream, cuda=True)
    it.attempt("a blocking copy during a capture", during_a_capture, it, blocking_copy, cuda=True)
    it.attempt("memory is taken during a capture", during_a_capture, it, take_memory, cuda=True)
    it.attempt("the device is waited for during a capture", during_a_capture, it, wait_for_all, cuda=True)
    if failing is None:
        failed_capture(it)
    elif failing.wait(max(1.0, it.left)):
        raise RuntimeError(f"the process whose capture fails ended with {failing.returncode}")


def failed_capture(it: Probes) -> None:
    it.attempt("after a capture that fails", after_a_failed_capture, it, cuda=True)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise NotHere("not installed") from None


def numba_compiles() -> Figures:
    started = time.perf_counter()
    numba = importlib.import_module("numba")
    imported = time.perf_counter()
    assert numba.njit(lambda x: x + 1)(1) == 2
    return {"import s": imported - started, "compile s": time.perf_counter() - imported}


def varlen_signature() -> str:
    """From the source: importing it takes seconds."""
    spec = importlib.util.find_spec("torch.nn.attention.varlen")
    if spec is None or spec.origin is None:
        raise NotHere("this torch has none")
    for one in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(one, ast.FunctionDef) and one.name == "varlen_attn":
            return ", ".join(given.arg for given in (*one.args.args, *one.args.kwonlyargs))
    raise NotHere("this torch has the module, and not the function")


def device_facts(it: Probes) -> str:
    told, (free, total) = torch.cuda.get_device_properties(it.device), torch.cuda.mem_get_info(it.device)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    sizes = f"{told.major}.{told.minor}, {told.multi_processor_count} processors, {memory}"
    return f"{told.name}, {sizes}, CUDA {torch.version.cuda}"


def megabytes(it: Probes) -> int:
    return it.counts.shared_mb << 20


def pageable_copies(it: Probes) -> Figures:
    return copies(it, torch.empty(megabytes(it), dtype=torch.uint8))


def pinned_copies(it: Probes) -> Figures:
    return copies(it, torch.empty(megabytes(it), dtype=torch.uint8, pin_memory=True))


def copies(it: Probes, host: Tensor) -> Figures:
    there = torch.empty_like(host, device=it.device)
    size = host.nbytes / 1e6
    to_device = it.ms(lambda: there.copy_(host, non_blocking=True))
    return {"GB/s there": size / to_device, "GB/s back": size / it.ms(lambda: host.copy_(there, non_blocking=True))}


def registered_memfd(it: Probes) -> Figures:
    from gpuinfer.models.pinned_memory import register

    number = os.memfd_create("probe")
    os.ftruncate(number, megabytes(it))
    shared = np.frombuffer(mmap.mmap(number, megabytes(it)), np.uint8)
    started = time.perf_counter()
    registration = register(shared, it.device)
    took = time.perf_counter() - started
    try:
        if not registration.pinned:
            raise NotHere("CUDA refuses to register it (ulimit -l)")
        memory = torch.from_numpy(shared)
        return {"ms to register": 1000 * took, "is pinned": float(memory.is_pinned()), **copies(it, memory)}
    finally:
        registration.close()
        os.close(number)


CAPTURED_S = 20.0  # how long a capture waits for what is done meanwhile


def during_a_capture(it: Probes, act: Callable[[Probes], object]) -> str:
    """What becomes of a capture in one thread and of what another does meanwhile."""
    capturing, done, told = threading.Event(), threading.Event(), list[str]()
    given = torch.ones(64, device=it.device)
    it.wait()

    def capture() -> None:
        stream = torch.cuda.Stream(it.device)
        try:
            with captured(stream, torch.cuda.graph_pool_handle()):
                found = given * 2
                capturing.set()
                done.wait(CAPTURED_S)
                found.add_(1)
        except Exception as error:  # noqa: BLE001 (which one is what is to be known)
            told.append(f"broke: {first_line(error)}")
        else:
            told.append("survived")
        finally:
            capturing.set()

    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait(CAPTURED_S)
    try:
        act(it)
        acted = "allowed"
    except RuntimeError as error:
        acted = f"refused: {first_line(error)}"
    finally:
        done.set()
        thread.join(CAPTURED_S)
    return f"{acted}; the capture {told[0] if told else 'has not ended'}"


def wait_for_stream(it: Probes) -> None:
    stream = torch.cuda.Stream(it.device)
    with torch.cuda.stream(stream):
        torch.zeros(64, device=it.device).add_(1)
    stream.synchronize()


def blocking_copy(it: Probes) -> None:
    stream = torch.cuda.Stream(it.device)
    with torch.cuda.stream(stream):
        torch.zeros(64, device=it.device).cpu()


def take_memory(it: Probes) -> None:
    stream = torch.cuda.Stream(it.device)
    with torch.cuda.stream(stream):
        torch.empty(64 << 20, dtype=torch.uint8, device=it.device)  # more than the allocator has lying there


def wait_for_all(it: Probes) -> None:
    torch.cuda.synchronize(it.device)


def after_a_failed_capture(it: Probes) -> str:
    """Whether the allocator gives memory back, and whether another capture is possible, after one that failed."""
    given = torch.ones(64, device=it.device)
    it.wait()
    failure = capture_of(it, lambda: given.sum().item())
    held = torch.empty(256 << 20, dtype=torch.uint8, device=it.device)
    before = torch.cuda.memory_reserved(it.device)
    del held
    try:
        torch.cuda.empty_cache()
        freed = f"{(before - torch.cuda.memory_reserved(it.device)) / 2**20:.0f} of 256 MiB given back"
    except RuntimeError as error:
        freed = f"empty_cache fails: {first_line(error)}"
    return f"{failure}; {freed}; another capture: {capture_of(it, lambda: given * 2)}"


def capture_of(it: Probes, work: Callable[[], object]) -> str:
    try:
        with captured(torch.cuda.Stream(it.device), torch.cuda.graph_pool_handle()):
            work()
    except RuntimeError as error:
        return f"fails ({first_line(error)[:80]})"
    return "works"


# Attention

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(it: Probes) -> None:
    """torch's kernels one by one, first call and 20th; then ours against the fastest of them."""
    rows, heads, sharing, values, reach = it.counts.attention
    queries = it.random(rows, heads * sharing, 1, values)
    keys, mixed = (it.random(rows, heads, reach, values) for _ in range(2))
    mask = torch.zeros(rows, 1, 1, reach, device=it.device, dtype=it.dtype)
    best: list[float] = []  # milliseconds of a call in a row

    def decode(given: Tensor | None) -> Figures:
        def work() -> Tensor:
            return scaled_dot_product_attention(queries, keys, mixed, attn_mask=given, enable_gqa=True)

        found = unless_refused(calls, it, work)
        best.append(found["ms in a row"] or 0.0)
        return found

    it.attempt("decode, as torch chooses", decode, None)
    it.attempt("decode with a mask, as torch chooses", decode, mask)
    it.attempt("ragged prompts, as torch chooses", ragged, it)
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            it.attempt(f"decode, {name}", decode, None, cuda=name != "math")
            it.attempt(f"decode with a mask, {name}", decode, mask, cuda=name != "math")
    it.attempt("ours: one layer, and a kernel alone", our_attention, it, best, cuda=True)
    it.attempt("ragged prompts, as a decoder has torch choose", ragged, it, cuda=True)
    it.attempt("varlen_attn, decode", varlen_decode, it, cuda=True)
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            it.attempt(f"ragged prompts, {name}", unless_refused, ragged, it, cuda=name != "math")


def unless_refused(measured: Callable[..., Figures], *given: Any) -> Figures:
    """What it measures; a kernel that does not take these shapes is no failure."""
    try:
        return measured(*given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotHere(f"refused: {first_line(error)}") from None


def calls(it: Probes, work: Callable[[], object]) -> dict[str, float]:
    first = it.first_ms(work)
    for _ in range(18):
        work()
    return {"first ms": first, "20th ms": it.first_ms(work), "ms in a row": it.ms(work)}


def ragged(it: Probes) -> Figures:
    """Prompts of 20 lengths, one after another, and all of them once more."""
    _, heads, sharing, values, _ = it.counts.attention
    lengths = np.random.default_rng(0).permutation(np.arange(*it.counts.prompts))[:20].tolist()
    given = [(it.random(1, heads * sharing, n, values), it.random(1, heads, n, values)) for n in lengths]

    def prompt(queries: Tensor, keys: Tensor) -> Tensor:
        return scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)

    def each() -> list[float]:
        return [it.first_ms(partial(prompt, *one)) for one in given]

    new, seen = each(), each()
    return {"first ms": new[0], "ms of a new length": statistics.median(new[1:]), "ms seen": statistics.median(seen)}


def varlen_decode(it: Probes) -> Figures:
    """Decoding from pages of a room each, where this torch's function takes a table of pages."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise NotHere("this torch has none") from None
    wanted = {"seqused_k", "block_table", "enable_gqa"}
    if lacks := wanted - inspect.signature(varlen_attn).parameters.keys():
        raise NotHere(f"it does not take {', '.join(sorted(lacks))}")
    rows, heads, sharing, values, reach = it.counts.attention
    queries = it.random(rows, heads * sharing, values)
    keys, mixed = (it.random(rows, reach, heads, values) for _ in range(2))
    numbers = torch.arange(rows + 1, device=it.device, dtype=torch.int32)
    ends = torch.full((rows,), reach, device=it.device, dtype=torch.int32)
    more: dict[str, Any] = {"seqused_k": ends, "block_table": numbers[:-1, None].contiguous(), "enable_gqa": True}

    def work() -> object:
        return varlen_attn(queries, keys, mixed, numbers, None, 1, reach, **more)

    return unless_refused(calls, it, work)


def our_attention(it: Probes, best: Sequence[float]) -> Figures:
    """A layer's step by our kernels and by torch's, and our attention alone over the fastest of torch's."""
    from gpuinfer.text.decoder import triton_layers
    from gpuinfer.text.decoder.torch_decoder import TorchDecoder
    from gpuinfer.text.decoder.triton_layers import TritonLayers

    if not triton_layers.has_triton():
        raise NotHere("there is no Triton")
    rows, heads, sharing, values, reach = it.counts.attention
    shape = replace(
        SMALL, hidden=1024, intermediate=1024, layers=1, heads=heads * sharing, kv_heads=heads, head_dim=values,
        positions=2 * reach, rope=Rope(tuple(0.9**i for i in range(values // 2))),
    )  # fmt: skip
    weights, figures = weights_of(shape, it), dict[str, float]()
    columns = reach // PAGE
    step = decoding(rows, columns, reach - 1)
    for name, kernels in {"ours": True, "torch's": False}.items():
        started = time.perf_counter()
        decoder = TorchDecoder(
            shape, weights, it.device, it.dtype, slots=rows, pages=rows * columns, length=reach, kernels=kernels
        )
        figures[f"{name}: s to open"] = time.perf_counter() - started
        if isinstance(decoder._layers, TritonLayers) is not kernels:
            raise NotHere("our kernels do not answer as torch's do: see the log")
        forward = partial(decoder.forward, step)
        figures[f"{name}: first ms"] = it.first_ms(forward)
        figures[f"{name}: ms a step"] = it.ms(forward)
        if kernels:
            given = it.random(rows, heads * sharing, values), decoder._batch(step), decoder._cache, 0
            alone = it.ms(partial(decoder._layers.attend, *given))
            figures["ours alone: ms"] = alone
            if best:
                figures["ours ÷ the fastest of torch's"] = alone / min(best)
        decoder.close()
    return figures


def weights_of(shape: Shape, it: Probes) -> Weights:
    """Random ones, made on the device."""
    made = torch.Generator(device=it.device).manual_seed(0)

    def linear(out: int, inner: int) -> Linear:
        drawn = torch.randn((out, inner), generator=made, device=it.device, dtype=it.dtype)
        return Linear(drawn.mul_(inner**-0.5))

    def norm() -> Norm:
        return Norm(torch.ones(shape.hidden, device=it.device))

    def layer() -> Layer:
        qkv = linear((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden)
        out = linear(shape.hidden, shape.heads * shape.head_dim)
        return Layer(
            norm(),
            qkv,
            out,
            norm(),
            linear(2 * shape.intermediate, shape.hidden),
            linear(shape.hidden, shape.intermediate),
        )

    embedding = linear(shape.vocabulary, shape.hidden)
    return Weights(embedding.weight, tuple(layer() for _ in range(shape.layers)), norm(), embedding)


def decoding(rows: int, columns: int, at: int) -> Step:
    """A token each of so many rows, at position `at`."""
    numbers = np.arange(rows, dtype=np.int32)
    return Step(
        tokens=numbers % 256,
        pages=np.arange(rows * columns, dtype=np.int32).reshape(rows, columns),
        starts=np.full(rows, at, np.int32),
        lengths=np.ones(rows, np.int32),
        wanted=numbers,
    )


# Prefixes that rows share


def prefixes(it: Probes) -> None:
    """Decode steps of samples of some prompts, and of rows that share nothing: where shared keys and values are read
    once, and where each row reads its own.
    """
    weights = weights_of(it.counts.text, it)
    steps = {"samples": sampling_step(it, True), "nothing shared": sampling_step(it, False)}
    answers = dict[str, list[Tensor]]()
    for way, share in {"together": True, "each row by itself": False}.items():
        it.attempt(way, prefix_steps, it, weights, steps, share, answers.setdefault(way, []))
    for case, *both in zip(steps, *answers.values(), strict=False):
        it.add(f"{case}, both ways", compared(*(one.float().cpu().numpy() for one in both)))


def sampling_step(it: Probes, shared: bool) -> Step:
    rows, samples, prompt, answer = it.counts.prefixes
    step = decoding(rows, (prompt + answer) // PAGE, prompt + answer - 1)
    if shared:
        firsts = step.pages[::samples, : prompt // PAGE]
        step.pages[:, : prompt // PAGE] = np.repeat(firsts, samples, axis=0)
    return step


def prefix_steps(
    it: Probes, weights: Weights, steps: Mapping[str, Step], share: bool, answers: list[Tensor]
) -> Figures:
    """Over random keys and values. `answers`: where the logits of each step go."""
    from gpuinfer.text.decoder.torch_decoder import TorchDecoder

    pages, figures = next(iter(steps.values())).pages, dict[str, float | None]()
    decoder = TorchDecoder(
        it.counts.text, weights, it.device, it.dtype, slots=len(pages), pages=pages.size, length=pages.shape[1] * PAGE,
        share=share,
    )  # fmt: skip
    made = torch.Generator(device=it.device).manual_seed(0)
    for held in (*decoder._cache.keys, *decoder._cache.values):
        held.normal_(generator=made)
    for case, step in steps.items():
        figures[f"{case}: ms a step"] = it.ms(partial(decoder.forward, step), 1.0)
        answers.append(decoder.forward(step).clone())
        started = time.perf_counter()
        if (plan := decoder._static.shared_by(replace(step, pages=step.pages.copy()), len(pages))) is not None:
            figures[f"{case}: ms to plan"] = 1000 * (time.perf_counter() - started)
            sees = (step.starts + 1).astype(np.int64)
            figures[f"{case}: share of positions read"] = plan.positions_read(sees) / int(sees.sum())
    decoder.close()
    return figures


# Rows


def blobnet(it: Probes) -> None:
    """The bare network at the largest batch first, eager and as a graph; then with the copies around it."""
    from gpuinfer.models import roofline_measurement
    from gpuinfer.models.load import build

    spec = spec_of(it)
    module = build(spec, device=it.device, dtype=it.dtype, seed=0)
    inputs = torch.ones(max(it.counts.rows), spec.inputs, dtype=it.dtype, device=it.device)

    def eager(rows: int) -> Figures:
        with torch.inference_mode():
            took = it.ms(partial(module, inputs[:rows]))
        return {"ms": took, "M rows/s": rows / took / 1000}

    def graph(rows: int, streams: int) -> Figures:
        rate = roofline_measurement.sustained(roofline_measurement.cuda_looks(module, inputs[:rows], streams, 1.0))
        return {"ms": 1000 * rows / rate, "M rows/s": rate / 1e6}

    for rows in it.counts.rows:
        it.attempt(f"{rows:,} rows, a graph", graph, rows, 1, cuda=True)
        it.attempt(f"{rows:,} rows, eager", eager, rows)
        if rows == it.counts.rows[0]:
            it.attempt(f"{rows:,} rows, a graph on each of two streams", graph, rows, 2, cuda=True)
            with torch.inference_mode():
                it.profile("one forward", partial(module, inputs), 3)
    for rows in (it.counts.rows[0], it.counts.rows[-2]):
        it.attempt(f"{rows:,} rows with copies", with_copies, it, module, spec, rows)
        it.attempt(f"{rows:,} rows in blocks of {CLIENTS} clients", in_blocks, it, module, spec, rows, cuda=True)


def spec_of(it: Probes) -> ModelSpec:
    name = "blobnet" if it.cuda else "blobnet-small"
    return ModelSpec(name, None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})


def forward_of(
    it: Probes, module: torch.nn.Module, spec: ModelSpec, rows: int, fixed: bool = False
) -> Callable[..., Any]:
    from gpuinfer.models.forward_cpu import CpuForward
    from gpuinfer.models.forward_cuda import CudaForward

    if not it.cuda:
        return CpuForward(module, it.dtype, rows, fixed_shape=fixed)
    return CudaForward(module, spec, device=it.device, dtype=it.dtype, chunk_rows=rows, fixed_shape=fixed)


def with_copies(it: Probes, module: torch.nn.Module, spec: ModelSpec, rows: int) -> Figures:
    given, started = positions(rows), time.perf_counter()
    forward = forward_of(it, module, spec, rows)
    opened = time.perf_counter() - started
    took = it.ms(partial(forward, [given]))
    return {"ms": took, "M rows/s": rows / took / 1000, "s to open": opened}


def in_blocks(it: Probes, module: torch.nn.Module, spec: ModelSpec, rows: int) -> Figures:
    """As the central server: rows are fetched from pinned blocks of shared memory, and answers written there."""
    from gpuinfer.central.blocks import Block, BlockForm
    from gpuinfer.models.pinned_memory import register
    from gpuinfer.models.row_format import AnswerLayout

    forward: Any = forward_of(it, module, spec, rows)
    each, calls = rows // CLIENTS, 10
    form = BlockForm(spec, AnswerLayout("tuple", ((ACTIONS,), (SEATS,))))
    blocks = [Block(number, each, mmap.mmap(-1, form.size(each)), form) for number in range(CLIENTS)]
    for block in blocks:
        block.rows[:] = positions(each)
        block.pin = register(block.memory, it.device)
    work = partial(forward.write, [block.rows for block in blocks], [block.answers for block in blocks])
    sound, took = all(work()), it.ms(work)
    started = time.process_time()
    for _ in range(calls):
        work()
    core_ms = 1000 * (time.process_time() - started) / calls
    for block in blocks:
        block.let_go()
    return {"ms": took, "M rows/s": rows / took / 1000, "ms of a core": core_ms, "is sound": float(sound)}


# Rows of any shape


def batcher(it: Probes) -> None:
    """`gpuinfer.Batcher` on the 4.9 M network and on a small convolution network, with so many rows outstanding, on the
    host or on the device; beside the bare model on batches of as many.
    """
    for name, (model, row) in models_of_rows().items():
        for callers in it.counts.callers:
            bare: list[float] = []
            it.attempt(f"{name}, {callers} rows: the bare model", bare_rate, it, model, row, callers, bare)
            for where, place in {"host": torch.device("cpu"), "device": it.device}.items():
                case = f"{name}, {callers} rows outstanding on the {where}"
                it.attempt(case, asked, it, model, row.to(place), callers, bare, cuda=where == "device")


def models_of_rows() -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Modules and a row of each."""
    from gpuinfer.models.networks import BlobNet

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2), torch.nn.ReLU()]
    images = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10))
    return {"network": (BlobNet(480, 30, 4), torch.zeros(480)), "images": (images, torch.randn(3, 64, 64))}


def bare_rate(it: Probes, model: torch.nn.Module, row: Tensor, rows: int, rates: list[float]) -> Figures:
    """A batch that lies on the device, and one whose rows are stacked on the host, with copies both ways. The rate of
    the latter is added to `rates`.
    """
    from gpuinfer.models.model_object import LocalModel

    module = LocalModel(model).build(it.device, it.dtype)
    there = row.expand(rows, *row.shape).to(it.device, it.dtype)

    def with_stacking() -> list[Tensor]:
        answers = module(torch.stack([row] * rows).to(it.device, it.dtype))
        return [part.float().cpu() for part in (answers if isinstance(answers, tuple) else (answers,))]

    with torch.inference_mode():
        alone, stacked = it.ms(partial(module, there)), it.ms(with_stacking)
    rates.append(1000 * rows / stacked)
    return {"ms": alone, "rows/s": 1000 * rows / alone, "stacked and copied rows/s": rates[-1]}


def asked(it: Probes, model: torch.nn.Module, row: Tensor, callers: int, bare: Sequence[float]) -> Figures:
    import gpuinfer

    options: dict[str, Any] = {"devices": str(it.device), "dtype": it.dtype, "max_queue_rows": callers}
    with gpuinfer.Batcher(model, example=row, **options) as one:
        for _ in one.map([row] * callers):  # the first of each size is slower
            pass
        done, began = 0, time.perf_counter()
        for _ in one.map(takewhile(lambda _: time.perf_counter() - began < it.counts.asked_s, repeat(row))):
            done += 1
        rate = done / (time.perf_counter() - began)
        rows = one.report()["batches"]["rows_mean"]
    return {"rows/s": rate, "rows a batch": rows, "of the bare model": rate / bare[0] if bare else None}


def positions(rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 2, (rows, FEATURES), dtype=np.uint8)


# Text


def text(it: Probes) -> None:
    """A random model made on the device: steps alone, with drawing, and a generator at work; the most rows first."""
    weights = weights_of(it.counts.text, it)
    for rows in it.counts.text_rows:
        with opened(it, weights, rows) as decoder:
            steps = Decoding(it, decoder, rows)
            it.attempt(f"{rows} rows: a step", steps.forward_ms)
            for way, sampling in WAYS.items():
                it.attempt(f"{rows} rows: a step and {way}", steps.drawn_ms, sampling)
            if rows == it.counts.text_rows[0]:
                prompts = partial(decoder.forward, step := prompt_step(it, decoder))
                it.profile("20 decode steps", steps.drawn, 20)
                it.attempt("a prompt step", lambda: rate(it.ms(prompts), len(step.tokens)))  # noqa: B023 (at once)
                it.profile("5 prompt steps", prompts, 5)
            for way, sampling in WAYS.items():
                it.attempt(f"{rows} rows: a generator, {way}", generated, it, decoder, rows, sampling)


WAYS = {"greedy": Sampling(temperature=0), "top-p": Sampling(temperature=0.8, top_p=0.9)}


def rate(ms: float, rows: int) -> Figures:
    return {"ms": ms, "tokens/s": 1000 * rows / ms}


@contextmanager
def opened(it: Probes, weights: Weights, rows: int) -> Iterator[Any]:
    from gpuinfer.text.decoder.torch_decoder import TorchDecoder

    counts = it.counts
    started, pages = time.perf_counter(), rows * (counts.context // PAGE)
    decoder = TorchDecoder(
        counts.text, weights, it.device, it.dtype, slots=rows, pages=pages, length=counts.context, deterministic=False
    )
    kernels = {"our kernels": float(type(decoder._layers).__name__ == "TritonLayers")}
    it.add(f"{rows} rows: opened", {"seconds": time.perf_counter() - started, **kernels})
    try:
        yield decoder
    finally:
        decoder.close()


class Decoding:
    """Steps of one token of each row, always at the same position of rows that have begun: of one shape."""

    def __init__(self, it: Probes, decoder: Any, rows: int) -> None:
        self.it, self.decoder, self.rows = it, decoder, rows
        self._step = decoding(rows, it.counts.context // PAGE, it.counts.begun)

    def forward(self) -> Tensor:
        found: Tensor = self.decoder.forward(self._step)
        return found

    def forward_ms(self) -> Figures:
        return rate(self.it.ms(self.forward, 1.0), self.rows)

    def drawn_ms(self, sampling: Sampling) -> Figures:
        self._admit(sampling)
        return rate(self.it.ms(self.drawn, 1.0), self.rows)

    def drawn(self) -> object:
        """A step, and a token of each row as it was last asked for."""
        return self._sampler.draw(self.forward(), np.arange(self.rows, dtype=np.int32))

    def _admit(self, sampling: Sampling) -> None:
        from gpuinfer.text.sampling import Sampler

        vocabulary = self.decoder.shape.vocabulary
        self._sampler = Sampler(self.rows, vocabulary, self.it.device, seed=1, end_tokens=[0], threads=1)
        for slot in range(self.rows):
            self._sampler.admit(slot, sampling, np.arange(16, dtype=np.int32), "row", slot)


def prompt_step(it: Probes, decoder: Any) -> Step:
    """As many tokens of prompts as a step usually has, of ragged lengths."""
    shortest, longest = it.counts.prompts
    columns = it.counts.context // PAGE
    lengths = np.linspace(shortest, longest, min(4, decoder.slots)).astype(np.int32)
    return Step(
        tokens=np.arange(lengths.sum(), dtype=np.int32) % 256,
        pages=np.arange(len(lengths) * columns, dtype=np.int32).reshape(-1, columns),
        starts=np.zeros(len(lengths), np.int32),
        lengths=lengths,
        wanted=(np.cumsum(lengths) - 1).astype(np.int32),
    )


def generated(it: Probes, decoder: Any, rows: int, sampling: Sampling) -> Figures:
    """Twice as many prompts as rows, so that slots are filled again."""
    from gpuinfer.text.generator import Generator
    from gpuinfer.text.language.language import Language
    from gpuinfer.text.language.tokenizer import Bytes

    decoder.empty()
    vocabulary = decoder.shape.vocabulary
    generator = Generator(
        decoder, Language(Bytes(), vocabulary, (0,)), seed=1, end_tokens=(0,), step_tokens=2048, threads=1,
        deterministic=False,
    )  # fmt: skip
    dice = np.random.default_rng(0)
    asked = structs.replace(sampling, max_tokens=it.counts.answer, ignore_eos=True)
    longest = min(256, it.counts.context - it.counts.answer - 1)
    given = [
        Prompt(tokens=tuple(dice.integers(1, 256, dice.integers(8, longest)).tolist()), key=str(n), sampling=asked)
        for n in range(2 * rows)
    ]
    waiting = list(enumerate(generator.prepare(given)))
    if failures := [one for _, one in waiting if isinstance(one, Exception)]:
        raise failures[0]
    it.wait()
    started, finished = time.perf_counter(), 0
    while (waiting or generator.busy) and it.left > -5:
        while waiting and generator.free_slots:
            generator.add(*waiting.pop(0))  # type: ignore[arg-type]
        finished += len(generator.step().finished)
    took = time.perf_counter() - started
    return {"output tokens/s": finished * it.counts.answer / took, "answers": float(finished), "seconds": took}


# The same bits


def permuted(it: Probes) -> None:
    """Rows in another order within a batch: how many have the same bits, and how far apart the others are."""
    from gpuinfer.models.load import build

    spec, rows = spec_of(it), it.counts.permuted
    module = build(spec, device=it.device, dtype=it.dtype, seed=0)
    for case, fixed in (("rows of a fixed shape", True), ("rows as they come", False)):
        it.attempt(f"{case}, {rows:,}", alike, it, module, spec, rows, fixed)
    shape = it.counts.text
    layers = min(2, shape.layers)
    shape = replace(shape, layers=layers)
    weights = weights_of(shape, it)
    for case, deterministic in (("text, --deterministic", True), ("text", False)):
        it.attempt(case, alike_text, it, shape, weights, deterministic)


def alike(it: Probes, module: torch.nn.Module, spec: ModelSpec, rows: int, fixed: bool) -> Figures:
    forward = forward_of(it, module, spec, rows, fixed)
    given, order = positions(rows), np.random.default_rng(1).permutation(rows)
    straight, turned = (np.concatenate(forward([one])[0], axis=1) for one in (given, given[order]))
    return compared(straight[order], turned)


def compared(wanted: Any, found: Any) -> Figures:
    apart = np.subtract(wanted, found, out=np.zeros_like(wanted), where=wanted != found)  # -inf is -inf
    return {
        "share of the same bits": float((wanted == found).all(axis=1).mean()),
        "largest difference": float(np.abs(apart).max()),
    }


def alike_text(it: Probes, shape: Shape, weights: Weights, deterministic: bool) -> Figures:
    from gpuinfer.text.decoder.torch_decoder import TorchDecoder

    rows = max(it.counts.text_rows)
    columns = 2
    decoder = TorchDecoder(
        shape, weights, it.device, it.dtype, slots=rows, pages=rows * columns, length=columns * PAGE,
        deterministic=deterministic,
    )  # fmt: skip
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    found = list[Any]()
    for turn in (np.arange(rows, dtype=np.int32), order):
        decoder.empty()
        for at in range(3):
            step = decoding(rows, columns, at)
            step = replace(step, tokens=step.tokens[turn], pages=np.ascontiguousarray(step.pages[turn]))
            logits = decoder.forward(step).float().cpu().numpy().copy()
        found.append(logits)
    decoder.close()
    return compared(found[0][order], found[1])


PARTS: dict[str, Callable[[Probes], None]] = {
    "versions": versions,
    "failed-capture": failed_capture,  # of which versions starts a process
    "attention": attention,
    "blobnet": blobnet,
    "batcher": batcher,
    "text": text,
    "permuted": permuted,
    "prefixes": prefixes,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--file", type=Path, required=True, help="a JSON object a line is added to it for each finding")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further probe is begun")
    own = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if own.device == "cuda" else torch.device(own.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: look at `gpuinfer doctor`.")
    counts = ON_CPU if device.type == "cpu" else ON_CUDA
    it = Probes(own.part, device, getattr(torch, own.dtype), counts, own.file, own.seconds)
    if it.cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # small counts: others may have the cores
    PARTS[own.part](it)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # at once: after a capture that failed, and where importing a module has started processes
