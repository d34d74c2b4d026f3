"""How the user wants text generated; None leaves it to us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """A backend's options, as far as they concern generation."""

    slots: int | None = None  # rows under way at once; None: as many as are worth while and fit (CPU: 64 at most)
    context: int | None = None  # positions in a slot, prompt and answer; None: the model's, 4096 at most
    step_tokens: int | None = None  # most tokens of one step, prompts chunked; None: 512 on a CPU, 2048 on CUDA
    threads: int | None = None  # of the decoder and the sampler on a CPU; None: this process's share of the cores
    compile: bool = False  # torch.compile what lies between the matrix products
    graphs: bool = True  # on CUDA, steps of one token a row are captured graphs
