"""Rollouts for training: environments, the record of what was played, and what trainers read of it."""

from gpuinfer.rollouts.files.reading import header, read

__all__ = ["header", "read"]
