"""Records as map-style datasets of PyTorch: positions of self-play, samples of rollouts.

from torch.utils.data import DataLoader
from gpuinfer.datasets import SelfPlayDataset

for batch in DataLoader(SelfPlayDataset("games"), batch_size=256, shuffle=True, num_workers=2): ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from gpuinfer.errors import UsageError
from gpuinfer.models.positions import ARRAYS, KEYS, readable, shards_of, sizes_of
from gpuinfer.models.record_shards import UNREADABLE, mapped_arrays
from gpuinfer.rollouts.export.samples import Sample, samples
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.record import Group

__all__ = ["RolloutsDataset", "SelfPlayDataset"]

FIELDS = (*ARRAYS, "player", *KEYS)
OPEN_SHARDS = 256  # mapped into memory at once; each takes a file descriptor

Files = str | Path | Sequence[str | Path]


class SelfPlayDataset(Dataset[dict[str, torch.Tensor]]):
    """Positions that self-play has recorded. One searched move an item: a dict of tensors.

        observation  [features], as the network saw it (uint8 or float32)    player  int8: the seat that moved
        legal        bool [actions]                                          game    int64: the game's number
        policy       float32 [actions]: shares of visits, sum 1              move    int16: moves made before it
        value        float32 [seats]: the game's returns, column k of the k-th seat after the one that moved

    `source`: a folder that `gpuinfer selfplay --out` wrote, several of one game, or some of their shards (`.npz`);
    `fields`: those of an item. Order is that of the files. Any item is read in microseconds: files are mapped into
    memory, not loaded, and loader processes share them. A run that goes on writes more: make another dataset for those.

    Raises `UsageError` for what holds no records of one game, and for a file that is damaged, at the latest when the
    first of its items is read.
    """

    def __init__(self, source: Files, fields: Sequence[str] = FIELDS) -> None:
        if odd := [name for name in fields if name not in FIELDS]:
            raise UsageError(f"records of self-play have no field '{odd[0]}'. Fields: {', '.join(FIELDS)}.")
        places = [Path(one) for one in ([source] if isinstance(source, str | Path) else source)]
        if not places:
            raise UsageError("no records are named. Give the folder that `gpuinfer selfplay --out` wrote.")
        self.fields = tuple(fields)
        self._shards = [shard for place in places for shard in _shards_of(place)]
        if folders := [place for place in places if place.is_dir()]:
            sizes_of(folders)
        self._ends = list(accumulate(len(readable(shard, ["game"])["game"]) for shard in self._shards))
        self._open: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._checked = set[int]()  # shards that hold what their checksums say
        self._layout = {name: (array.dtype, array.shape[1:]) for name, array in self._arrays(0).items()}

    def __repr__(self) -> str:
        where = str(self._shards[0].parent)
        return f"<{type(self).__name__}: {len(self):,} moves in {len(self._shards):,} shards of {where!r}>"

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        shard = bisect_right(self._ends, index)
        row = index - (self._ends[shard - 1] if shard else 0)
        return {name: torch.from_numpy(np.array(array[row])) for name, array in self._arrays(shard).items()}

    def _arrays(self, shard: int) -> dict[str, NDArray[Any]]:
        found = self._open.get(shard)
        if found is not None:
            return found
        path = self._shards[shard]
        try:
            found = mapped_arrays(path, self.fields, check=shard not in self._checked)
        except UNREADABLE as error:
            raise UsageError(
                f"{path} cannot be read ({error}). Run gpuinfer selfplay with --resume to play its games again."
            ) from error
        layout = {name: (array.dtype, array.shape[1:]) for name, array in found.items()}
        if shard and layout != self._layout:
            raise UsageError(f"{path} holds positions of another game than {self._shards[0]}. Leave it out.")
        if len(self._open) >= OPEN_SHARDS:
            self._open.popitem(last=False)
        self._open[shard] = found
        self._checked.add(shard)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Loader processes open the shards for themselves."""
        return {**self.__dict__, "_open": OrderedDict()}


def _shards_of(place: Path) -> list[Path]:
    if place.suffix == ".npz" and place.is_file():
        return [place]
    if not place.exists():
        raise UsageError(f"there is no {place}. Give the folder that `gpuinfer selfplay --out` wrote.")
    return shards_of(place)


class RolloutsDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples for training that `gpuinfer rollouts` has recorded: a trajectory of the policy, or, where an agent forgot
    what came before, each part of one. An item is a dict of tensors:

        tokens      int64 [n]: all that the model saw and drew, as it saw them last
        mask        float32 [n]: 1 for tokens that the policy drew, which alone are trained on
        logprobs    float32 [n]: of these tokens when they were drawn; 0 elsewhere
        advantage   float32 []: of the reward, in its group and for its agent (GRPO)
        reward      float32 []: of the trajectory
        group       int64 []: the group's number
        reference_logprobs  float32 [n], where a reference model was asked (`--reference`) for all of the samples

    `source`: a folder that `gpuinfer rollouts --out` wrote, or groups as a stream of rollouts hands them to a trainer
    (`RolloutsDataset(batch.groups)`). All is held in memory, some 16 bytes a token. Raises `UsageError` for a folder
    without records, without any sample, or with a damaged file. Of a run that is on it has what is written so far.
    """

    def __init__(self, source: str | Path | Iterable[Group]) -> None:
        self._source = str(source) if isinstance(source, str | Path) else "what is in memory"
        pieces: dict[str, list[NDArray[Any]]] = {"tokens": [], "mask": [], "logprobs": []}
        references: list[NDArray[Any]] = []
        facts: list[tuple[float, float, int]] = []
        for group in read(Path(source)) if isinstance(source, str | Path) else source:
            for sample in samples(group):
                for name, array in _arrays_of(sample).items():
                    pieces[name].append(array)
                if (reference := sample.reference_logprobs) is not None:
                    references.append(_after(sample.prompt, reference, np.float32))
                facts.append((sample.advantage, sample.trajectory.reward, group.number))
        if not facts:
            raise UsageError(
                f"{self._source} holds nothing to train on: no trajectory of the policy has an answer. Let `gpuinfer "
                "rollouts` play more groups."
            )
        self._ends = np.cumsum([len(one) for one in pieces["tokens"]])
        if len(references) == len(facts):
            pieces["reference_logprobs"] = references
        self._arrays = {name: np.concatenate(parts) for name, parts in pieces.items()}
        advantages, rewards, groups = zip(*facts, strict=True)
        self._facts: dict[str, NDArray[Any]] = {
            "advantage": np.array(advantages, np.float32),
            "reward": np.array(rewards, np.float32),
            "group": np.array(groups, np.int64),
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self):,} samples, {self._ends[-1]:,} tokens of {self._source!r}>"

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        begin, end = self._ends[index - 1] if index else 0, self._ends[index]
        item: dict[str, torch.Tensor]
        item = {name: torch.from_numpy(array[begin:end].copy()) for name, array in self._arrays.items()}
        item["tokens"] = item["tokens"].to(torch.int64)
        return item | {name: torch.tensor(values[index]) for name, values in self._facts.items()}

    @staticmethod
    def collate(items: Sequence[Mapping[str, torch.Tensor]], pad: int = 0) -> dict[str, torch.Tensor]:
        """A batch of items, for `DataLoader(collate_fn=RolloutsDataset.collate)`: what has a length is [items, longest]
        and filled up at its end, tokens with `pad`, all else with 0; `attention` [items, longest] is False there.
        """
        lengths = torch.tensor([len(item["tokens"]) for item in items])
        batch = {}
        for name in items[0]:
            parts = [item[name] for item in items]
            fill = pad if name == "tokens" else 0
            long = parts[0].dim() > 0
            batch[name] = torch.nn.utils.rnn.pad_sequence(parts, True, fill) if long else torch.stack(parts)
        batch["attention"] = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
        return batch


def _arrays_of(sample: Sample) -> dict[str, NDArray[Any]]:
    return {
        "tokens": np.array((*sample.prompt, *sample.response), np.int32),
        "mask": _after(sample.prompt, sample.mask, np.float32),
        "logprobs": _after(sample.prompt, sample.logprobs, np.float32),
    }


def _after(prompt: Sequence[int], values: Sequence[float], dtype: Any) -> NDArray[Any]:
    """These behind a 0 for each token of the prompt."""
    array = np.zeros(len(prompt) + len(values), dtype)
    array[len(prompt) :] = values
    return array
