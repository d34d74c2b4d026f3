"""Records on the disk: each group once, through whatever ends the run."""

from gpuinfer.rollouts.files.reader import header, read
from gpuinfer.rollouts.files.shards import encode as encode_group
from gpuinfer.rollouts.files.writer import GroupKeeper, Writer

__all__ = ["GroupKeeper", "Writer", "encode_group", "header", "read"]
