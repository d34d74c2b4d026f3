"""What becomes of prompts that a diffusion model answers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapters.random_adapters import merged, random_adapter
from text.decoders import DECODERS
from text.toy import LETTERS, joined
from text.unmasking import END, KINDS, MASK, Scripted, answered, decoder_of, generator_over, prompt_of, run, weights_of

from gpuinfer.config import blame, registry
from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Decision, UnmaskingDecoder

NAMES = registry.names("decoders")
CAUSAL = replace(KINDS["blocks of 4"])


def script(text: str, confidence: float = 0.95) -> list[tuple[int, float]]:
    """Token and confidence for each letter; "#" is the end token."""
    return [(END if letter == "#" else LETTERS.index(letter), confidence) for letter in text]


def scripted(text: str, prompt: str = "ab", **given: object) -> Scripted:
    return Scripted(script(text), len(prompt), **given)


# When an answer ends


def test_an_answer_is_as_long_as_was_asked_for_whatever_the_block():
    for length, block in [(7, 3), (8, 4), (5, 8), (1, None), (6, None)]:
        generator = generator_over(scripted("hello wo"))
        completion = answered(generator, prompt_of("ab", length, block_length=block))
        assert completion.text == "hello wo"[:length]
        assert completion.finish_reason == "length"


def test_the_end_token_ends_an_answer_once_there_is_no_mask_before_it():
    decoder = Scripted([*script("abc", 0.4), (END, 0.99), *script("xyz", 0.9)], prompt=2)
    completion = answered(generator_over(decoder), prompt_of("ab", 7))
    assert (completion.text, completion.tokens) == ("abc", (0, 1, 2, END))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_end_tokens_can_be_ignored():
    completion = answered(generator_over(scripted("he#lo")), prompt_of("ab", 5, ignore_eos=True))
    assert completion.tokens == (7, 4, END, 11, 14)
    assert completion.finish_reason == "length"


def test_neither_end_nor_stop_token_come_before_min_tokens():
    stop = LETTERS.index("b")
    completion = answered(
        generator_over(scripted("#b#bcd")), prompt_of("ab", 6, min_tokens=3, stop_token_ids=(stop,), ignore_eos=False)
    )
    assert END not in completion.tokens[:3]
    assert stop not in completion.tokens[:3]
    assert completion.tokens[3:] == (stop,)
    assert completion.stop_reason == stop


def test_a_stop_string_ends_an_answer_where_it_begins():
    completion = answered(generator_over(scripted("hello world")), prompt_of("ab", 11, stop=("wor",)))
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hello ", "stop", "wor")
    assert len(completion.tokens) == 6


def test_no_answer_is_wanted():
    completion = answered(generator_over(scripted("hello")), prompt_of("ab", 0))
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", (), "length")


# What happens to the canvas


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "block", "steps"), [(12, 4, None), (11, 4, 5), (9, None, 3)])
def test_prompts_stay_as_they_are_and_no_token_is_committed_twice(name, length, block, steps):
    decoder = Scripted([(n % 9, 0.3 + 0.6 * ((7 * n) % 10) / 10) for n in range(12)], prompt=4)
    prompt = prompt_of("a_b!".replace("_", " "), length, decoder=name, block_length=block, steps=steps, cache="none")
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


@pytest.mark.parametrize(
    ("cache", "reached"),
    [
        ("none", [(0, 44)] * 4),
        ("prefix", [(0, 44), (4, 44), (0, 44), (24, 44)]),
        ("dual", [(0, 44), (4, 24), (0, 44), (24, 44)]),
        ("vicinity", [(0, 44)] * 4),
    ],
)
def test_what_a_cache_keeps_is_not_computed_again(cache, reached):
    decoder = scripted("a" * 40, prompt="abcd")
    answered(generator_over(decoder), prompt_of("abcd", 40, steps=4, block_length=20, cache=cache))
    assert [(step.starts[0], step.starts[0] + step.lengths[0]) for step in decoder.steps] == reached


def test_vicinity_computes_what_lies_beside_the_block():
    decoder = scripted("a" * 60, prompt="abcd", length=64)
    answered(generator_over(decoder), prompt_of("abcd", 60, steps=18, block_length=20, cache="vicinity"))
    reached = [(step.starts[0], step.starts[0] + step.lengths[0]) for step in decoder.steps]
    assert reached == [(0, 64)] * 4 + [(0, 40)] * 2 + [(0, 64)] + [(8, 60)] * 5 + [(0, 64)] + [(28, 64)] * 5


def test_exact_computes_a_finished_block_once_more_with_the_next():
    decoder = Scripted(script("a" * 10), prompt=6, masking=CAUSAL)
    answered(generator_over(decoder), prompt_of("abcdef", 10, steps=6, cache="exact"))
    reached = [(step.starts[0], step.starts[0] + step.lengths[0]) for step in decoder.steps]
    assert reached == [(0, 8), (4, 8), (4, 12), (8, 12), (8, 16), (12, 16)]
    assert [step.sees.tolist() for step in decoder.steps[:2]] == [[4] * 4 + [8] * 4, [8] * 4]


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


def test_in_block_causal_models_the_last_block_is_whole_and_the_answer_as_long_as_asked():
    decoder = Scripted(script("abcdefgh"), prompt=3, masking=CAUSAL)
    completion = answered(generator_over(decoder), prompt_of("abc", 3))
    assert completion.text == "abc"
    assert max(step.starts[0] + step.lengths[0] for step in decoder.steps) == 8


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
    generator.add("one", generator.prepare([prompt_of("ab", 2, logprobs=1)])[0])
    generator.step()
    decoder.script = [(1, 0.7), (3, 0.8)]
    ((_, outcome),) = generator.step().finished
    (completion,) = outcome.completions
    assert completion.tokens == (1, 2)
    assert [one.chosen.logprob for one in completion.logprobs] == pytest.approx([math.log(0.7), math.log(0.9)])
    assert [one.likeliest[0] for one in completion.logprobs] == [one.chosen for one in completion.logprobs]


# Rows beside one another


def test_when_not_all_rows_fit_into_a_step_those_that_came_first_go_first():
    decoder = scripted("a" * 30, slots=4, prompt="")
    generator = generator_over(decoder, step_tokens=20)
    for number, prepared in enumerate(generator.prepare([prompt_of("ab", 6)] * 4)):
        generator.add(number, prepared)
    taken, finished = [], []
    while generator.busy:
        stepped = generator.step()
        taken.append((stepped.rows, stepped.held))
        finished += [number for number, _ in stepped.finished]
    assert taken == [(2, True)] * 6 + [(2, False)] * 6
    assert finished == [0, 1, 2, 3]


def test_canvases_wait_for_pages_and_give_them_back():
    """A canvas has all of its pages when it begins: two of 40 positions do not fit into three, nor a guided one."""
    decoder = scripted("a" * 40, slots=4, prompt="", pages=3)
    generator = generator_over(decoder, step_tokens=1000)
    ready = generator.prepare([prompt_of("ab", 38), prompt_of("ab", 38), prompt_of("ab", 20, cfg_scale=1.0)])
    for number, prepared in enumerate(ready):
        generator.add(number, prepared)
    first = generator.step()
    assert (first.rows, first.waited) == (1, 1)
    finished = []
    while generator.busy:
        finished += [(ticket, outcome.completions[0].text) for ticket, outcome in generator.step().finished]
    assert finished == [(0, "a" * 38), (1, "a" * 38), (2, "a" * 20)]
    assert len(generator._slots.pool) == 3


def test_a_canvas_that_all_pages_would_not_hold_is_refused_with_the_cure():
    generator = generator_over(scripted("a" * 40, prompt="", pages=3))
    fits, guided = generator.prepare([prompt_of("ab", 60), prompt_of("ab", 38, cfg_scale=1.0)])
    assert not isinstance(fits, Exception)
    assert "-B pages=4" in str(guided)
    assert "twice" in str(guided)


def test_guided_rows_wait_for_two_slots_and_may_be_cancelled_there():
    generator = generator_over(scripted("hello", slots=3))
    ready = generator.prepare([prompt_of("ab", 5, cfg_scale=1.0)] * 3)
    generator.add(0, ready[0])
    generator.add(1, ready[1])
    assert generator.free_slots == 0
    assert generator.step().rows == 1
    assert generator.cancel(1)
    assert generator.free_slots == 1
    generator.add(2, ready[2])
    finished = []
    while generator.busy:
        finished += [ticket for ticket, _ in generator.step().finished]
    assert finished == [0, 2]
    assert generator.free_slots == 3


def test_what_was_done_is_counted():
    decoder = scripted("ab#defghij", prompt="abcd")
    generator = generator_over(decoder)
    generator.add("one", generator.prepare([prompt_of("abcd", 10, steps=5, block_length=5, cache="dual")])[0])
    stepped = []
    while generator.busy:
        stepped.append(generator.step())
    assert [one.positions for one in stepped] == [14, 14]
    assert [one.tokens for one in stepped] == [14, 5]
    assert [one.prompt_tokens for one in stepped] == [4, 0]
    assert [one.committed for one in stepped] == [2, 2]
    assert sum(one.output_tokens for one in stepped) == 3
    assert [one.idle for one in stepped] == [0, 0]


# What cannot be


class Idle(UnmaskingDecoder):
    def decide(self, kept, view):
        return Decision(np.zeros(len(view.positions), np.bool_))


class Raising(Idle):
    def decide(self, kept, view):
        raise KeyError("what now")


class Vague(Idle):
    def decide(self, kept, view):
        return Decision(np.ones(len(view.positions) + 1, np.bool_))


class Silent(Idle):
    def decide(self, kept, view):
        return None


class NoBeginning(Idle):
    def begin(self):
        raise OSError("no file")


class Overdone(Idle):
    def adjust(self, kept, positions, logits):
        raise ValueError("too much")


class Editing(Idle):
    def decide(self, kept, view):
        return Decision(np.ones(len(view.positions), np.bool_), np.ones(3, np.bool_))


class Infinite(Idle):
    def adjust(self, kept, positions, logits):
        logits[0] = np.inf


class Writing(Idle):
    def decide(self, kept, view):
        view.tokens[:] = 1 << 20
        return Decision(np.ones(len(view.positions), np.bool_))


class Leaving(Idle):
    def decide(self, kept, view):
        raise SystemExit(3)


class Boundless(Idle):
    def decide(self, kept, view):
        return Decision(np.arange(len(view.positions)) == 0)

    def blend(self, kept, step):
        return math.nan


class Noting(Idle):
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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(Infinite, "adjust left NaN or +inf", id="that makes logits infinite"),
        pytest.param(Writing, "decide raised ValueError: assignment destination is read-only", id="that draws itself"),
        pytest.param(Leaving, "decide raised SystemExit: 3", id="that wants to end it all"),
        pytest.param(Boundless, "blend returned nan", id="that blends with no number"),
        pytest.param(Idle, f"committed none of 8 masks in {MOST_IDLE} steps", id="that commits nothing"),
        pytest.param(Raising, "decide raised KeyError: 'what now'", id="that raises"),
        pytest.param(Vague, "each of 8 masks", id="that speaks of other masks"),
        pytest.param(Silent, "each of 8 masks", id="that says nothing"),
        pytest.param(NoBeginning, "begin raised OSError: no file", id="that cannot begin"),
        pytest.param(Overdone, "adjust raised ValueError: too much", id="that fails to change logits"),
        pytest.param(Editing, "edits tokens that it was not shown", id="that edits unseen tokens"),
    ],
)
def test_a_decoder_fails_its_row_alone_and_is_named(kind, words):
    good = registry.load("decoders", "low-confidence")()
    generator = generator_over(scripted("hello wo"), choose=lambda sampling, name: kind() if sampling.seed else good)
    outcomes = run(generator, [prompt_of("ab", 8, seed=1), prompt_of("ab", 8), prompt_of("ab", 8, seed=2)])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, BackendError)  # which fails a row of `generate`, and no run
        assert kind.__name__ in str(outcome)
        assert __name__ in str(outcome)
        assert words in str(outcome)
    assert outcomes[1].completions[0].text == "hello wo"
    assert generator.free_slots == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"decoder": "low-confidenc"}, "Did you mean 'low-confidence'?"),
        ({"threshold": 0.5}, "has no threshold"),
        ({"decoder": "threshold", "threshold": 1.5}, "threshold is 1.5"),
        ({"steps": 0}, "steps is 0"),
        ({"block_length": 0}, "block_length is 0"),
        ({"block_length": 2.5}, "block_length is 2.5"),
        ({"cfg_scale": -1.0}, "cfg_scale is -1.0"),
        ({"cfg_scale": float("nan")}, "cfg_scale is nan"),
        ({"cache": "exact"}, "Choose from none, prefix, dual, vicinity"),
        ({"options": {"nearness": 1}}, "has no option 'nearness'"),
        ({"constraint": Constraint(regex="a+")}, "any order"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"processed_logprobs": True}, "processed_logprobs"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"min_tokens": 9}, "min_tokens is 9"),
    ],
)
def test_what_cannot_be_is_refused_before_it_takes_a_slot(given, words):
    (refusal,) = generator_over(scripted("hello")).prepare([prompt_of("ab", 8, **given)])
    assert isinstance(refusal, BadPrompt)
    assert words in str(refusal)


def test_block_causal_models_refuse_what_does_not_fit_their_blocks():
    generator = generator_over(Scripted([], prompt=2, masking=replace(CAUSAL, guided=False)))
    asked = [{"block_length": 3}, {"block_length": 8}, {"cache": "dual"}, {"cfg_scale": 1.0}]
    words = ["block_length is 3", "block_length is 8", "Choose from none, exact", "not trained to be guided"]
    for refusal, word in zip(generator.prepare([prompt_of("ab", 8, **one) for one in asked]), words, strict=True):
        assert isinstance(refusal, BadPrompt)
        assert word in str(refusal)
    assert not isinstance(generator.prepare([prompt_of("ab", 8, block_length=2)])[0], Exception)


# Troubles


def test_the_row_at_which_the_model_fails_fails_alone():
    decoder = scripted("hello", slots=4, broken=LETTERS.index("?"))
    prompts = [prompt_of("ab", 5), prompt_of("a?", 5), prompt_of("ba", 5), prompt_of("bb", 5)]
    outcomes = run(generator_over(decoder, step_tokens=1000), prompts)
    assert "failed on this prompt alone" in str(outcomes[1])
    assert [outcome.completions[0].text for outcome in outcomes if outcome is not outcomes[1]] == ["hello"] * 3


def test_when_memory_runs_out_fewer_rows_go_at_once():
    decoder = scripted("hello", slots=4, room=16)
    outcomes = run(generator_over(decoder, step_tokens=1000), [prompt_of("ab", 5)] * 4)
    assert all(outcome.completions[0].text == "hello" for outcome in outcomes)
    assert max(len(step.pages) for step in decoder.steps) == 2


def test_a_row_for_which_there_is_no_memory_at_all_fails_and_the_others_go_on():
    decoder = scripted("hello world", slots=2, room=9)
    outcomes = run(generator_over(decoder, step_tokens=1000), [prompt_of("ab", 11), prompt_of("ab", 5)])
    assert "out of memory on a single row of 13 positions" in str(outcomes[0])
    assert outcomes[1].completions[0].text == "hello"


# Answers that are read while they grow, or have begun elsewhere


def test_parts_are_the_committed_prefix():
    decoder = Scripted([*script("ab", 0.5), *script("cd", 0.9), *script("ef", 0.7)], prompt=2)
    parts: list = []
    (outcome,) = run(generator_over(decoder), [prompt_of("ab", 6)], parts)
    assert joined([part for _, part in parts]) == list(outcome.completions)
    assert [part.text for _, part in parts] == ["a", "bcdef"]  # what is behind a mask waits for it


def test_what_an_answer_did_not_begin_with_is_refused():
    sampling = Sampling(max_tokens=5, temperature=0.0)
    (outcome,) = run(generator_over(scripted("hello")), [Prompt(text="ab", sampling=sampling, begun=((7, 5),))])
    assert isinstance(outcome, BadPrompt)
    assert "from token 2 on" in str(outcome)


# Other weights


def test_other_weights_compute_from_the_next_step_on_and_are_named():
    generator = generator_over(Scripted(script("aaaaaa"), prompt=2))
    one, other = generator.prepare([prompt_of("ab", 6)] * 2)
    generator.add("under way", one)
    generator.step()
    generator.step()
    generator.update("v2", script("bbbbbb"))
    generator.add("new", other)
    found = {}
    while generator.busy:
        found.update(generator.step().finished)
    assert found["under way"].completions[0].text == "aabbbb"
    assert found["under way"].completions[0].versions == ((0, ""), (2, "v2"))
    assert found["under way"].versions == ("", "v2")
    assert found["new"].completions[0].versions == ((0, "v2"),)
    assert found["new"].versions == ("v2",)


def test_an_adapter_answers_as_the_merged_model_and_beside_the_model_itself():
    base = decoder_of("all see all", 4, 72)
    adapter = random_adapter(base.shape, seed=3)
    weights = weights_of("all see all")
    together = generator_over(base, step_tokens=1000)
    together.load_adapter("other", "v1", base.pack_adapter(adapter))
    plain = prompt_of("hello", 10, logprobs=0)
    with_it = Prompt(text="hello", sampling=plain.sampling, adapter="other")
    own, other = run(together, [plain, with_it])
    together.unload_adapter("other")
    merged_one = DECODERS["torch"](base.shape, merged(weights, adapter), torch.float32, slots=2, length=72)
    expected = answered(generator_over(merged_one), plain)
    assert own.completions[0] == answered(generator_over(base), plain)
    assert other.completions[0].tokens == expected.tokens
    assert other.completions[0].versions == ((0, "other@v1"),)
    found = [one.chosen.logprob for one in other.completions[0].logprobs]
    assert found == pytest.approx([one.chosen.logprob for one in expected.logprobs], abs=1e-4)
    (refusal,) = together.prepare([with_it])
    assert isinstance(refusal, BadPrompt)


# Tokens that may be edited


def test_what_may_yet_be_edited_is_not_given_out():
    """The script says "b" where the first step has committed "a": the edit comes before the block is told."""
    decoder = Scripted([*script("aaa", 0.9), (1, 0.8)], prompt=2)
    generator = generator_over(decoder)
    prompt = prompt_of("ab", 8, block_length=4, decoder="block-refinement", options={"edit_threshold": 0.5}, steps=8)
    generator.add("one", replace(generator.prepare([prompt])[0], parts=True))
    first = generator.step()
    assert first.committed == 1
    decoder.script = [*script("bcd", 0.9), (1, 0.8), *script("efgh", 0.9)]
    parts, outcome = list(first.parts), None
    assert not parts
    while generator.busy:
        stepped = generator.step()
        parts += stepped.parts
        outcome = dict(stepped.finished).get("one")
    assert outcome.completions[0].text == "bcdbefgh"
    assert joined([part for _, part in parts]) == list(outcome.completions)
    assert parts[0][1].text == "bcdb"


class Restless(UnmaskingDecoder):
    """Edits all that it sees, for ever."""

    edits = True

    def decide(self, kept, view):
        return Decision(np.ones(len(view.positions), np.bool_), np.ones(len(view.edited.positions), np.bool_))


def test_a_decoder_that_edits_for_ever_is_stopped():
    decoder = scripted("hello")
    completion = answered(generator_over(decoder, choose=lambda sampling, name: Restless()), prompt_of("ab", 5))
    assert completion.text == "hello"
    assert len(decoder.steps) == MOST_IDLE + 1
