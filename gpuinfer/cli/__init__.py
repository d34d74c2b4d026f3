"""The command line: parse → settings → build → run → show."""

from gpuinfer.cli.app import main

__all__ = ["main"]
