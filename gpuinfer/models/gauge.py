"""How busy a device is and how much of its memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpuinfer.models.device import device_name

MEGABYTE = 1 << 20


class Gauge:
    """Reads one device. Cheap enough to be asked several times a second."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, device_name(device)
        self._utilisation = nvml_utilisation(device) if device.type == "cuda" else None

    def read(self) -> Mapping[str, Any]:
        """`{name}`, on CUDA with allocated_mb, reserved_mb and, where NVML is present, utilisation (0 to 1)."""
        if self.device.type != "cuda":
            return {"name": self.name}
        reading: dict[str, Any] = {
            "name": self.name,
            "allocated_mb": torch.cuda.max_memory_allocated(self.device) / MEGABYTE,
            "reserved_mb": torch.cuda.max_memory_reserved(self.device) / MEGABYTE,
        }
        if self._utilisation is not None:
            reading["utilisation"] = self._utilisation()
        return reading


def nvml_utilisation(device: torch.device) -> Callable[[], float] | None:
    """Reads the share of the last moments in which a kernel ran, 0 to 1; None without a working NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID: torch counts only the devices in CUDA_VISIBLE_DEVICES, NVML counts all.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except Exception:  # noqa: BLE001 (absent, too old, no rights, no driver: the gauge does without)
        return None
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
