"""Where a checkpoint's tensors come from: each by its name, read straight to where it is wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Store(Protocol):
    where: str  # what messages call it

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into`, contiguous and of the stored shape, in its own dtype. Raises `UsageError` for a damaged file."""
        ...

    def digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Of all bytes of each, as stored: the same digest, the same weights. Raises `UsageError` as `read` does."""
        ...
