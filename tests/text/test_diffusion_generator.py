"""What becomes of prompts that a diffusion model answers."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapters.random_adapters import merged, random_adapter
from msgspec import structs
from text.decoders import DECODERS
from text.toy import LETTERS, add, finish, joined
from text.unmasking import END, KINDS, MASK, Scripted, answered, decoder_of, generator_over, prompt_of, run, weights_of

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config import blame, registry
from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Constraint, Prompt, Sampling, Unmasking
from gpuinfer.report.report import unmasking
from gpuinfer.serving.monitoring.metrics import exposition, snapshot_families
from gpuinfer.stats import DIFFUSION_COUNTS, DiffusionCounters, Snapshot
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Decision, UnmaskingDecoder
from gpuinfer.text.generator.driver import DriverCounters
from gpuinfer.text.model import TextModel
from gpuinfer.text.text_options import TorchModelOptions

NAMES = registry.names("decoders")
CAUSAL = KINDS["blocks of 4"]


def script(text: str, confidence: float = 0.95) -> list[tuple[int, float]]:
    """Token and confidence for each letter; "#" is the end token."""
    return [(END if letter == "#" else LETTERS.index(letter), confidence) for letter in text]


def scripted(text: str, prompt: str = "ab", **given: object) -> Scripted:
    return Scripted(script(text), len(prompt), **given)


# When an answer ends

B = LETTERS.index("b")


@pytest.mark.parametrize(
    ("says", "asked", "text", "ended"),
    [
        ("hello wo", {"max_tokens": 7, "block_length": 3}, "hello w", ("length", None)),
        ("hello wo", {"max_tokens": 8, "block_length": 4}, "hello wo", ("length", None)),
        ("hello wo", {"max_tokens": 5, "block_length": 8}, "hello", ("length", None)),
        ("hello wo", {"max_tokens": 1}, "h", ("length", None)),
        ("hello", {"max_tokens": 0}, "", ("length", None)),
        ("abc#xyz", {"max_tokens": 7}, "abc", ("stop", None)),
        ("#b#bcd", {"max_tokens": 6, "min_tokens": 3, "stop_token_ids": (B,)}, None, ("stop", B)),
        ("hello world", {"max_tokens": 11, "stop": ("wor",)}, "hello ", ("stop", "wor")),
    ],
)
def test_an_answer_ends(says, asked, text, ended):
    decoder = scripted(says)
    if says == "abc#xyz":  # the surest is the end, and comes when there is no mask before it
        decoder.script = [*script("abc", 0.4), (END, 0.99), *script("xyz", 0.9)]
    completion = answered(generator_over(decoder), prompt_of("ab", **asked))
    assert (completion.finish_reason, completion.stop_reason) == ended
    if text is None:  # neither end nor stop token come before min_tokens
        assert not {END, B} & set(completion.tokens[:3])
        assert completion.tokens[3:] == (B,)
    else:
        assert completion.text == text
        assert len(completion.tokens) == len(text) + (ended == ("stop", None))


def test_end_tokens_can_be_ignored():
    completion = answered(generator_over(scripted("he#lo")), prompt_of("ab", 5, ignore_eos=True))
    assert (completion.tokens, completion.finish_reason) == ((7, 4, END, 11, 14), "length")


# What happens to the canvas


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "block", "steps"), [(12, 4, None), (11, 4, 5), (9, None, 3)])
def test_prompts_stay_as_they_are_and_no_token_is_committed_twice(name, length, block, steps):
    decoder = Scripted([(n % 9, 0.3 + 0.6 * ((7 * n) % 10) / 10) for n in range(12)], prompt=4)
    prompt = prompt_of("a b!", length, decoder=name, block_length=block, steps=steps, cache="none")
    completion = answered(generator_over(decoder), prompt)
    assert completion.tokens == tuple(n % 9 for n in range(length))
    canvases = [step.tokens for step in decoder.steps]
    for before, after in itertools.pairwise(canvases):
        known = before != MASK
        assert (after[:4] == canvases[0][:4]).all()
        assert (after[known] == before[known]).all()
        assert (after == MASK).sum() < (before == MASK).sum()
    block = block or length
    for canvas in canvases:  # the next block waits for the whole of this one
        masked = np.flatnonzero(canvas == MASK) - 4
        assert (np.arange(masked[0] // block * block + block, length)[:, None] == masked).any(1).all()


WHOLE, NEAR = [(0, 64)], [(0, 64)] * 4 + [(0, 40)] * 2


@pytest.mark.parametrize(
    ("cache", "length", "steps", "reached"),
    [
        ("none", 40, 4, [(0, 44)] * 4),
        ("prefix", 40, 4, [(0, 44), (4, 44), (0, 44), (24, 44)]),
        ("dual", 40, 4, [(0, 44), (4, 24), (0, 44), (24, 44)]),
        ("vicinity", 40, 4, [(0, 44)] * 4),
        ("vicinity", 60, 18, [*NEAR, *WHOLE, *[(8, 60)] * 5, *WHOLE, *[(28, 64)] * 5]),  # what lies beside the block
    ],
)
def test_what_a_cache_keeps_is_not_computed_again(cache, length, steps, reached):
    decoder = scripted("a" * length, prompt="abcd")
    answered(generator_over(decoder), prompt_of("abcd", length, steps=steps, block_length=20, cache=cache))
    assert [(step.starts[0], step.starts[0] + step.lengths[0]) for step in decoder.steps] == reached


def test_exact_computes_a_finished_block_once_more_with_the_next_and_the_last_block_is_whole():
    decoder = Scripted(script("a" * 10), prompt=6, masking=CAUSAL)
    answered(generator_over(decoder), prompt_of("abcdef", 10, steps=6, cache="exact"))
    reached = [(step.starts[0], step.starts[0] + step.lengths[0]) for step in decoder.steps]
    assert reached == [(0, 8), (4, 8), (4, 12), (8, 12), (8, 16), (12, 16)]
    assert [step.sees.tolist() for step in decoder.steps[:2]] == [[4] * 4 + [8] * 4, [8] * 4]
    decoder = Scripted(script("abcdefgh"), prompt=3, masking=CAUSAL)
    assert answered(generator_over(decoder), prompt_of("abc", 3)).text == "abc"
    assert max(step.starts[0] + step.lengths[0] for step in decoder.steps) == 8


@pytest.mark.parametrize("kind", ["blocks of 4", "blocks of 8"])
@pytest.mark.parametrize("step_tokens", [1, 16, 1000])
def test_exact_answers_as_if_nothing_were_kept_and_long_prompts_go_through_in_pieces(kind, step_tokens):
    exact, none = (
        answered(
            generator_over(decoder_of(kind, 2, 72), tokens), prompt_of("a long prompt, it is. " * 2, 21, cache=cache)
        )
        for cache, tokens in (("exact", step_tokens), ("none", 1000))
    )
    assert exact == none


def test_guidance_runs_a_twin_whose_prompt_is_masked():
    decoder = scripted("hello")
    assert answered(generator_over(decoder), prompt_of("ab", 5, cfg_scale=2.0)).text == "hello"
    for step in decoder.steps:
        own, twin = step.tokens[:7], step.tokens[7:]
        assert own[:2].tolist() == [0, 1]
        assert twin[:2].tolist() == [MASK, MASK]
        assert (own[2:] == twin[2:]).all()


def test_log_probabilities_are_those_of_the_step_that_committed_a_token():
    """So they are those of a forward over the canvas as it stood then."""
    decoder = Scripted([(1, 0.5), (2, 0.9)], prompt=2)
    generator = generator_over(decoder)
    add(generator, prompt_of("ab", 2, logprobs=1))
    generator.step()
    decoder.script = [(1, 0.7), (3, 0.8)]
    (completion,) = finish(generator)[0].completions
    assert completion.tokens == (1, 2)
    assert [one.chosen.logprob for one in completion.logprobs] == pytest.approx([math.log(0.7), math.log(0.9)])
    assert [one.likeliest[0] for one in completion.logprobs] == [one.chosen for one in completion.logprobs]


# Rows beside one another


def test_when_not_all_rows_fit_into_a_step_those_that_came_first_go_first():
    generator, steps = generator_over(scripted("a" * 30, prompt=""), step_tokens=20), []
    add(generator, *[prompt_of("ab", 6)] * 4)
    assert list(finish(generator, steps.append)) == [0, 1, 2, 3]
    assert [(stepped.rows, stepped.held) for stepped in steps] == [(2, True)] * 6 + [(2, False)] * 6


def test_canvases_wait_for_pages_and_give_them_back():
    """A canvas has all of its pages when it begins: two of 40 positions do not fit into three, nor a guided one."""
    generator, steps = generator_over(scripted("a" * 40, prompt="", pages=3), step_tokens=1000), []
    add(generator, prompt_of("ab", 38), prompt_of("ab", 38), prompt_of("ab", 20, cfg_scale=1.0))
    outcomes = finish(generator, steps.append)
    assert (steps[0].rows, steps[0].waited) == (1, 1)
    assert [(n, one.completions[0].text) for n, one in outcomes.items()] == [
        (0, "a" * 38),
        (1, "a" * 38),
        (2, "a" * 20),
    ]
    assert len(generator._slots.pool) == 3


def test_guided_rows_wait_for_two_slots_and_may_be_cancelled_there():
    generator = generator_over(scripted("hello", slots=3))
    add(generator, *[prompt_of("ab", 5, cfg_scale=1.0)] * 2)
    assert generator.free_slots == 0
    assert generator.step().rows == 1
    assert generator.cancel(1)
    assert generator.free_slots == 1
    add(generator, prompt_of("ab", 5, cfg_scale=1.0), first=2)
    assert list(finish(generator)) == [0, 2]
    assert generator.free_slots == 3


# Decoders that fail


class Noting(UnmaskingDecoder):
    """Notes what is said to be under way while it is asked."""

    under_way = ()

    def decide(self, kept, view):
        self.under_way = tuple((call.plugin, call.method) for call in blame.calls_within())
        return Decision(np.ones(len(view.positions), np.bool_))


def test_a_decoder_that_is_asked_can_be_named_as_long_as_it_does_not_come_back():
    noting = Noting()
    run(generator_over(scripted("hello wo"), choose=lambda sampling, name: noting), [prompt_of("ab", 8)])
    assert noting.under_way == ((noting, "decide"),)
    assert blame.calls_within() == []


def faulty(name, **methods):
    """A kind of decoder that commits nothing, with these methods; an error in the place of one is raised."""

    def raising(error):
        def method(self, *given):
            raise error

        return method

    methods = {one: raising(method) if isinstance(method, BaseException) else method for one, method in methods.items()}
    idle = {"decide": lambda self, kept, view: Decision(np.zeros(len(view.positions), np.bool_))}
    return type(name, (UnmaskingDecoder,), {**idle, **methods, "__module__": __name__})


def committing(which, *edits):
    return lambda self, kept, view: Decision(which(len(view.positions)), *edits)


def everything(count):
    return np.ones(count, np.bool_)


def writing(self, kept, view):
    view.tokens[:] = 1 << 20


def infinite(self, kept, positions, logits):
    logits[0] = np.inf


ONE = committing(lambda count: np.arange(count) == 0)
FAULTY = [
    (faulty("Infinite", adjust=infinite), "adjust left NaN or +inf"),
    (faulty("Writing", decide=writing), "decide raised ValueError: assignment destination is read-only"),
    (faulty("Leaving", decide=SystemExit(3)), "decide raised SystemExit: 3"),
    (faulty("Boundless", decide=ONE, blend=lambda self, kept, step: math.nan), "blend returned nan"),
    (faulty("Idle"), f"committed none of 8 masks in {MOST_IDLE} steps"),
    (faulty("Raising", decide=KeyError("what now")), "decide raised KeyError: 'what now'"),
    (faulty("Vague", decide=committing(lambda count: np.ones(count + 1, np.bool_))), "each of 8 masks"),
    (faulty("Silent", decide=lambda self, kept, view: None), "each of 8 masks"),
    (faulty("NoBeginning", begin=OSError("no file")), "begin raised OSError: no file"),
    (faulty("Overdone", adjust=ValueError("too much")), "adjust raised ValueError: too much"),
    (faulty("Editing", decide=committing(everything, np.ones(3, np.bool_))), "edits tokens that it was not shown"),
]


@pytest.mark.parametrize(("kind", "words"), FAULTY, ids=[kind.__name__ for kind, _ in FAULTY])
def test_a_decoder_fails_its_row_alone_and_is_named(kind, words):
    good = registry.load("decoders", "low-confidence")()
    generator = generator_over(scripted("hello wo"), choose=lambda sampling, name: kind() if sampling.seed else good)
    outcomes = run(generator, [prompt_of("ab", 8, seed=1), prompt_of("ab", 8), prompt_of("ab", 8, seed=2)])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, BackendError)  # which fails a row of `generate`, and no run
        assert all(said in str(outcome) for said in (kind.__name__, __name__, words))
    assert outcomes[1].completions[0].text == "hello wo"


# Refusals

BLOCKS = Scripted([], prompt=2, masking=replace(CAUSAL, guided=False))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"decoder": "low-confidenc"}, "Did you mean 'low-confidence'?"),
        ({"steps": 0}, "steps is 0"),
        ({"block_length": 0}, "block_length is 0"),
        ({"block_length": 2.5}, "block_length is 2.5"),
        ({"cfg_scale": -1.0}, "cfg_scale is -1.0"),
        ({"cfg_scale": float("nan")}, "cfg_scale is nan"),
        ({"cache": "exact"}, "Choose from none, prefix, dual, vicinity"),
        ({"constraint": Constraint(regex="a+")}, "any order"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"processed_logprobs": True}, "processed_logprobs"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"min_tokens": 9}, "min_tokens is 9"),
        ({"max_tokens": 60, "cfg_scale": 1.0}, "twice"),
        ({"max_tokens": 60, "cfg_scale": 1.0}, "-B pages=4"),
        ({"blocks": True, "block_length": 3}, "block_length is 3"),
        ({"blocks": True, "block_length": 8}, "block_length is 8"),
        ({"blocks": True, "cache": "dual"}, "Choose from none, exact"),
        ({"blocks": True, "cfg_scale": 1.0}, "not trained to be guided"),
    ],
)
def test_what_cannot_be_is_refused_before_it_takes_a_slot(given, words):
    decoder = BLOCKS if "blocks" in given else scripted("hello", pages=3)
    given = {name: value for name, value in given.items() if name != "blocks"}
    (refusal,) = generator_over(decoder).prepare([prompt_of("ab", **{"max_tokens": 8, **given})])
    assert isinstance(refusal, BadPrompt)
    assert words in str(refusal)


def test_what_an_answer_did_not_begin_with_is_refused():
    prompt = structs.replace(prompt_of("ab", 5), begun=((7, 5),))
    (outcome,) = run(generator_over(scripted("hello")), [prompt])
    assert isinstance(outcome, BadPrompt)
    assert "from token 2 on" in str(outcome)


# Troubles


def test_the_row_at_which_the_model_fails_fails_alone():
    decoder = scripted("hello", broken=LETTERS.index("?"))
    outcomes = run(generator_over(decoder, step_tokens=1000), [prompt_of(text, 5) for text in ("ab", "a?", "ba", "bb")])
    assert "failed on this prompt alone" in str(outcomes.pop(1))
    assert [outcome.completions[0].text for outcome in outcomes] == ["hello"] * 3


def test_when_memory_runs_out_fewer_rows_go_at_once_and_a_row_that_never_fits_fails():
    decoder = scripted("hello", room=16)
    outcomes = run(generator_over(decoder, step_tokens=1000), [prompt_of("ab", 5)] * 4)
    assert all(outcome.completions[0].text == "hello" for outcome in outcomes)
    assert max(len(step.pages) for step in decoder.steps) == 2
    decoder = scripted("hello world", slots=2, room=9)
    outcomes = run(generator_over(decoder, step_tokens=1000), [prompt_of("ab", 11), prompt_of("ab", 5)])
    assert "out of memory on a single row of 13 positions" in str(outcomes[0])
    assert outcomes[1].completions[0].text == "hello"


# Parts, weights, adapters, edits


def test_parts_are_the_committed_prefix():
    decoder = Scripted([*script("ab", 0.5), *script("cd", 0.9), *script("ef", 0.7)], prompt=2)
    parts: list = []
    (outcome,) = run(generator_over(decoder), [prompt_of("ab", 6)], parts)
    assert joined([part for _, part in parts]) == list(outcome.completions)
    assert [part.text for _, part in parts] == ["a", "bcdef"]  # what is behind a mask waits for it


def test_other_weights_compute_from_the_next_step_on_and_are_named():
    generator = generator_over(Scripted(script("aaaaaa"), prompt=2))
    add(generator, prompt_of("ab", 6))
    generator.step()
    generator.step()
    generator.update("v2", script("bbbbbb"))
    add(generator, prompt_of("ab", 6), first=1)
    under_way, new = (outcome for _, outcome in sorted(finish(generator).items()))
    assert under_way.completions[0].text == "aabbbb"
    assert (under_way.completions[0].versions, under_way.versions) == (((0, ""), (2, "v2")), ("", "v2"))
    assert (new.completions[0].versions, new.versions) == (((0, "v2"),), ("v2",))


def test_an_adapter_answers_as_the_merged_model_and_beside_the_model_itself():
    base = decoder_of("all see all", 4, 72)
    adapter, weights = random_adapter(base.shape, seed=3), weights_of("all see all")
    together = generator_over(base, step_tokens=1000)
    together.load_adapter("other", "v1", base.pack_adapter(adapter))
    plain = prompt_of("hello", 10, logprobs=0)
    with_it = structs.replace(plain, adapter="other")
    own, other = run(together, [plain, with_it])
    together.unload_adapter("other")
    merged_one = DECODERS["torch"](base.shape, merged(weights, adapter), torch.float32, slots=2, length=72)
    expected, [found] = answered(generator_over(merged_one), plain), other.completions
    assert own.completions[0] == answered(generator_over(base), plain)
    assert (found.tokens, found.versions) == (expected.tokens, ((0, "other@v1"),))
    told, wanted = ([one.chosen.logprob for one in answer.logprobs] for answer in (found, expected))
    assert told == pytest.approx(wanted, abs=1e-4)
    assert isinstance(together.prepare([with_it])[0], BadPrompt)


def test_what_may_yet_be_edited_is_not_given_out():
    """The script says "b" where the first step has committed "a": the edit comes before the block is told."""
    decoder = Scripted([*script("aaa", 0.9), (1, 0.8)], prompt=2)
    generator, parts = generator_over(decoder), []
    prompt = prompt_of("ab", 8, block_length=4, decoder="block-refinement", options={"edit_threshold": 0.5}, steps=8)
    add(generator, prompt, parts=True)
    first = generator.step()
    assert (first.committed, list(first.parts)) == (1, [])
    decoder.script = [*script("bcd", 0.9), (1, 0.8), *script("efgh", 0.9)]
    outcome = finish(generator, lambda stepped: parts.extend(part for _, part in stepped.parts))[0]
    assert outcome.completions[0].text == "bcdbefgh"
    assert joined(parts) == list(outcome.completions)
    assert parts[0].text == "bcdb"


def test_a_decoder_that_edits_for_ever_is_stopped():
    def decide(self, kept, view):
        return Decision(everything(len(view.positions)), everything(len(view.edited.positions)))

    decoder, restless = scripted("hello"), faulty("Restless", edits=True, decide=decide)
    completion = answered(generator_over(decoder, choose=lambda sampling, name: restless()), prompt_of("ab", 5))
    assert completion.text == "hello"
    assert len(decoder.steps) == MOST_IDLE + 1


# What steps are counted as

PROMPT, ANSWER, BLOCK = 10, 24, 8
CANVAS = PROMPT + ANSWER
SPEC = ModelSpec("tiny-llada", arguments={"slots": 4, "context": 64}, kind="text")


@pytest.fixture(scope="module")
def model():
    """As every road has it: from the driver's counters to `Backend.device`."""

    async def opened():
        return await TextModel.open(
            SPEC, Setup(model=SPEC, devices=("cpu",)), TorchModelOptions(threads=1), lambda rows, s: None
        )

    with asyncio.Runner() as runner:
        made = runner.run(opened())
        yield made
        runner.run(made.close())


