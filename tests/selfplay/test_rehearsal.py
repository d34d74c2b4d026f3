"""A game that is not ours is played with its bounds checked before compiled code may write into memory for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.workloads.selfplay import games, rehearsal
from gpuinfer.workloads.selfplay.games.blob import Blob

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def found():
    """What is found of each of the cases, in one process for all."""
    program = [sys.executable, Path(__file__).with_name("mis_sized.py")]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_game_in_order_is_played_to_its_end_and_what_compiled_code_might_bear_is_no_fault_yet(found):
    assert found["in order"]["fault"] is found["in order"]["odd"] is None
    assert found["in order"]["games"] == len(set(found["in order"]["digests"])) == 8
    assert found["in order"]["positions"] > 8
    assert found["raises"]["fault"] is None
    assert found["raises"]["odd"].startswith("ZeroDivisionError: by nothing")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("scratch", ["scratch is (0, 1)", "at least 1 each"]),
        ("config", ["config is no vector of int64"]),
        ("features below actions", ["features = 5 is less than actions = 9", "Declare features = 9 or more."]),
        ("features", ["`observe` (nim.py, line ", "features = 10", "Declare features = 11 or more."]),
        ("words", ["`deal` (nim.py, line ", "words = 4", "Declare words = 5 or more."]),
        ("max_legal", ["`legal` (nim.py, line ", "Declare max_legal = 4 or more."]),
        ("actions", ["`legal` writes action ", "actions = 5", "or more."]),
        ("one seat", ["`to_move` says 1 where seats = 1", "Declare seats = 2"]),
        ("five seats", ["`returns` leaves [", "seats = 5", "each seat"]),
        ("max_moves", ["goes on after 2 moves where max_moves = 2"]),
        ("descending", ["in ascending order"]),
        ("maskless", ["`observe` writes 0 to feature ", "is legal", "are the mask"]),
        ("too large a feature", ["writes 300 into features, which are uint8. Keep to 0…255."]),
        ("a guess that tells", ["`determinize` writes a position that the player to move can tell"]),
        ("a guess that changes", ["`determinize` changes the position."]),
        (
            "open cards",
            ["`determinize` wrote the true position each of ", "set hidden = False where every"],
        ),
        ("half dealt", ["`deal` leaves words of the game before", "Write every word of state"]),
        ("one-sided returns", ["`returns` leaves [", "nan"]),
        ("graded returns", ["`returns` writes [", "won_or_lost = True says that they are 1 and -1", "Write those, or"]),
    ],
)
def test_what_a_game_does_wrong_is_said_with_its_cure(found, case, said):
    assert found[case]["odd"] is None
    assert all(words in found[case]["fault"] for words in said), found[case]["fault"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder on the import path with Nim under another name, its text changed; and a cache of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written = []

    def write(name, *changes):
        text = (EXAMPLES / "nim.py").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return games.build_game(f"{name}:Nim", {}), f"{name}:Nim", {"largest": 3}

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_a_game_is_rehearsed_once_for_its_rules_and_sizes_unless_it_is_refused_or_ours(here):
    case = here("small_nim", ("self.words = LAST + 1", "self.words = LAST"))
    with pytest.raises(UsageError, match=r"'small_nim:Nim' is not played.*`deal` .*Declare words = 5 or more\."):
        rehearsal.ensure(*case)
    assert rehearsal.is_due(case[0])

    game, *told = here("sound_nim")
    assert rehearsal.is_due(game)
    rehearsal.ensure(game, *told)
    assert not rehearsal.is_due(game)
    game.features += 1
    assert rehearsal.is_due(game)
    assert not rehearsal.is_due(Blob())


INTRINSIC = """
from numba.extending import intrinsic
from numba import types

@intrinsic
def same(typing, number):
    def generate(context, builder, signature, arguments):
        return arguments[0]
    return types.int64(number), generate

HEAPS = 3
"""


@pytest.mark.soak
@pytest.mark.parametrize(("words", "fault"), [("self.words = LAST + 1", None), ("self.words = LAST", "beyond an")])
def test_rules_that_plain_python_cannot_play_are_compiled_with_bounds_checked(here, words, fault):
    """The position is written first where only compiled code gets to."""
    _, name, options = here(
        "odd_nim",
        ("HEAPS = 3\n", INTRINSIC),
        ("    state[TURN] = 0\n    state[LAST] = -1\n", "    state[TURN] = same(0)\n    state[LAST] = -1\n"),
        ("self.words = LAST + 1", words),
    )
    done = rehearsal.rehearse(name, options)
    assert not done.plain
    assert fault in done.fault if fault else (done.fault is None and done.games > 1)
