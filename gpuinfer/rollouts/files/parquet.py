"""Groups as tables: one row a turn, in columns that any reader of Parquet knows (pyarrow, DuckDB, Polars, pandas).

The fields of a group, game or trajectory are repeated in each of its rows. `game`, `trajectory` and `turn` are places
in the record; a group without games, a game without trajectories, a trajectory without turns has one row, with nulls
from there on. Tokens are int32. Floats are those of the record, in 64 bits: most had 32, and the zeros that this adds
take no room when they are packed. Messages are JSON. A group is a row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from gpuinfer.errors import UsageError
from gpuinfer.host.extras import require_extra
from gpuinfer.rollouts.record import Game, Group, Span, Timing, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow

GROUP = tuple(name for name in Group.__struct_fields__ if name not in ("games", "failed"))
GAME = tuple(name for name in Game.__struct_fields__ if name != "trajectories")
TRAJECTORY = tuple(name for name in Trajectory.__struct_fields__ if name != "turns")
TURN = tuple(name for name in Turn.__struct_fields__ if name not in ("spans", "timing"))
LISTS = ("prompt_tokens", "completion_tokens", "logprobs", "reference_logprobs", "policy_logprobs", "nodes")

_json = msgspec.json.Encoder().encode
Row = dict[str, Any]


def require_pyarrow(what: str = "Parquet") -> None:
    """Raises `UsageError` where there is no pyarrow."""
    require_extra("parquet", what)


def table_schema() -> pyarrow.Schema:
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())  # of few values
    tokens, floats = pa.list_(pa.int32()), pa.list_(pa.float64())
    of_timing = pa.struct([(name, pa.float64()) for name in Timing.__struct_fields__])
    columns: dict[str, Any] = {
        "group_id": pa.string(),
        "group_number": pa.int64(),
        "group_environment": word,
        "group_started": pa.float64(),
        "group_seconds": pa.float64(),
        "group_reference_s": pa.float64(),
        "failed": pa.bool_(),  # the game was replaced
        "game": pa.int32(),
        "game_sample": pa.int64(),
        "game_seed": pa.int64(),
        "game_ending": word,
        "game_steps": pa.int64(),
        "game_metrics": pa.map_(pa.string(), pa.float64()),
        "game_error": pa.string(),
        "game_attempt": pa.int64(),
        "game_seconds": pa.float64(),
        "trajectory": pa.int32(),
        "trajectory_id": pa.string(),
        "trajectory_agent": word,
        "trajectory_role": word,
        "trajectory_trainable": pa.bool_(),
        "trajectory_model": word,
        "trajectory_reward": pa.float64(),
        "turn": pa.int32(),
        "step": pa.int64(),
        "messages": pa.string(),
        "anew": pa.bool_(),
        "prompt_tokens": tokens,
        "completion_tokens": tokens,
        "text": pa.string(),
        "finish_reason": word,
        "logprobs": floats,
        "reference_logprobs": floats,
        "policy_logprobs": floats,
        "spans": pa.list_(pa.struct([("start", pa.int32()), ("version", pa.string())])),
        "nodes": tokens,
        "cached_tokens": pa.int64(),
        "temperature": pa.float64(),
        "reward": pa.float64(),
        "timing": of_timing,
    }
    return pa.schema(list(columns.items()))


def write_groups(file: IO[bytes], groups: Iterable[Group]) -> None:
    """A whole file. One group at a time is in memory."""
    import pyarrow as pa
    from pyarrow import parquet

    form = table_schema()
    with parquet.ParquetWriter(file, form, compression="zstd", write_page_checksum=True) as writer:
        for group in groups:
            rows = list(_rows(group))
            columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in form]
            writer.write_table(pa.Table.from_arrays(columns, schema=form), row_group_size=len(rows))


def numbers(shard: Path) -> set[int] | None:
    """The numbers of the groups in a shard, every byte of which is checked; None for a damaged shard."""
    try:
        return {table["group_number"][0].as_py() for table in _tables(shard)}
    except _damage():
        return None


def read_groups(shard: Path) -> Iterator[Group]:
    """Raises `UsageError` for a shard that is damaged."""
    require_pyarrow()
    try:
        yield from (_group(table.to_pylist()) for table in _tables(shard))
    except _damage() as error:
        why = f"{shard} is damaged ({error}). Go on with the run (--resume): its groups are played again."
        raise UsageError(why) from error


def _damage() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


def _tables(shard: Path) -> Iterator[pyarrow.Table]:
    from pyarrow import parquet

    with parquet.ParquetFile(shard, page_checksum_verification=True) as file:
        for index in range(file.num_row_groups):
            yield file.read_row_group(index)


def _rows(group: Group) -> Iterator[Row]:
    def facts(prefix: str, part: Any, names: Iterable[str]) -> Row:
        return {f"{prefix}_{name}": getattr(part, name) for name in names}

    of_group = facts("group", group, GROUP)
    if not group.games and not group.failed:
        yield of_group
    games = [(failed, *one) for failed in (False, True) for one in enumerate(group.failed if failed else group.games)]
    for failed, place, game in games:
        of_game = {**of_group, "failed": failed, "game": place, **facts("game", game, GAME)}
        of_game["game_metrics"] = list(game.metrics.items())
        if not game.trajectories:
            yield of_game
        for at, trajectory in enumerate(game.trajectories):
            of_trajectory = {**of_game, "trajectory": at, **facts("trajectory", trajectory, TRAJECTORY)}
            if not trajectory.turns:
                yield of_trajectory
            for number, turn in enumerate(trajectory.turns):
                yield {
                    **of_trajectory,
                    "turn": number,
                    **{name: getattr(turn, name) for name in TURN},
                    "messages": _json(turn.messages).decode(),
                    "spans": [{"start": span.start, "version": span.version} for span in turn.spans],
                    "timing": structs.asdict(turn.timing),
                }


def _group(rows: list[Row]) -> Group:
    """Of all its rows, in their order."""
    games: dict[bool, list[Game]] = {False: [], True: []}
    for (failed, place), found in groupby(rows, lambda row: (row["failed"], row["game"])):
        if place is None:
            continue
        of_game, trajectories = list(found), []
        for at, some in groupby(of_game, lambda row: row["trajectory"]):
            if at is not None:
                of_one = list(some)
                turns = tuple(_turn(row) for row in of_one if row["turn"] is not None)
                trajectories.append(Trajectory(turns=turns, **_named("trajectory", of_one[0], TRAJECTORY)))
        facts = {**_named("game", of_game[0], GAME), "metrics": dict(of_game[0]["game_metrics"])}
        games[failed].append(Game(trajectories=tuple(trajectories), **facts))
    return Group(games=tuple(games[False]), failed=tuple(games[True]), **_named("group", rows[0], GROUP))


def _turn(row: Row) -> Turn:
    facts = {name: row[name] for name in TURN}
    facts.update({name: None if row[name] is None else tuple(row[name]) for name in LISTS})
    facts["messages"] = tuple(msgspec.json.decode(row["messages"]))
    facts["spans"] = tuple(Span(span["start"], span["version"]) for span in row["spans"])
    return Turn(**facts, timing=Timing(**row["timing"]))


def _named(prefix: str, row: Row, names: Iterable[str]) -> Row:
    return {name: row[f"{prefix}_{name}"] for name in names}
