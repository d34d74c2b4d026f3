"""What trackers have kept of runs, read back by their own readers, or by their formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path

WANDB_BLOCK, WANDB_HEADER = 32768, 7  # bytes, of LevelDB's log format, which .wandb files have
LAST_PIECES = (1, 4)  # kinds of pieces of a record: the whole of it, or its end


class TensorBoardRun:
    """The one run in a folder: `scalars` by name, [(step, value)]; `texts` by name."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [self.folder] = folder.iterdir()
        read = EventAccumulator(str(self.folder), size_guidance={"scalars": 0})
        read.Reload()
        tags = read.Tags()
        self.scalars = {name: [(one.step, one.value) for one in read.Scalars(name)] for name in tags["scalars"]}
        found = {name: read.Tensors(name)[0].tensor_proto.string_val for name in tags["tensors"]}
        self.texts = {name: one[0].decode() for name, one in found.items() if one}


def wandb_records(file: Path):
    """The records of a .wandb file, as wandb writes one offline."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), WANDB_HEADER, b""
    while at + WANDB_HEADER <= len(data):
        if (left := WANDB_BLOCK - at % WANDB_BLOCK) < WANDB_HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += WANDB_HEADER
        whole, at = whole + data[at : at + size], at + size
        if kind in LAST_PIECES:
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def values_of(items) -> dict[str, object]:
    """Of the items of a record: name → value."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
