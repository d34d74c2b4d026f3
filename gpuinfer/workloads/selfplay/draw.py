"""Random numbers that Python asks for: the functions of `bits` and `puct`, compiled once and kept on the disk."""

from pathlib import Path

import numpy as np

from gpuinfer.models import kernel_cache
from gpuinfer.workloads.selfplay import bits, puct

FILES = [Path(__file__).with_name(name) for name in ("draw.py", "bits.py", "puct.py", "arrays.py")]
kept = kernel_cache.compiler(FILES, error_model="numpy", _nrt=False)


@kept
def seed_stream(stream, seed, index):
    bits.seed_stream(stream, seed, index)


@kept
def unit_of(seed, index):
    return bits.unit_of(seed, index)


@kept
def random_below(stream, n):
    return bits.random_below(stream, n)


@kept
def random_unit(stream):
    return bits.random_unit(stream)


@kept
def draw_noise(search, stream, noise, count):
    puct.draw_noise(search, stream, noise, count)


@kept
def draw_by_visits(visits, count, temperature, stream):
    return puct.draw_by_visits(visits, count, temperature, stream)


class Draw:
    """Random numbers of one game, which depend on the run's seed and the game's number alone."""

    def __init__(self, stream: np.ndarray) -> None:
        self.stream = stream  # uint64 [2], as `bits` has it

    def below(self, n: int) -> int:
        """Uniform on 0 … n - 1."""
        return int(random_below(self.stream, n))

    def unit(self) -> float:
        """Uniform on [0, 1)."""
        return float(random_unit(self.stream))


def draw_of(number: int) -> Draw:
    """Those of this game of a run whose seed is 0."""
    stream = np.zeros(2, np.uint64)
    seed_stream(stream, 0, number)
    return Draw(stream)
