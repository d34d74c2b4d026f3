"""A compiled list as one array of int32, and how compiled code reads it: by its address, as each row has its own.

Nodes are numbered level by level, the beginning of a line is node 0. The children of a node are numbered one after
another, in the order of their tokens: so an edge needs no number of its own.
"""

from __future__ import annotations

from pathlib import Path

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpuinfer.models.called_only import called_only
from gpuinfer.models.kernel_cache import compiler

# mypy: ignore-errors

compiled = compiler(sorted(Path(__file__).parent.glob("cpu_*.py")), nogil=True, _nrt=False, error_model="numpy")
called = called_only(_nrt=False, error_model="numpy")
inlined = called_only(_nrt=False, error_model="numpy", forceinline=True)

# Where the image says what it is: the lengths first, then where each part begins.
NODES, WORDS, LENGTH, ENDS, MOST = range(5)  # LENGTH: bytes of the tag; MOST: tokens that any node allows
FIRST, TOKEN, NEED, ITEM, SETS, GOTO, BAR_STARTS, BARS = range(5, 13)
HEADER = 16
# FIRST [nodes + 1]: the first child; TOKEN [nodes]: what leads there; SETS [sets, words]: sets of units, a bit for each
# GOTO [length, 256]: the tag's automaton; BAR_STARTS [length + 2], BARS: tokens that may not come, by its state
OPEN = -1  # NEED: the end of the list can be reached. Else the one unit of all items there; below: -2 - (a set of them)
NO_ITEM, END = -1, -2  # ITEM: else the unit of the item that is complete there; below: -3 - (a set of units)


@intrinsic
def peek(typing, address, index):
    """Number `index` of the int32 at an address. Its owner keeps it alive."""

    def generate(context, builder, signature, values):
        numbers = builder.inttoptr(values[0], ir.PointerType(ir.IntType(32)))
        return builder.load(builder.gep(numbers, [values[1]]))

    return types.int32(types.int64, types.int64), generate
