# mypy: ignore-errors
"""Random numbers from a counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, Parallel random numbers: as easy as
1, 2, 3). A number depends on (seed, key, sample, position) alone, so a row draws the same in any company.
"""

import numpy as np

from gpuinfer.models.text.sampling.cpu_values import compiled, inlined

MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_32, U32 = np.uint64(0xFFFFFFFF), np.uint64(32)
U5, U6, U26 = np.uint64(5), np.uint64(6), np.uint64(26)
ROUNDS = 10
UNIT = 1.0 / (1 << 53)


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit numbers, each in a uint64, for the counter of four such and the key of two."""
    for _ in range(ROUNDS):
        left, right = MULTIPLY_0 * c0, MULTIPLY_1 * c2
        c0, c1, c2, c3 = (right >> U32) ^ c1 ^ k0, right & LOW_32, (left >> U32) ^ c3 ^ k1, left & LOW_32
        k0, k1 = (k0 + WEYL_0) & LOW_32, (k1 + WEYL_1) & LOW_32
    return c0, c1, c2, c3


@inlined
def unit(record):
    """A float64 from 0 to under 1, for the slot's next position."""
    position, key, seed = np.uint64(record.drawn), record.key, record.seed
    a, b, _, _ = philox(position & LOW_32, record.sample & LOW_32, key & LOW_32, key >> U32, seed & LOW_32, seed >> U32)
    return np.float64(((a >> U5) << U26) | (b >> U6)) * UNIT


@compiled
def units(records, slots, out):
    """The next number of each slot."""
    for row in range(slots.shape[0]):
        out[row] = unit(records[slots[row]])


@compiled
def philox_words(words, out):
    """philox over rows: uint64 `words` [rows, 6] of counter and key, `out` [rows, 4]."""
    for row in range(words.shape[0]):
        c0, c1, c2, c3, k0, k1 = words[row]
        out[row, 0], out[row, 1], out[row, 2], out[row, 3] = philox(c0, c1, c2, c3, k0, k1)
