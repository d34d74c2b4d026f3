"""Stalls planted into runs of their own processes, on the real clock: each is named there too.

What is planted is large beside what a busy machine adds: sizes, and what is no stall, are left to the virtual clock.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the environment is found by its module's name

from planted_program import kinds
from virtual_engine import World, lost

from gpuinfer.rollouts.steps import read_steps

WELL = World(token=0.02, score=0.01, load=0.002, environment=0.004, train=0.8, groups=20)
PLANTS = {
    "starvation": replace(WELL, slots=64, depth=4, train=0.06),
    "reference pass": replace(WELL, reference="inline", slots=32, score=2.4),
    "adapter load": replace(WELL, load=1.5),
    "cold start": replace(WELL, cold=6.0),
    "engine saturated": replace(WELL, slots=3, train=0.1),
    "too little concurrency": replace(WELL, in_flight=1, train=0.1),
    "environment slow": replace(WELL, environment=1.5),
}
LIMIT_S = 200


def order(world: World, steps: Path) -> str:
    of_engine = ("token", "slots", "score", "load", "cold")
    return json.dumps(
        {
            "backend": {name: getattr(world, name) for name in of_engine},
            "environment": world.environment,
            "train": world.train,
            "batch": world.batch,
            "groups": world.groups,
            "samples_per_group": world.samples,
            "groups_in_flight": world.in_flight,
            "buffer_depth": world.depth,
            "reference": world.reference,
            "steps": str(steps),
        }
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The files of steps, by what was planted: all runs at once, as they sleep nearly always."""
    folder = tmp_path_factory.mktemp("planted")
    files = {kind: folder / f"{kind}.jsonl" for kind in PLANTS}
    play(files)
    return files


def play(files: dict[str, Path]) -> None:
    program = Path(__file__).parent / "planted_program.py"
    runs = {
        kind: subprocess.Popen(
            [sys.executable, str(program), order(PLANTS[kind], file)], stderr=subprocess.PIPE, text=True
        )
        for kind, file in files.items()
    }
    try:
        for run in runs.values():
            _, said = run.communicate(timeout=LIMIT_S)
            assert run.returncode == 0, said
    finally:
        for run in runs.values():
            run.kill()


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", PLANTS)
def test_what_was_planted_into_a_run_is_named(kind, played, tmp_path):
    """In one of three: what else the machine does may cost a single run more than what was planted."""
    file, told = played[kind], []
    for attempt in range(3):
        if attempt:
            play({kind: (file := tmp_path / f"{attempt}.jsonl")})
        steps = list(read_steps(file))
        assert len(steps) == PLANTS[kind].groups // PLANTS[kind].batch
        if [most for most, _ in lost(steps).most_common(1)] == [kind]:
            return
        told.append(kinds(steps))
    pytest.fail(str(told))
