"""The machine, the versions, the plugins: what would run here and what would not, and why.

Whatever might crash or hang runs in a child process with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import typer

from gpuinfer.cli.plugin_probe import inspect_all
from gpuinfer.cli.problems import FAILED
from gpuinfer.config import registry, settings
from gpuinfer.errors import UsageError
from gpuinfer.host import children, extras, installation, machine
from gpuinfer.units import number

PROBE_S = 90.0  # torch's first import from a cold disk
DRIVER_S = 20.0

PROBE = """
import importlib.util, json, mmap, os, shutil, sys, sysconfig, torch
gpus, there = [], torch.cuda.is_available()
for index in range(torch.cuda.device_count() if there else 0):
    properties = torch.cuda.get_device_properties(index)
    capability = [properties.major, properties.minor]
    gpus.append({"name": properties.name, "capability": capability, "total": properties.total_memory})
    try:
        gpus[-1]["free"] = torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:
        gpus[-1]["trouble"] = str(error).strip().split("\\n")[0]
found = {"cuda": torch.version.cuda, "gpus": gpus, "cpu": torch.backends.cpu.get_cpu_capability()}
if gpus:
    spec = importlib.util.find_spec("triton")
    found["triton"] = spec is not None and spec.origin is not None
    named = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
    headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
    found["triton_lacks"] = "" if named and headers else "Python's headers" if named else "a C compiler"
    found["kernels_for"] = torch.cuda.get_arch_list()
    kinds = {"flash": "flash", "mem_efficient": "memory-efficient", "math": "plain"}
    found["attention"] = [kinds[kind] for kind in kinds if getattr(torch.backends.cuda, kind + "_sdp_enabled")()]
    try:
        import pynvml
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        found["driver"] = driver.decode() if isinstance(driver, bytes) else driver
        newest = pynvml.nvmlSystemGetCudaDriverVersion()
        found["driver_cuda"] = f"{newest // 1000}.{newest % 1000 // 10}"
    except Exception as error:
        found["nvml"] = f"{type(error).__name__}: {error}"
    try:
        number = os.memfd_create("gpuinfer")  # as blocks of rows are shared between processes
        os.ftruncate(number, 1 << 20)
        memory = torch.frombuffer(mmap.mmap(number, 1 << 20), dtype=torch.uint8)
        torch.cuda.init()
        found["registers"] = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 1)) == 0
    except (AttributeError, OSError, RuntimeError) as error:
        found["registers"], found["unregistered"] = False, str(error).strip().split("\\n")[0]
print(json.dumps(found), flush=True)
os._exit(0)  # the memory is still registered
"""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing looked at. One that is not ok and not serious is a fact of this machine, such as no GPU."""

    name: str
    value: str
    remark: str = ""
    ok: bool = True
    serious: bool = True


def examine_machine() -> Iterator[tuple[str, list[Fact]]]:
    """Title and findings, part by part, as they become known."""
    yield "machine", [*_processor(), *_memory()]
    torch = probe_torch()
    yield "versions", list(_versions(torch))
    yield f"extras, each by {extras.install_command('NAME')}", list(_extras())
    yield "devices", list(_devices(torch))
    yield "places", [_cache_folder()]
    settings_found, plugins = _settings(), list(_plugins())
    yield "plugins", [settings_found, *plugins]
    yield "would run", list(_runs(torch, plugins))


def probe_torch(code: str = PROBE, limit_s: float = PROBE_S) -> dict[str, Any]:
    """What torch sees, from a child process, which a broken driver may crash or hang. `{"error": …}` when it fails."""
    child = children.run_program([sys.executable, "-c", code], limit_s)
    if child.code is None:
        return {"error": f"importing it took over {limit_s:.0f} s. Try again, or reinstall torch."}
    if child.code:
        last = child.last_words if child.err.strip() else f"the process ended with {child.code}"
        return {"error": f"{last}. Reinstall torch (pip install --force-reinstall torch)."}
    answer = (child.out.decode("utf-8", "replace").splitlines() or ["no answer"])[-1]
    try:
        found: dict[str, Any] = json.loads(answer)
    except json.JSONDecodeError:
        return {"error": f"asked for its devices, it answered: {answer}. Reinstall torch."}
    return found


def _processor() -> Iterator[Fact]:
    usable, all_of_them = machine.cores(), os.cpu_count() or 1
    limited = f"of {all_of_them}: affinity or the control group's quota" if usable < all_of_them else ""
    yield Fact("processor", processor_name())
    yield Fact("cores to use", str(usable), limited)


def processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> Iterator[Fact]:
    memory = psutil.virtual_memory()
    yield Fact("memory", f"{number(memory.available)}B free of {number(memory.total)}B")


def _versions(torch: Mapping[str, Any]) -> Iterator[Fact]:
    if (ours := installation.one_file()) is not None:
        yield Fact("one file", str(ours), f"unpacked in {sys.base_prefix}")
    yield Fact("python", platform.python_version(), sys.executable)
    for package in ("gpuinfer", "torch", "numba", "numpy"):
        try:
            remark, ok = "", True
            if package == "torch" and "error" in torch:
                remark, ok = str(torch["error"]), False
            elif package == "torch":
                build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
                remark = f"{build}; {torch['cpu']} kernels"
            yield Fact(package, version(package), remark, ok)
        except PackageNotFoundError:
            yield Fact(package, "not installed", f"pip install {package}", ok=False)


def _extras() -> Iterator[Fact]:
    for name, extra in extras.EXTRAS.items():
        there = not extras.missing_modules(name)
        yield Fact(name, "installed" if there else "not installed", extra.purpose, ok=there, serious=False)


def _devices(torch: Mapping[str, Any]) -> Iterator[Fact]:
    works = "error" not in torch
    yield Fact("cpu", "ready" if works else "torch does not work", ok=works)
    for index, gpu in enumerate(torch.get("gpus", ())):
        yield _gpu(index, gpu, torch.get("kernels_for", ()))
    if not torch.get("gpus"):
        yield Fact("cuda", "none", _why_no_cuda(torch), ok=False, serious=False)
        return
    if "nvml" in torch:
        reason = f"{torch['nvml']}: other programs on the device are not seen. Run: {extras.install_command('nvml')}"
        yield Fact("driver", "not asked", reason, ok=False, serious=False)
    else:
        newest = f"for CUDA {torch['driver_cuda']} and before" if torch.get("driver_cuda") else ""
        yield Fact("driver", str(torch.get("driver", "")), newest)
    lacks = ""
    if not torch.get("triton"):
        lacks = "Triton is missing, and decoding is slower: pip install triton"
    elif missing := torch.get("triton_lacks"):
        lacks = f"Triton is there and lacks {missing}, and decoding is slower: install gcc and python3-dev, or set CC"
    yield Fact(
        "layers of text",
        "torch's kernels" if lacks else "our own kernels, in Triton",
        lacks,
        ok=not lacks,
        serious=False,
    )
    yield _attention(torch, own=not lacks)
    registers = bool(torch.get("registers"))
    why = torch.get("unregistered") or "ulimit -l"
    lacks = "" if registers else f"memory cannot be registered ({why}): rows of other processes are copied"
    yield Fact("shared memory", "read by the device" if registers else "copied", lacks, ok=registers, serious=False)


BFLOAT16_FROM = 8  # major compute capability; so too torch's flash attention
SHORT = 0.2  # of a device's memory: with less of it free, it is short


def _gpu(index: int, gpu: Mapping[str, Any], kernels_for: Sequence[str]) -> Fact:
    """A device, and what makes it slow or unusable."""
    major, minor = gpu["capability"]
    facts = [f"compute capability {major}.{minor}"]
    if "free" not in gpu:
        return Fact(f"cuda:{index}", str(gpu["name"]), f"cannot be used: {gpu['trouble']}", ok=False, serious=False)
    facts.append(f"{number(gpu['free'])}B free of {number(gpu['total'])}B")
    slow = []
    if kernels_for and not runs_on(major, minor, kernels_for):
        slow.append(
            f"this torch has no kernels for it, only for {', '.join(kernels_for)}: install another build of torch"
        )
    if major < BFLOAT16_FROM:
        slow.append("before 8.0 bfloat16 is emulated, and slow: take --dtype float16")
    if gpu["free"] < SHORT * gpu["total"]:
        slow.append("other programs have most of its memory: batches are smaller. nvidia-smi names them")
    return Fact(f"cuda:{index}", str(gpu["name"]), "; ".join([", ".join(facts), *slow]), ok=not slow, serious=False)


