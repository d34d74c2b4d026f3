"""Reference log-probabilities: those of a separate forward over the same tokens, for the turns that are trained on."""

import random

import pytest
from adapters.random_adapters import peft_folder
from groups_as_played import group, trajectory, turn
from helpers import AtOnce
from text.tiny import VOCABULARY, tiny_checkpoint

from gpuinfer.api import Limits, ModelSpec, Priority, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendError, BadResult, UsageError, WorkError
from gpuinfer.generation import Candidate, Generation, Logprob, Prompt, Sampling
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.reference_model import ReferenceModel, check_tokens
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.runtime.session import Session
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.workloads.rollouts.workload import Rollouts


def spec_of(seed=0, **changes):
    return ModelSpec(str(tiny_checkpoint("llama", seed=seed, **changes)), kind="text")


def session(spec, **options):
    return Session(InProcess(Setup(spec), **{"slots": 4, "context": 128, **options}), AtOnce())


def drawn(seed, count):
    return random.Random(seed).choices(range(VOCABULARY), k=count)


PLAYED = group(
    [
        trajectory("a", [turn(drawn(1, 30), drawn(2, 9)), turn(drawn(3, 4), drawn(4, 12), step=1)]),
        trajectory("b", [turn(drawn(1, 30), drawn(5, 6)), turn(drawn(6, 20), drawn(7, 5), step=1, anew=True)]),
    ],
    [trajectory("a", [turn(drawn(1, 30), drawn(8, 20))]), trajectory("b", [turn(drawn(1, 30), [])])],
    [trajectory("a", [turn(drawn(1, 30), drawn(9, 3))], trainable=False)],
)


