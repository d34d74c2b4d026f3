"""ART: a `TrajectoryGroup` of OpenPipe's art (0.5), in the Parquet that `read_trajectory_groups_parquet` of
art.utils.trajectory_logging reads (version 2 of its layout: a row a trajectory, its JSON whole in a column).

A group is of one agent. An answer is a `Choice` of OpenAI's with the two lists that vLLM adds, `prompt_token_ids` and
`token_ids`: ART joins them to sequences and tokenises nothing. The contexts of a trajectory after its first are its
`additional_histories`. Metadata hold plain values alone, so that what is ours is a text of JSON there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import IO, Any

import msgspec
from msgspec import Struct

from gpuinfer.rollouts.export.trainer_format import OWN, Block, ExportPiece, Format, Kept, by_start
from gpuinfer.rollouts.files.parquet import require_pyarrow
from gpuinfer.rollouts.record import Turn, version_number

VERSION = 2  # of the layout
Item = dict[str, Any]  # a message, or a `Choice`


class Message(Struct, frozen=True):
    content: str
    role: str = "assistant"


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: None = None
    top_logprobs: tuple[()] = ()


class Logprobs(Struct, frozen=True):
    content: tuple[TokenLogprob, ...]


class Choice(Struct, frozen=True, kw_only=True):
    """With what vLLM adds: all tokens before the answer, and those of the answer."""

    finish_reason: str
    index: int = 0
    logprobs: Logprobs
    message: Message
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class History(Struct, frozen=True):
    messages_and_choices: tuple[Item, ...]


class TrajectoryLine(Struct, frozen=True, kw_only=True):
    messages_and_choices: tuple[Item, ...]
    additional_histories: tuple[History, ...]
    reward: float
    initial_policy_version: int
    final_policy_version: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, str | int]


class GroupFacts(Struct, frozen=True, kw_only=True):
    metadata: Mapping[str, str]


class GroupLine(Struct, frozen=True, kw_only=True):
    facts: GroupFacts
    trajectories: tuple[TrajectoryLine, ...]


class Art(Format[GroupLine]):
    """One line a group of one agent."""

    name = "art"
    line = GroupLine

    def store(self, file: IO[bytes], lines: Iterable[GroupLine]) -> None:
        require_pyarrow("This trainer's form is Parquet, which")
        import pyarrow as pa
        from pyarrow import parquet

        text, count = pa.large_string(), pa.int64()
        columns = {"format_version": pa.int16(), "group_index": count, "trajectory_index": count}
        columns |= {"group_json": text, "trajectory_json": text, "reward": pa.float64()}
        form = pa.schema(list(columns.items()), metadata={"art.trajectory_parquet.version": str(VERSION)})
        with parquet.ParquetWriter(file, form, compression="zstd") as writer:
            for number, line in enumerate(lines):
                facts = msgspec.json.encode(line.facts).decode()
                rows = [
                    {
                        "format_version": VERSION,
                        "group_index": number,
                        "trajectory_index": place,
                        "group_json": facts,
                        "trajectory_json": msgspec.json.encode(trajectory).decode(),
                        "reward": trajectory.reward,
                    }
                    for place, trajectory in enumerate(line.trajectories)
                ]
                writer.write_table(pa.Table.from_pylist(rows, form))

    def load(self, file: IO[bytes]) -> Iterator[GroupLine]:
        require_pyarrow("This trainer's form is Parquet, which")
        from pyarrow import parquet

        with parquet.ParquetFile(file) as table:
            for number in range(table.num_row_groups):
                rows = table.read_row_group(number, columns=["group_json", "trajectory_json"]).to_pylist()
                facts = msgspec.json.decode(rows[0]["group_json"], type=GroupFacts)
                trajectories = [msgspec.json.decode(row["trajectory_json"], type=TrajectoryLine) for row in rows]
                yield GroupLine(facts=facts, trajectories=tuple(trajectories))

    def lines(self, block: Block) -> Iterator[GroupLine]:
        for of_agent in by_start(block):
            own = msgspec.json.encode([kept for _, kept in of_agent]).decode()
            trajectories = []
            for _, pairs in groupby(of_agent, lambda pair: (pair[0].place.game, pair[0].place.trajectory)):
                contexts = [sample for sample, _ in pairs]
                whole, played = contexts[0].trajectory, contexts[0].group.games[contexts[0].place.game]
                versions = [version_number(version) for one in contexts for version in one.versions] or [0]
                first, *others = (_items(one.turns) for one in contexts)
                line = TrajectoryLine(
                    messages_and_choices=first,
                    additional_histories=tuple(map(History, others)),
                    reward=whole.reward,
                    initial_policy_version=versions[0],
                    final_policy_version=versions[-1],
                    metrics=played.metrics,
                    metadata={"trajectory": whole.id, "agent": whole.agent, "sample": contexts[0].repetition},
                )
                trajectories.append(line)
            facts = GroupFacts(metadata={"group": of_agent[0][0].start, OWN: own})
            yield GroupLine(facts=facts, trajectories=tuple(trajectories))

    def pieces(self, line: GroupLine) -> Iterator[ExportPiece]:
        if (own := line.facts.metadata.get(OWN)) is None:
            raise ValueError(f"its metadata have no {OWN}")
        kepts = msgspec.json.decode(own, type=tuple[Kept, ...])
        contexts = [
            items
            for trajectory in line.trajectories
            for items in (
                trajectory.messages_and_choices,
                *(history.messages_and_choices for history in trajectory.additional_histories),
            )
        ]
        for kept, items in zip(kepts, contexts, strict=True):
            yield _piece(kept, items)


def _items(turns: Sequence[Turn]) -> tuple[Item, ...]:
    """The messages of a context, and its answers as choices."""
    items: list[Item] = []
    before: tuple[int, ...] = ()
    for turn in turns:
        before += turn.prompt_tokens
        chances = zip(turn.completion_tokens, turn.logprobs, strict=True)
        choice = Choice(
            finish_reason=turn.finish_reason,
            logprobs=Logprobs(tuple(TokenLogprob(f"token_id:{token}", logprob) for token, logprob in chances)),
            message=Message(turn.text),
            prompt_token_ids=before,
            token_ids=turn.completion_tokens,
        )
        items += [*(dict(message) for message in turn.messages), msgspec.to_builtins(choice)]
        before += turn.completion_tokens
    return tuple(items)


def _piece(kept: Kept, items: Sequence[Item]) -> ExportPiece:
    choices = [msgspec.convert(item, Choice) for item in items if "finish_reason" in item and "token_ids" in item]
    if not choices:
        raise ValueError("a history has no answer")
    shown = len(choices[0].prompt_token_ids)
    tokens = choices[-1].prompt_token_ids + choices[-1].token_ids
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    for choice in choices:
        begin = len(choice.prompt_token_ids)
        end = begin + len(choice.token_ids)
        if tokens[:end] != choice.prompt_token_ids + choice.token_ids:
            raise ValueError("an answer does not go on from what was before it")
        mask[begin:end] = [1] * len(choice.token_ids)
        logprobs[begin:end] = [one.logprob for one in choice.logprobs.content]
    return ExportPiece(kept, tokens[:shown], tokens[shown:], tuple(mask[shown:]), tuple(logprobs[shown:]))