def runs_on(major: int, minor: int, kernels_for: Sequence[str]) -> bool:
    """Whether a device of this capability runs code that was compiled for these, as `torch.cuda.get_arch_list` names
    them: `sm_90` and `sm_100f` machine code runs on later devices of the same first number, `sm_90a` on 9.0 alone;
    `compute_90` is compiled for any later. True for names of other makers' devices, `gfx942`.
    """
    known = [one.partition("_") for one in kernels_for if one.startswith(("sm_", "compute_"))]
    for kind, _, digits in known:
        number = digits.rstrip("af")
        of = int(number[:-1]), int(number[-1])
        later = (major, minor) >= of and not digits.endswith("a")
        if (major, minor) == of or (later and (kind == "compute" or major == of[0])):
            return True
    return not known


def _attention(torch: Mapping[str, Any], own: bool) -> Fact:
    """Which kernel decoders attend with, on the least of the devices."""
    if own:
        return Fact("attention", "our own kernel", "over the pages of the cache; nothing is padded")
    kinds = list(torch.get("attention", ()))
    if min(gpu["capability"][0] for gpu in torch["gpus"]) < BFLOAT16_FROM:
        kinds = [kind for kind in kinds if kind != "flash"]
    slow = "rows are padded to the longest of a step, which costs most where lengths differ"
    if kinds == ["plain"] or not kinds:
        slow = "neither flash nor memory-efficient attention is allowed: scores of all positions are written to memory"
    return Fact("attention", f"torch's: {' or '.join(kinds) or 'none'}", slow, ok=False, serious=False)


def _why_no_cuda(torch: Mapping[str, Any]) -> str:
    seen = nvidia_smi()
    if not seen:
        return "the NVIDIA driver reports no GPU"
    if "error" in torch:
        return f"the driver reports {seen}, and torch does not work"
    if not torch["cuda"]:
        return f"the driver reports {seen}, but this torch was built without CUDA: install a CUDA build of torch"
    return f"the driver reports {seen}, but torch cannot use it: look at CUDA_VISIBLE_DEVICES and the driver's version"


def nvidia_smi() -> str:
    """The GPUs that the driver names; empty when there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        child = children.run_program(query, DRIVER_S)
    except OSError:
        return ""
    return ", ".join(child.out.decode("utf-8", "replace").split("\n")).strip(", ") if child.code == 0 else ""


def _cache_folder() -> Fact:
    """Where compiled kernels are kept."""
    folder = installation.user_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Fact("cache", str(folder), "writable")
    except OSError as error:
        cure = "Set XDG_CACHE_HOME to a folder of yours."
        return Fact("cache", str(folder), f"{error.strerror}: compiled kernels will not last. {cure}", ok=False)


def _settings() -> Fact:
    try:
        merged = settings.load()
    except UsageError as error:
        return Fact("settings", "cannot be used", str(error), ok=False)
    absent = registry.unknown_of(merged.common.disabled_plugins)
    remark = f"disabled_plugins names {', '.join(absent)}, which is not installed" if absent else ""
    return Fact("settings", str(merged.file or "no gpuinfer.toml here"), remark)


def _plugins() -> Iterator[Fact]:
    for record in inspect_all(registry.listing()):
        off = record.reason.startswith(("switched off", registry.LACKS))
        name = f"{registry.KINDS[record.kind]} {record.name}"
        yield Fact(name, record.package, record.reason, ok=bool(record.ok) and not off, serious=not off)


def _runs(torch: Mapping[str, Any], plugins: list[Fact]) -> Iterator[Fact]:
    broken = {finding.name for finding in plugins if not finding.ok}
    for name in sorted({record.name for record in registry.listing("workloads")}):
        loads = f"workload {name}" not in broken
        cpu = loads and "error" not in torch
        why = "torch does not work" if loads else "the plugin cannot be used"
        yield Fact(f"{name} --device cpu", "yes" if cpu else "no", "" if cpu else why, ok=cpu)
        cuda = cpu and bool(torch.get("gpus"))
        reason = "" if cuda else _why_no_cuda(torch) if loads else why
        yield Fact(f"{name} --device cuda", "yes" if cuda else "no", reason, ok=cuda, serious=False)


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command("doctor")
def doctor() -> None:
    """The machine, the versions, the plugins: what would run here and what would not, and why.

    Exits 1 when something is broken.
    """
    from gpuinfer.cli.screen.display import facts

    healthy = True
    for title, findings in examine_machine():
        facts(title, [(f"  {_mark(finding)} {finding.name}", finding.value, finding.remark) for finding in findings])
        healthy = healthy and all(finding.ok or not finding.serious for finding in findings)
    if not healthy:
        raise typer.Exit(FAILED)


def _mark(finding: Fact) -> str:
    return "✓" if finding.ok else "✗" if finding.serious else "–"
