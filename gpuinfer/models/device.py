"""Devices and number formats by name, as a user writes them; a device's utilisation, its memory, and other processes on
it (NVML).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from gpuinfer.api import Setup
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host.machine import memory_available
from gpuinfer.host.process_memory import resident_bytes, return_free_memory
from gpuinfer.models.cuda_graphs import release_cached_memory
from gpuinfer.models.model_options import EVERY, check_names, index_of, mixed, named_twice
from gpuinfer.models.processor import cpu_name

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process that holds memory of the device."""

    pid: int
    name: str  # empty if unknown
    mb: float | None  # MiB; None where the driver does not report it, as on some virtual machines


def handle_of(device: torch.device) -> Any:
    """NVML's handle of a CUDA device, found by UUID: torch counts only the devices in CUDA_VISIBLE_DEVICES, NVML counts
    all. Raises whatever NVML raises: absent, too old, no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def other_processes(device: torch.device) -> list[OtherProcess]:
    """Other processes on a CUDA device, the largest first; empty for a CPU and without a working NVML.

    Empty too in a container in which NVML reports the host's process numbers: this process would be among them.
    """
    if device.type != "cuda":
        return []
    try:
        import pynvml

        handle = handle_of(device)
        held: dict[int, float | None] = {}
        for listed in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            for one in listed(handle):
                size = None if one.usedGpuMemory is None else one.usedGpuMemory / MEGABYTE
                held[one.pid] = size if held.get(one.pid) is None else held[one.pid]
    except Exception:  # noqa: BLE001 (absent, too old, no rights, no driver: nobody is seen)
        return []
    if os.getpid() not in held and torch.cuda.memory_reserved(device):
        return []
    strangers = []
    for pid, mb in held.items():
        name = ""
        with contextlib.suppress(psutil.Error):  # ended, or this container has other process numbers
            name = str(psutil.Process(pid).name())
        if pid != os.getpid():
            strangers.append(OtherProcess(pid, name, mb))
    return sorted(strangers, key=lambda one: (-(one.mb or 0.0), one.pid))


def merged_processes(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge `others` and `pids` of several devices' readings: what one process holds on each is added up."""
    pids = sorted({pid for reading in readings for pid in reading.get("pids", ())})
    found: dict[int, dict[str, Any]] = {}
    for one in (one for reading in readings for one in reading.get("others", ())):
        known = found.get(one["pid"])
        mb = one["mb"] if known is None or known["mb"] is None else known["mb"] + (one["mb"] or 0.0)
        found[one["pid"]] = {**one, "mb": mb}
    return {"others": list(found.values()), "pids": pids} if pids else {}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str) -> torch.dtype:
    """Raises `UnknownName`."""
    if name not in DTYPES:
        raise UnknownName("number format", name, DTYPES, label="Choices")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """One device: `auto` (the first CUDA device, else the CPU; so is `all`), `cpu`, `cuda` or `cuda:1`. Raises
    `UsageError`.
    """
    if name in ("auto", "all"):
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    number, count = index_of(name) or 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        state = "torch sees no CUDA device; `nvidia-smi` tells whether the driver does."
        if count:
            present = ", ".join(f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count))
            state = f"this machine has {present}."
        elif torch.version.cuda is None:
            state = f"torch {torch.__version__} is built without CUDA."
        raise UsageError(f"no device 'cuda:{number}': {state} Try --device {'cuda:0' if count else 'cpu'}.")
    return torch.device("cuda", number)


def resolve_devices(names: Sequence[str]) -> list[torch.device]:
    """Resolve `Setup.devices`: `cuda` and `all` are every CUDA device, `all` the CPU where there is none.

    Several `cpu` are stand-ins that share the cores. Raises `UsageError` for a device that does not exist, one that is
    named twice, and for CPU and CUDA together.
    """
    check_names(names)
    found: list[torch.device] = []
    for name in names:
        first = resolve_device(name)
        count = torch.cuda.device_count() if name in EVERY and first.type == "cuda" else 0
        found += [torch.device("cuda", number) for number in range(count)] or [first]
    if len({device.type for device in found}) > 1:
        raise mixed(names)
    twice = [device for place, device in enumerate(found) if device.type == "cuda" and device in found[:place]]
    if twice:
        raise named_twice(names, twice[0])
    return found