def separately(folder, context):
    """Of each token but the first, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([context])
    with torch.no_grad():
        told = torch.log_softmax(model(tokens).logits[0], -1)
    return [told[place, token].item() for place, token in enumerate(context[1:])]


def pairs(played):
    for game in played.games:
        for one in game.trajectories:
            if one.trainable:
                yield from one.contexts()


@pytest.mark.parametrize("other", [pytest.param(False, id="the base"), pytest.param(True, id="another model")])
async def test_they_are_those_of_a_separate_forward(other):
    policy, reference = spec_of(), spec_of(seed=1)
    async with session(policy, step_tokens=32) as infer:
        scored = await ReferenceModel(infer, model=reference if other else None).add(PLAYED)
    folder = (reference if other else policy).name
    for context, turns in pairs(scored):
        expected, at = separately(folder, context), 0
        for one in turns:
            at += len(one.prompt_tokens)
            told = expected[at - 1 : at - 1 + len(one.completion_tokens)]
            assert one.reference_logprobs == pytest.approx(told, abs=1e-4)
            at += len(one.completion_tokens)
    assert scored.reference_s > 0
    assert [one.reference_logprobs for one in scored.games[2].trajectories[0].turns] == [None]


async def test_nothing_else_of_the_group_is_changed():
    from msgspec import structs

    async with session(spec_of()) as infer:
        scored = await ReferenceModel(infer).add(PLAYED)

    def without(played):
        for game in played.games:
            for one in game.trajectories:
                yield structs.replace(
                    one, turns=tuple(structs.replace(turn, reference_logprobs=None) for turn in one.turns)
                )

    assert list(without(scored)) == list(without(PLAYED))
    assert structs.replace(scored, games=(), reference_s=0.0) == structs.replace(PLAYED, games=())


async def test_a_prompt_is_told_no_more_than_it_wants():
    async with session(spec_of()) as infer:
        tokens = tuple(drawn(1, 40))
        whole = await infer(Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=1)))
        part = await infer(
            Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=1, prompt_logprob_start=30))
        )
        none = await infer(
            Prompt(tokens=tokens, sampling=Sampling(max_tokens=0, prompt_logprobs=1, prompt_logprob_start=99))
        )
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


async def test_deferred_passes_are_of_the_lowest_class_and_few_at_once():
    infer = FakeInfer(told, Limits(max_rows=16, slots=16))
    await ReferenceModel(infer, inline=False).add(PLAYED)
    assert {request.priority for request in infer.requests} == {Priority.LOW}
    inline = FakeInfer(told)
    await ReferenceModel(inline).add(PLAYED)
    assert {request.priority for request in inline.requests} == {Priority.NORMAL}


async def test_a_base_whose_weights_have_changed_is_no_reference():
    infer = FakeInfer(lambda request: told(request, versions=("v3",)))
    with pytest.raises(WorkError, match=r"by now\. Name the reference"):
        await ReferenceModel(infer).add(PLAYED)


async def test_a_backend_that_tells_of_other_tokens_is_no_reference():
    with pytest.raises(BadResult, match="of others"):
        await ReferenceModel(FakeInfer(lambda request: told(request, shift=1))).add(PLAYED)


async def test_a_pass_that_fails_says_whose_it_was():
    def fail(request):
        raise BackendError("no memory is left.")

    reference = ReferenceModel(FakeInfer(fail))
    with pytest.raises(WorkError, match="the base model, could not score a game: no memory is left"):
        await reference.add(PLAYED)
    before = reference.seconds
    assert reference.seconds == before  # nothing is under way any more


def test_a_reference_with_other_tokens_is_refused():
    with pytest.raises(UsageError, match="Name a model with the same tokenizer"):
        check_tokens(spec_of(), ModelSpec("tiny", kind="text"))
    check_tokens(spec_of(), spec_of(seed=1))


async def test_a_run_keeps_the_reference_of_each_token(tmp_path):
    given = {"env": "arithmetic", "model": "tiny", "groups": 2, "samples_per_group": 2, "max_new_tokens": 4}
    found = {}
    for reference in ("inline", "deferred"):
        played = Rollouts(Setup(), **given, reference=reference, out=tmp_path / reference)
        backend = InProcess(Setup(played.model()), slots=4, context=512)
        async with Session(backend, AtOnce()) as infer:
            told = [progress async for progress in played.run(infer)]
        assert told[-1].done == 2
        found[reference] = sorted(read(tmp_path / reference), key=lambda one: one.number)
    for groups in found.values():
        assert all(one.reference_s > 0 for one in groups)
        for one in (told for played in groups for told in played.turns()):
            assert one.reference_logprobs == pytest.approx(one.policy_logprobs, abs=1e-4)  # the same model


async def test_the_reference_under_an_adapter_is_the_base_whatever_version_is_in_force(tmp_path):
    spec = spec_of()
    folder = peft_folder(tmp_path / "policy", open_checkpoint(spec).shape, seed=3)
    given = {"env": "arithmetic", "model": spec.name, "groups": 3, "samples_per_group": 2, "max_new_tokens": 6}
    played = Rollouts(
        Setup(),
        **given,
        plain=True,
        adapter=[f"policy={folder}"],
        reference="deferred",
        trainer_seconds=0.0,
        steps=tmp_path / "steps.jsonl",
        out=tmp_path / "record",
    )
    backend = InProcess(Setup(played.model()), slots=4, context=256)
    async with Session(backend, AtOnce()) as infer:
        told = [progress async for progress in played.run(infer)]
    assert told[-1].done == 3
    for one in read(tmp_path / "record"):
        for context, turns in pairs(one):
            expected = separately(spec.name, context)
            start = len(turns[0].prompt_tokens)
            assert turns[0].reference_logprobs == pytest.approx(expected[start - 1 :], abs=1e-4)
            assert turns[0].policy_logprobs != pytest.approx(turns[0].reference_logprobs, abs=1e-3)
            assert turns[0].spans[0].version.startswith("policy@v")
    steps = list(read_steps(tmp_path / "steps.jsonl"))
    assert all(step.kl > 0 and step.reference_share > 0 for step in steps)
    assert any(step.reference_s > 0 for step in steps)  # of one it may have been over before
