"""gpuinfer: a great many model answers from the accelerators you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuinfer.central.server import CentralServer

    __version__: str

__all__ = ["CentralServer", "__version__"]


def __getattr__(name: str) -> Any:
    """Both are had when somebody asks for them: `gpuinfer --help` need not wait for NumPy, nor a worker process for the
    reading of packages' metadata.
    """
    if name == "__version__":
        return _version()
    if name != "CentralServer":
        raise AttributeError(f"module 'gpuinfer' has no attribute '{name}'. It offers {', '.join(__all__)}.")
    from gpuinfer.central.server import CentralServer

    return CentralServer


def __dir__() -> list[str]:
    """What completion offers: also what nobody has asked for yet."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("gpuinfer")
    except PackageNotFoundError:  # run from a checkout that was never installed
        found = "0.0.0"
    globals()["__version__"] = found  # the next to ask need not come here
    return found
