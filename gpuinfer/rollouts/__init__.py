"""Rollouts for training: environments, the record of what was played, and what trainers read of it."""

from gpuinfer.rollouts.files.reader import header, read

__all__ = ["header", "read"]
