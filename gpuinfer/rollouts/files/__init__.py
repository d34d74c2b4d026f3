"""Records on the disk: each group once, through whatever ends the run."""

from gpuinfer.rollouts.files.reader import header, read
from gpuinfer.rollouts.files.writer import Writer

__all__ = ["Writer", "header", "read"]
