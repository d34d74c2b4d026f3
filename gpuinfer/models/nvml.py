"""Who else is on a CUDA device, as the driver's management library (NVML) tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process that holds memory of the device."""

    pid: int
    name: str  # empty where the system does not tell
    mb: float | None  # MiB; None where the driver keeps it to itself, as on some virtual machines


def handle_of(device: torch.device) -> Any:
    """NVML's handle of a CUDA device. Raises whatever is wrong with NVML: absent, too old, no driver.

    By UUID: torch counts only the devices in CUDA_VISIBLE_DEVICES, NVML counts all.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def other_processes(device: torch.device) -> list[OtherProcess]:
    """Those on the device beside this one, the largest first; none where NVML is not at work, and none of a CPU.

    None either in a container where NVML counts processes as the machine outside does: this one would be among them.
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
    strangers = [OtherProcess(pid, _name_of(pid), mb) for pid, mb in held.items() if pid != os.getpid()]
    return sorted(strangers, key=lambda one: (-(one.mb or 0.0), one.pid))


def seen_together(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`others` and `pids` of several devices' readings as of one: what a process holds on each is added up."""
    pids = sorted({pid for reading in readings for pid in reading.get("pids", ())})
    found: dict[int, dict[str, Any]] = {}
    for one in (one for reading in readings for one in reading.get("others", ())):
        known = found.get(one["pid"])
        mb = one["mb"] if known is None or known["mb"] is None else known["mb"] + (one["mb"] or 0.0)
        found[one["pid"]] = {**one, "mb": mb}
    return {"others": list(found.values()), "pids": pids} if pids else {}


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # gone, or seen from within a container that has other numbers
        return ""
