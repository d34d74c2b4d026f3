"""Consecutive layers of a transformer, as a transformer of its own: what a decoder computes for one stage.

The first portion has the embedding and the learned positions, the last one the norm after the layers and the head. What
takes their place in the others is one row of zeros: a later portion is given each token's vector, and of an earlier one
nobody asks for logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Adapter, Linear, Norm, Weights


@dataclass(frozen=True)
class Portion:
    """The layers from `start` to before `stop` of a model of `shape`."""

    whole: Shape
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.whole.layers

    @property
    def shape(self) -> Shape:
        whole, experts = self.whole, self.whole.experts
        if experts is not None:
            dense = (layer - self.start for layer in experts.dense if self.start <= layer < self.stop)
            experts = replace(experts, dense=tuple(dense))
        return replace(
            whole,
            layers=self.stop - self.start,
            windows=whole.windows[self.start : self.stop],
            vocabulary=whole.vocabulary if self.last else 1,
            learned_positions=whole.learned_positions and self.first,
            experts=experts,
        )

    def weights(self, whole: Weights) -> Weights:
        blank = torch.zeros_like(whole.embedding[:1])
        return Weights(
            embedding=whole.embedding if self.first else blank,
            layers=whole.layers[self.start : self.stop],
            norm=whole.norm if self.last else Norm(torch.ones_like(whole.norm.scale)),
            head=whole.head if self.last else Linear(blank),
            positions=whole.positions if self.first else None,
        )

    def adapter(self, whole: Adapter) -> Adapter:
        return Adapter(whole.layers[self.start : self.stop])
