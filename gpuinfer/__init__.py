"""gpuinfer: a great many model answers from the accelerators you have."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer.central.server import CentralServer

__all__ = ["CentralServer", "__version__"]

try:
    __version__ = version("gpuinfer")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    """`gpuinfer.CentralServer` is imported when somebody asks for it: `gpuinfer --help` need not wait for NumPy."""
    if name != "CentralServer":
        raise AttributeError(f"module 'gpuinfer' has no attribute '{name}'. It offers {', '.join(__all__)}.")
    from gpuinfer.central.server import CentralServer

    return CentralServer