def counted(model, *asked):
    """What answering such prompts came to, and the answers' tokens."""
    prompts = []
    for number, (how, more) in enumerate(asked):
        asked_for = {"unmasking": Unmasking(block_length=BLOCK, **how), "ignore_eos": True, **more}
        sampling = Sampling(max_tokens=ANSWER, temperature=0, **asked_for)
        tokens = tuple((7 * number + place) % 200 for place in range(PROMPT))
        prompts.append(Prompt(tokens=tokens, sampling=sampling, key="k"))
    counters = DriverCounters()
    outcomes = run(model._driver.generator, prompts, watch=lambda stepped: counters.add(stepped, 0.001))
    found = DiffusionCounters.of({name: getattr(counters, name) for name in DIFFUSION_COUNTS})
    return found, [outcome.completions[0].tokens for outcome in outcomes]


@pytest.mark.parametrize(
    ("asked", "forwards", "positions", "computed"),
    [
        pytest.param([{}, {}], 2 * ANSWER, 2 * ANSWER * CANVAS, None, id="a token a step over whole canvases"),
        pytest.param(
            [{"cache": "dual"}], ANSWER, ANSWER * CANVAS, 3 * CANVAS + (ANSWER - 3) * BLOCK, id="a block is anew"
        ),
        pytest.param([{"cfg_scale": 1.0}], ANSWER, 2 * ANSWER * CANVAS, None, id="guidance has a canvas of its own"),
        pytest.param([{"steps": 6}, {"steps": 12}], 18, 18 * CANVAS, None, id="fewer steps bring more tokens each"),
    ],
)
def test_steps_are_counted(model, asked, forwards, positions, computed):
    found, answers = counted(model, *((one, {}) for one in asked))
    assert [len(answer) for answer in answers] == [ANSWER] * len(asked)
    assert (found.useful, found.committed, found.idle) == (len(asked) * ANSWER, len(asked) * ANSWER, 0)
    assert (found.forwards, found.positions, found.computed) == (forwards, positions, computed or positions)


