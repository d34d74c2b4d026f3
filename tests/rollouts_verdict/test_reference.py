"""Reference log-probabilities: those of a separate forward over the same tokens, for the turns that are trained on."""

import random

import pytest
from adapters.random_adapters import peft_folder
from helpers import AtOnce
from msgspec import structs
from text.oracle import logits_of
from text.tiny import VOCABULARY, tiny_checkpoint

from gpuinfer.api import Limits, ModelSpec, Priority, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendError, BadResult, UsageError, WorkError
from gpuinfer.generation import Candidate, Generation, Logprob, Prompt, Sampling
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.record import Game, Group, Span, Trajectory, Turn
from gpuinfer.rollouts.reference_model import ReferenceModel, check_tokens
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.runtime.session import Session
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.workloads.rollouts.workload import Rollouts


def spec_of(seed=0):
    return ModelSpec(str(tiny_checkpoint("llama", seed=seed)), kind="text")


def session(spec, **options):
    return Session(InProcess(Setup(spec), **{"slots": 4, "context": 128, **options}), AtOnce())


def drawn(seed, count):
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=count))


def turn(prompt, completion, *, step=0, anew=False):
    worth = {"logprobs": (-1.0,) * len(completion), "policy_logprobs": (-1.5,) * len(completion)}
    asked = {"messages": ({"role": "user", "content": "now?"},), "text": "so", "finish_reason": "stop"}
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "spans": (Span(0, ""),)}
    return Turn(step=step, anew=anew, **asked, **tokens, **worth)


def trajectory(agent, *turns, trainable=True):
    role = "policy" if trainable else "opponent"
    whose = {"id": f"g0/0/{agent}", "agent": agent, "role": role, "trainable": trainable, "model": "tiny"}
    return Trajectory(turns=turns, reward=0.0, **whose)


GAMES = [
    [
        trajectory("a", turn(drawn(1, 30), drawn(2, 9)), turn(drawn(3, 4), drawn(4, 12), step=1)),
        trajectory("b", turn(drawn(1, 30), drawn(5, 6)), turn(drawn(6, 20), drawn(7, 5), step=1, anew=True)),
    ],
    [trajectory("a", turn(drawn(1, 30), drawn(8, 20))), trajectory("b", turn(drawn(1, 30), ()))],
    [trajectory("a", turn(drawn(1, 30), drawn(9, 3)), trainable=False)],
]
PLAYED = Group(
    id="g0", number=0, environment="made up", seconds=1.0,
    games=tuple(Game(sample=n, seed=1, ending="done", trajectories=tuple(of), steps=1) for n, of in enumerate(GAMES)),
)  # fmt: skip


def separately(folder, context):
    """Of each token but the first, by transformers."""
    told = logits_of(folder, context).log_softmax(-1)
    return [told[place, token].item() for place, token in enumerate(context[1:])]


def pairs(played):
    for game in played.games:
        for one in game.trajectories:
            if one.trainable:
                yield from one.contexts()


@pytest.mark.parametrize("other", [pytest.param(False, id="the base"), pytest.param(True, id="another model")])
async def test_they_are_those_of_a_separate_forward_and_nothing_else_is_changed(other):
    policy, reference = spec_of(), spec_of(seed=1)
    async with session(policy, step_tokens=32) as infer:
        scored = await ReferenceModel(infer, model=reference if other else None).add(PLAYED)
    for context, turns in pairs(scored):
        expected, at = separately((reference if other else policy).name, context), 0
        for one in turns:
            at += len(one.prompt_tokens)
            told = expected[at - 1 : at - 1 + len(one.completion_tokens)]
            assert one.reference_logprobs == pytest.approx(told, abs=1e-4)
            at += len(one.completion_tokens)
    assert scored.reference_s > 0
    assert [one.reference_logprobs for one in scored.games[2].trajectories[0].turns] == [None]

    def without(played):
        for one in (one for game in played.games for one in game.trajectories):
            yield structs.replace(
                one, turns=tuple(structs.replace(turn, reference_logprobs=None) for turn in one.turns)
            )

    assert list(without(scored)) == list(without(PLAYED))
    assert structs.replace(scored, games=(), reference_s=0.0) == structs.replace(PLAYED, games=())