def device_labels(devices: Sequence[torch.device]) -> list[str]:
    """The label of each device: `cuda:1`; stand-ins on the CPU are `cpu:0`, `cpu:1`."""
    return [f"cpu:{place}" if device.type == "cpu" else str(device) for place, device in enumerate(devices)]


def setups_of(setup: Setup, devices: Sequence[torch.device]) -> list[Setup]:
    """The setup of each device's copy of the model. Stand-ins on the CPU share its cores as processes do."""
    return [
        replace(
            setup,
            devices=(str(device),),
            processes=setup.processes * (len(devices) if device.type == "cpu" else 1),
        )
        for device in devices
    ]


def merged_readings(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several devices' readings: memory is summed, utilisation averaged, other processes listed once."""
    names = Counter(str(reading["name"]) for reading in readings)
    summed = {key for reading in readings for key in reading if key.endswith("_mb")}
    transfers = [reading["transfers"] for reading in readings if reading.get("transfers")]
    busy = [reading["utilisation"] for reading in readings if reading.get("utilisation") is not None]
    return {
        "name": ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items()),
        **{key: sum(reading.get(key, 0.0) for reading in readings) for key in sorted(summed)},
        **({"utilisation": sum(busy) / len(busy)} if busy else {}),
        **({"transfers": {key: sum(one[key] for one in transfers) for key in transfers[0]}} if transfers else {}),
        **merged_processes(readings),
    }


def device_name(device: torch.device) -> str:
    """The product name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def free_bytes(devices: Sequence[torch.device]) -> int:
    """Bytes that can still be had of the fullest of these devices, by any program."""
    return min(
        int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_available() for device in devices
    )


def release_memory(devices: Sequence[torch.device], drop: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Give back what torch and the C library keep of freed memory, after `drop`: `freed_bytes`, which this process held
    before and does not hold now, and `free_bytes` of the fullest device afterwards.
    """
    before = _held_bytes(devices)
    drop()
    gc.collect()
    if any(device.type == "cuda" for device in devices):
        release_cached_memory()
    return_free_memory()
    return {"freed_bytes": max(0, before - _held_bytes(devices)), "free_bytes": free_bytes(devices)}


def _held_bytes(devices: Sequence[torch.device]) -> int:
    if devices[0].type != "cuda":
        return resident_bytes()
    return sum(int(torch.cuda.memory_reserved(device)) for device in dict.fromkeys(devices))


LOOK_S = 5.0  # between two queries of other processes


class Gauge:
    """Reads one device; cheap enough for several calls a second."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, device_name(device)
        self._handle: Any = None  # NVML's; None without a working NVML
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # absent, too old, no rights, no driver: the gauge does without
                import pynvml

                handle = handle_of(device)
                pynvml.nvmlDeviceGetUtilizationRates(handle)
                self._handle = handle
        self._others: list[dict[str, Any]] = []
        self._looked_at = -LOOK_S

    def read(self) -> Mapping[str, Any]:
        """`{name}`; on CUDA also the peaks allocated_mb (tensors) and reserved_mb (torch's allocator), and with NVML
        utilisation (0 to 1), `others` (pid, name and mb of other processes) and `pids` (this process, so that workers
        of one run do not count one another as strangers).
        """
        if self.device.type != "cuda":
            return {"name": self.name}
        reading: dict[str, Any] = {
            "name": self.name,
            "allocated_mb": torch.cuda.max_memory_allocated(self.device) / MEGABYTE,
            "reserved_mb": torch.cuda.max_memory_reserved(self.device) / MEGABYTE,
        }
        if self._handle is not None:
            import pynvml

            now = time.monotonic()
            if now - self._looked_at >= LOOK_S:
                self._others, self._looked_at = [asdict(one) for one in other_processes(self.device)], now
            utilisation = float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
            reading |= {"utilisation": utilisation, "others": self._others, "pids": [os.getpid()]}
        return reading