def test_what_follows_the_end_of_an_answer_is_committed_and_not_useful(model):
    """Stop tokens are what ends it here: a random model hardly says its own end."""
    (first,) = counted(model, ({"steps": 3}, {}))[1]
    found, (answer,) = counted(model, ({"steps": 3}, {"stop_token_ids": (first[3],), "ignore_eos": False}))
    assert len(answer) == first.index(first[3]) + 1 < BLOCK
    assert (found.useful, found.committed, found.forwards) == (
        len(answer),
        BLOCK,
        1,
    )  # other blocks are left as they are


def test_reports_and_metrics_tell_of_them_across_processes(model):
    found, _ = counted(model, ({"steps": 6}, {}))
    steps = dict(zip(DIFFUSION_COUNTS, (6, found.computed, ANSWER, found.positions, ANSWER, 0), strict=True))
    travelled = Snapshot.from_wire(Snapshot(slots=4, device={"tokens": {"output": ANSWER}, "steps": steps}).to_wire())
    assert unmasking(travelled) == found.plain()
    text = exposition(snapshot_families(travelled)).decode()
    assert "gpuinfer_forwards_total 6.0" in text
    assert f"gpuinfer_computed_positions_total {found.computed:.1f}" in text
    device = model.device()
    assert set(DIFFUSION_COUNTS) <= device["steps"].keys()
    assert (device["model"]["decoder"], device["model"]["cache"]) == ("low-confidence", "none")
