"""gpuinfer: a great many model answers from the accelerators you have."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gpuinfer")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"
