"""Nim with something wrong with it, played in this process: it is to run with NUMBA_DISABLE_JIT, where no slip harms.

Prints what was found of each as JSON.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path

import numpy as np

from gpuinfer.workloads.selfplay import playthrough
from gpuinfer.workloads.selfplay.kernels import FUNCTIONS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
playthrough.plain_bits()
import nim  # noqa: E402  # with the plain bits


def resized(**sizes):
    game = nim.Nim(largest=3)
    for name, size in sizes.items():
        setattr(game, name, size)
    return game, nim


def ruled(**functions):
    """Other functions in the place of some rules."""
    rules = types.SimpleNamespace(**{name: getattr(nim, name) for name in FUNCTIONS}, __file__=nim.__file__)
    for name, function in functions.items():
        setattr(rules, name, function)
    return nim.Nim(largest=3), rules


def after(name, change):
    """That rule of Nim, and then `change`, which is given what the rule was given."""

    def rule(*given):
        found = getattr(nim, name)(*given)
        change(*given, found)
        return found

    return ruled(**{name: rule})


def turned_round(config, state, actions, count):
    actions[:count] = np.array(actions[:count])[::-1]


def half_dealt(config, state, stream):
    state[nim.TURN] = 0
    state[nim.LAST] = -1
    state[nim.HEAP] = state[nim.HEAP + 1] = 1


def one_sided(config, state, values):
    values[state[nim.LAST]] = 1.0


def raising(config, state, action):
    raise ZeroDivisionError("by nothing")


CASES = {
    "in order": resized(),
    "scratch": resized(scratch=(0, 1)),
    "config": resized(config=np.zeros(1, np.int32)),
    "features below actions": resized(features=5),
    "features": resized(features=10),
    "words": resized(words=4),
    "max_legal": resized(max_legal=3),
    "actions": resized(actions=5),
    "one seat": resized(seats=1),
    "five seats": resized(seats=5),
    "max_moves": resized(max_moves=2),
    "descending": after("legal", turned_round),
    "maskless": ruled(observe=lambda config, state, actions, count, row: row.__setitem__(9, 1)),
    "too large a feature": after("observe", lambda config, state, actions, count, row, _: row.__setitem__(9, 300)),
    "a guess that tells": after("determinize", lambda config, state, samples, *_: samples[:, nim.HEAP].__iadd__(1)),
    "a guess that changes": after(
        "determinize", lambda config, state, *_: state.__setitem__(nim.TURN, 1 - state[nim.TURN])
    ),
    "open cards": resized(hidden=True),
    "half dealt": ruled(deal=half_dealt),
    "one-sided returns": ruled(returns=one_sided),
    "graded returns": after("returns", lambda config, state, values, _: values.__itruediv__(2)),
    "raises": ruled(apply=raising),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with np.errstate(all="ignore"):
        found = {name: playthrough.played(*case, range(8), 60.0) for name, case in CASES.items()}
    print(json.dumps(found))