async def test_a_prompt_is_told_no_more_than_it_wants():
    def asking(**start):
        return Prompt(tokens=drawn(1, 40), sampling=Sampling(max_tokens=0, prompt_logprobs=1, **start))

    async with session(spec_of()) as infer:
        whole = await infer(asking())
        part = await infer(asking(prompt_logprob_start=30))
        none = await infer(asking(prompt_logprob_start=99))
    assert part.prompt_logprobs[:30] == (None,) * 30
    for one, other in zip(part.prompt_logprobs[30:], whole.prompt_logprobs[30:], strict=True):
        assert one.chosen.token == other.chosen.token
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
    assert none.prompt_logprobs == (None,) * 40
    assert part.cached_tokens > 0  # what need not be told may come from the cache


def told(request, versions=("",), shift=0):
    tokens = request.payload.tokens
    chosen = [None, *(Logprob(Candidate(token + shift, -1.0, 1)) for token in tokens[1:])]
    return Generation(completions=(), prompt_tokens=len(tokens), prompt_logprobs=tuple(chosen), versions=versions)


async def test_deferred_passes_are_of_the_lowest_class():
    for inline, priority in ((False, Priority.LOW), (True, Priority.NORMAL)):
        infer = FakeInfer(told, Limits(max_rows=16, slots=16))
        await ReferenceModel(infer, inline=inline).add(PLAYED)
        assert {request.priority for request in infer.requests} == {priority}


def failing(request):
    raise BackendError("no memory is left.")


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (lambda request: told(request, versions=("v3",)), WorkError, r"by now\. Name the reference"),
        (lambda request: told(request, shift=1), BadResult, "of others"),
        (failing, WorkError, "the base model, could not score a game: no memory is left"),
    ],
    ids=["weights that have changed", "other tokens", "a pass that fails"],
)
async def test_what_is_no_reference(answer, error, said):
    with pytest.raises(error, match=said):
        await ReferenceModel(FakeInfer(answer)).add(PLAYED)


def test_a_reference_with_other_tokens_is_refused():
    with pytest.raises(UsageError, match="Name a model with the same tokenizer"):
        check_tokens(spec_of(), ModelSpec("tiny", kind="text"))
    check_tokens(spec_of(), spec_of(seed=1))


async def played_with(tmp_path, context=512, **options):
    """The last progress of a run, which has an arithmetic environment."""
    given = {"env": "arithmetic", "samples_per_group": 2, "out": tmp_path, **options}
    played = Rollouts(Setup(), **given)
    async with Session(InProcess(Setup(played.model()), slots=4, context=context), AtOnce()) as infer:
        async for progress in played.run(infer):
            last = progress
    assert last.done == given["groups"]


async def test_a_run_keeps_the_reference_of_each_token(tmp_path):
    for reference in ("inline", "deferred"):
        await played_with(tmp_path / reference, model="tiny", groups=2, max_new_tokens=4, reference=reference)
        groups = list(read(tmp_path / reference))
        assert all(one.reference_s > 0 for one in groups)
        for one in (told for played in groups for told in played.turns()):
            assert one.reference_logprobs == pytest.approx(one.policy_logprobs, abs=1e-4)  # the same model


async def test_the_reference_under_an_adapter_is_the_base_whatever_version_is_in_force(tmp_path):
    spec = spec_of()
    folder = peft_folder(tmp_path / "policy", open_checkpoint(spec).shape, seed=3)
    trained = {"adapter": [f"policy={folder}"], "trainer_seconds": 0.0, "steps": tmp_path / "steps.jsonl"}
    how = {"groups": 3, "max_new_tokens": 6, "plain": True, "reference": "deferred"}
    await played_with(tmp_path / "record", context=256, model=spec.name, **how, **trained)
    for one in read(tmp_path / "record"):
        for context, turns in pairs(one):
            expected = separately(spec.name, context)[len(turns[0].prompt_tokens) - 1 :]
            assert turns[0].reference_logprobs == pytest.approx(expected, abs=1e-4)
            assert turns[0].policy_logprobs != pytest.approx(turns[0].reference_logprobs, abs=1e-3)
            assert turns[0].spans[0].version.startswith("policy@v")
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert all(step.kl > 0 and step.reference_share > 0 for step in steps)
    assert any(step.reference_s > 0 for step in steps)  # of one it may have been over before
