"""The files in a folder of rollouts, and a group as one line of JSON: floats are exact, tokens are integers."""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import structs

from gpuinfer.errors import WorkError
from gpuinfer.host import error_text
from gpuinfer.rollouts.record import Group

SCHEMA = "gpuinfer.rollouts/1"
Form = Literal["jsonl", "parquet"]
FORMS: tuple[Form, ...] = get_args(Form)
JOURNAL = ".journal"
_NAME = re.compile(r"shard-(\d{6,})\.(jsonl|parquet)")


def shard_name(number: int, form: str) -> str:
    return f"shard-{number:06d}.{form}"


def journal_name(number: int) -> str:
    return f"shard-{number:06d}{JOURNAL}"


def list_shards(folder: Path) -> dict[int, Path]:
    """Whole shards by number, in order."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def list_journals(folder: Path) -> dict[int, Path]:
    """Journals by number, in order, without those whose groups a shard has: a run was killed before it removed them."""
    whole = list_shards(folder)
    found = {int(path.stem.removeprefix("shard-")): path for path in folder.glob(f"shard-*{JOURNAL}")}
    return {number: path for number, path in sorted(found.items()) if number not in whole}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Group).decode
MOST_SEED = 2**63  # a seed is an integer of 64 bits in every form


def encode(group: Group) -> bytes:
    """Raises `WorkError` for what no form of file holds: a number that is not finite, a seed past 64 bits.

    Game by game, so that other threads come in between.
    """
    check_group(group)
    try:
        games = [msgspec.Raw(_encode(game)) for game in group.games]
        return _encode({**structs.asdict(group), "games": games}) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WorkError(
            f"group {group.number} cannot be written ({error_text.safe_str(error)}). Messages hold JSON alone."
        ) from error


def decode(line: bytes) -> Group | None:
    """The group; None for any other line."""
    try:
        return _decode(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


def check_group(group: Group) -> None:
    """Raises `WorkError` that names what is not finite."""
    for game in (*group.games, *group.failed):
        of_game = f"of group {group.number}, sample {game.sample}"
        if not -MOST_SEED <= game.seed < MOST_SEED:
            raise WorkError(f"the seed {game.seed} {of_game} has more than 64 bits. Draw a smaller one.")
        turns = [turn for trajectory in game.trajectories for turn in trajectory.turns]
        rewards = [one.reward for one in game.trajectories] + [turn.reward for turn in turns]
        logprobs = [(turn.logprobs, turn.reference_logprobs or (), turn.policy_logprobs or ()) for turn in turns]
        for name, values in (
            ("a metric", game.metrics.values()),
            ("a reward", rewards),
            ("a log-probability", chain.from_iterable(chain.from_iterable(logprobs))),
        ):
            if not all(map(math.isfinite, values)):
                raise WorkError(f"{name} {of_game} is not finite. See to what its environment and model give.")
