"""What no trainer reads, so that the very same groups can be read back.

The samples of a group hold the tokens and log-probabilities of what can be trained on; all else stands in the group
itself, emptied of those, in a field that the trainer ignores. A group without samples goes along with its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.export.samples import Place, Sample, samples
from gpuinfer.rollouts.record import Game, Group, Trajectory, Turn


class Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beside one sample. `groups` (with the first sample of a group): the last is its own, emptied; those before it
    have no sample. `after` (in the very last sample): those that follow, which have none either.
    """

    place: Place
    groups: tuple[Group, ...] = ()
    after: tuple[Group, ...] = ()


class Piece(Struct, frozen=True):
    """What a file says of one sample: `logprobs` and `mask` as long as `response`."""

    kept: Kept
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]


Block = list[tuple[Sample, Kept]]  # of one group


def blocks(groups: Iterable[Group]) -> Iterator[Block]:
    """The samples of each group that has some, with what is to be kept. Raises `UsageError` if there is none at all."""
    waiting: list[Group] = []
    held: Block = []  # until it is known what follows
    for group in groups:
        if not (found := samples(group)):
            waiting.append(group)
            continue
        if held:
            yield held
        first = Kept(place=found[0].place, groups=(*waiting, emptied(group, found)))
        held = [(found[0], first), *((one, Kept(place=one.place)) for one in found[1:])]
        waiting = []
    if not held:
        raise UsageError("there is nothing to train on: no trajectory of the policy has an answer.")
    sample, kept = held[-1]
    yield [*held[:-1], (sample, replace(kept, after=tuple(waiting)))]


def by_start(block: Block) -> Iterator[Block]:
    """One block for each agent: the samples that are compared with one another."""
    agents: dict[str, Block] = {}
    for sample, kept in block:
        agents.setdefault(sample.start, []).append((sample, kept))
    yield from agents.values()


def restored(pieces: Iterable[Piece]) -> Iterator[Group]:
    """The groups that `blocks` was given. Raises `ValueError` for pieces that do not belong together."""
    own: list[Piece] = []
    for piece in pieces:
        if piece.kept.groups:
            if own:
                yield _filled(own)
            yield from piece.kept.groups[:-1]
            own = []
        elif not own:
            raise ValueError("its group is missing")
        own.append(piece)
    if own:
        yield _filled(own)
        for piece in own:
            yield from piece.kept.after


def emptied(group: Group, found: Sequence[Sample]) -> Group:
    """Without what its samples hold."""
    return _with_contexts(group, {_where(one.place): tuple(map(_emptied, one.turns)) for one in found})


def _filled(pieces: Sequence[Piece]) -> Group:
    group = pieces[0].kept.groups[-1]
    by_context = {
        (place, at, context): turns
        for place, game in enumerate(group.games)
        for at, trajectory in enumerate(game.trajectories)
        for context, (_, turns) in enumerate(trajectory.contexts())
    }
    new = {_where(piece.kept.place): _filled_turns(by_context, piece) for piece in pieces}
    return _with_contexts(group, new)


Where = tuple[int, int, int]  # game, trajectory, context


def _where(place: Place) -> Where:
    return place.game, place.trajectory, place.context


def _with_contexts(group: Group, new: Mapping[Where, tuple[Turn, ...]]) -> Group:
    """These contexts in the place of its own."""

    def trajectory(place: int, at: int, old: Trajectory) -> Trajectory:
        contexts = [new.get((place, at, context), turns) for context, (_, turns) in enumerate(old.contexts())]
        return replace(old, turns=tuple(chain.from_iterable(contexts)))

    def game(place: int, old: Game) -> Game:
        return replace(old, trajectories=tuple(trajectory(place, at, one) for at, one in enumerate(old.trajectories)))

    return replace(group, games=tuple(game(place, one) for place, one in enumerate(group.games)))


def _emptied(turn: Turn) -> Turn:
    return replace(turn, prompt_tokens=(), completion_tokens=(), logprobs=())


def _filled_turns(contexts: Mapping[Where, tuple[Turn, ...]], piece: Piece) -> tuple[Turn, ...]:
    place = piece.kept.place
    turns = contexts.get(_where(place), ())
    tokens = piece.prompt + piece.response
    if len(turns) != len(place.sizes) or sum(map(sum, place.sizes)) != len(tokens):
        raise ValueError("it has not as many turns or tokens as it had")
    logprobs, mask = (0.0,) * len(piece.prompt) + piece.logprobs, (0,) * len(piece.prompt) + piece.mask
    if len(logprobs) != len(tokens) or len(mask) != len(tokens):
        raise ValueError("its tokens, mask and log-probabilities are not of one length")
    filled, at = [], 0
    for turn, (shown, drawn) in zip(turns, place.sizes, strict=True):
        begin, end = at + shown, at + shown + drawn
        if any(mask[at:begin]) or not all(mask[begin:end]):
            raise ValueError("its mask is not where its answers were")
        filled.append(
            replace(
                turn, prompt_tokens=tokens[at:begin], completion_tokens=tokens[begin:end], logprobs=logprobs[begin:end]
            )
        )
        at = end
    return tuple(filled)
