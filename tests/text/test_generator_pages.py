"""Pages of keys and values: found by content, shared, copied when written, given back; and what is done when there are
too few.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from text.pages_held import all_free, check_pages
from text.toy import LETTERS, add, alone, finish, joined, prompt, run, toy_generator

from gpuinfer.errors import BadPrompt, BadResult
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.generator.page_pool import PagePool, PrefixTree
from gpuinfer.text.transformer import PAGE

pytestmark = pytest.mark.usefixtures("ahead")

SYSTEM = "a system prompt of forty tokens, this is"  # 40
NAN = "?"


def text_of(length: int, first: int = 0) -> str:
    return "".join(LETTERS[(first + number * 7) % 31] for number in range(length))


def finished(generator):
    """Step to the end, and look at the pages after each step: the outcomes, and how many rows gave theirs back."""
    steps = []
    outcomes = finish(generator, lambda stepped: (steps.append(stepped), check_pages(generator)))
    all_free(generator)
    return outcomes, sum(stepped.preempted for stepped in steps)


# Sharing


def test_samples_of_a_prompt_share_its_full_pages_and_have_copies_of_the_last_one():
    generator = toy_generator(slots=8, length=128, step_tokens=128)
    add(generator, prompt(text_of(70), 40, samples=8))
    read = [generator.step().extent.read]
    table = generator._table
    assert {tuple(row[:2]) for row in table.pages.tolist()} == {tuple(table.pages[0, :2].tolist())}
    assert len({row[2] for row in table.pages.tolist()}) == 8
    assert generator.decoder.copied == 7
    outcomes = finish(generator, lambda stepped: read.append(stepped.extent.read))
    assert outcomes[0].completions == alone(prompt(text_of(70), 40, samples=8), 128)
    assert read == [70] + [64 + 8 * (6 + number) for number in range(1, 40)]  # shared pages are read once
    all_free(generator)


def test_a_tree_of_prompts_is_computed_branch_by_branch():
    """System, game, power, sample: what two have in common is computed once, whoever comes first."""
    generator = toy_generator(slots=12, length=256, step_tokens=64)
    system, games = text_of(64), [text_of(32, 3), text_of(32, 5)]
    powers = [text_of(32, 8 + number) for number in range(3)]
    prompts = [prompt(system + game + power, samples=2) for game in games for power in powers]
    outcomes = run(generator, prompts)
    assert [outcome.completions for outcome in outcomes] == [alone(one, 256) for one in prompts]
    assert [one.prompt_tokens - one.cached_tokens for one in outcomes] == [128, 32, 32, 64, 32, 32]
    all_free(generator)


def test_a_chat_that_goes_on_takes_over_all_full_pages():
    generator = toy_generator(length=256, step_tokens=64)
    tokens, cached = tuple(range(25)) * 2, []
    for _ in range(3):
        asked = Prompt(tokens=tokens, sampling=Sampling(max_tokens=30, ignore_eos=True))
        [outcome] = run(generator, [asked])
        cached.append(outcome.cached_tokens)
        assert outcome.completions == alone(asked, 256)
        tokens += (*outcome.completions[0].tokens, 1, 2, 3, 4, 5, 6, 7)
    assert cached == [0, 64, 96 + 20]  # of 79, and of 116 tokens: 16 and more beyond a page are copied
    all_free(generator)


def test_what_there_is_no_page_to_copy_into_is_computed_and_not_said_to_be_cached():
    """The page that is half alike must itself give way to the row's second page."""
    generator = toy_generator(slots=1, length=64, pages=2, step_tokens=64)
    run(generator, [prompt(text_of(20), 1)])
    add(generator, prompt(text_of(20) + text_of(20, 5), 1))
    stepped = generator.step()
    [(_, outcome)] = stepped.finished
    assert (stepped.tokens, stepped.cached, outcome.cached_tokens) == (40, 0, 0)


def test_what_other_weights_have_computed_is_free_when_its_rows_are_done():
    generator = toy_generator(length=128, pages=12)
    run(generator, [prompt(text_of(100))])
    add(generator, prompt(text_of(40, 9), 60))
    generator.step()
    generator.update("v1", 5)
    assert len(generator._admission.pages.pool) == 12 - 2
    assert finished(generator)[0][0].versions == ("", "v1")
    assert run(generator, [prompt(text_of(100))])[0].cached_tokens == 0


# What is no number


def spoiling_generator(**options):
    """With a decoder for which what comes with NAN in a chunk is NaN too, also before it."""
    generator = toy_generator(length=128, **options)
    generator.decoder.nan = LETTERS.index(NAN)
    return generator


def plain(length: int, first: int = 0) -> str:
    return text_of(length, first).replace(NAN, "a")


def findable(generator, text):
    [prepared] = generator.prepare([prompt(text)])
    return generator._admission.pages.tree.find(0, prepared.tokens).tokens


HEALTHY = prompt(SYSTEM + plain(20), temperature=0.0, samples=2)


def test_what_a_row_without_numbers_has_computed_is_not_found_by_others():
    generator = spoiling_generator(step_tokens=128)
    [failed] = run(generator, [prompt(SYSTEM + NAN)])
    assert isinstance(failed, BadResult)
    assert not findable(generator, SYSTEM)
    assert run(generator, [HEALTHY])[0].completions == alone(HEALTHY, 128)
    all_free(generator)


@pytest.mark.parametrize("step_tokens", [8, 50, 70, 300])
@pytest.mark.parametrize("common", [SYSTEM, SYSTEM[:20]], ids=["a page", "half a page"])
def test_rows_that_share_what_is_no_number_are_computed_anew_by_themselves(step_tokens, common):
    """They wait for the first one's pages, which are found before anybody has looked at its logits."""
    generator = spoiling_generator(slots=6, step_tokens=step_tokens)
    drawn = {"samples": 2, "temperature": 0.9, "logprobs": 1, "logit_bias": {LETTERS.index(NAN): -100.0}}
    others = [prompt(common + plain(20, number), **drawn) for number in range(2)]
    add(generator, prompt(common + NAN + plain(70)), *others, parts=True)
    outcomes, preempted = finished(generator)
    assert isinstance(outcomes[0], BadResult)
    assert [outcomes[number].completions for number in (1, 2)] == [alone(one, 128) for one in others]
    assert not preempted


def test_what_a_cancelled_row_has_left_fails_nobody():
    generator = spoiling_generator(step_tokens=48)
    add(generator, prompt(SYSTEM + NAN + plain(60)))
    generator.step()
    assert findable(generator, SYSTEM) == PAGE
    assert generator.cancel(0)
    for _ in range(2):
        assert run(generator, [HEALTHY])[0].completions == alone(HEALTHY, 128)
    assert findable(generator, SYSTEM + plain(20)) == 60  # the second time by a row that had computed it all
    all_free(generator)


# Eviction


def tree_of(pages: int, cost=lambda start, count: float(count)) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(pages)
    return pool, PrefixTree(pool, cost)


def page_of(number: int, count: int = PAGE) -> np.ndarray:
    return np.arange(number, number + count, dtype=np.int32)


def held(pool, tree, *tokens, adapter=0):
    """Pages with these tokens one behind the other, that no row has any more."""
    node, pages = tree.root(adapter), []
    for own in tokens:
        there = node.children.get(own.tobytes())
        if there is None:
            there = tree.add(node, own.tobytes(), pool.take(1)[0])
        else:
            tree.share(np.array([there.page]))
        node = there
        pages.append(node.page)
    tree.leave(np.array(pages))
    return pages


def test_what_costs_more_to_compute_stays_longer_and_goes_in_the_end():
    pool, tree = tree_of(4, lambda start, count: count * (1 + start / PAGE))

    def evicted():
        before = set(pool._free)
        tree.evict()
        return set(pool._free) - before

    _, dear = held(pool, tree, page_of(0), page_of(100))
    [cheap] = held(pool, tree, page_of(200))
    assert evicted() == {cheap}
    for number in range(3, 30):  # each is worth less than the dear one, until the clock has come so far
        held(pool, tree, page_of(100 * number))
        if dear in evicted():
            return
    raise AssertionError("it stays for ever")


def test_pages_are_an_adapters_own_take_no_memory_by_use_and_are_copied_if_that_is_worth_while():
    pool, tree = tree_of(4)
    for _ in range(1000):
        held(pool, tree, page_of(0), adapter=1)
    assert len(tree._leaves) <= 2 * 4 + 65
    assert (tree.find(0, page_of(0)).tokens, tree.find(1, page_of(0)).tokens) == (0, PAGE)
    tree.forget(1)
    assert tree.find(1, page_of(0)).tokens == 0
    assert len(pool) == 4
    held(pool, tree, page_of(0), page_of(100, 20))
    for common, expected in [(15, PAGE), (16, PAGE + 16), (19, PAGE + 19), (32, PAGE + 20)]:
        tokens = np.concatenate([page_of(0), page_of(100, common), page_of(900, 5)])
        assert tree.find(0, tokens).tokens == expected


# Too few pages


def test_a_step_tells_how_many_rows_wait_and_the_oldest_row_is_never_stopped():
    generator = toy_generator(slots=8, length=128, pages=5)
    add(generator, *(prompt(text_of(40, number)) for number in range(8)))
    assert [generator.step().waited for _ in range(2)] == [6, 0]

    generator, steps, ends = toy_generator(slots=4, length=128, pages=4), 0, []
    add(generator, *(prompt(text_of(20, number), 100) for number in range(4)))
    while generator.busy:
        ends += [ticket for ticket, _ in generator.step().finished]
        steps += 1
        if not ends:
            assert generator._table.held[0]
            assert steps <= 100 + 1
    assert ends == [0, 1, 2, 3]


WATCHED = {
    "drawn": {"temperature": 0.8, "seed": 3, "ignore_eos": True},
    "penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "ignore_eos": True},
    "stopped": {"stop": ("qu", "x."), "ignore_eos": True},
    "with log-probabilities": {"logprobs": 2, "ignore_eos": True},
    "worth": {"processed_logprobs": True, "ignore_eos": True},
    "echoed": {"prompt_logprobs": 1, "ignore_eos": True},
    "a regex": {"constraint": Constraint(regex="[a-f]{60}( x)*")},
    "a list": {"constraint": Constraint(choice=("a" * 50 + "b", "a" * 50 + "c"))},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("pages", [4, 5, 7])
@pytest.mark.parametrize("kind", WATCHED)
def test_an_answer_that_was_stopped_is_the_one_that_it_would_have_been(kind, pages):
    """Also what is given out of it while it grows."""
    sampling = Sampling(max_tokens=70, **WATCHED[kind])
    prompts = [
        Prompt(text=text_of(20 + 9 * number, number), key=f"{number}", samples=1 + number % 2, sampling=sampling)
        for number in range(4)
    ]
    expected = run(toy_generator(slots=6, length=128), prompts)
    short, given, waited = toy_generator(slots=6, length=128, pages=pages), [], []
    watch = lambda stepped: (waited.append(stepped.waited), check_pages(short))  # noqa: E731
    outcomes = run(short, prompts, given, watch)
    assert sum(waited)
    for number, (outcome, whole) in enumerate(zip(outcomes, expected, strict=True)):
        assert outcome.completions == whole.completions
        assert outcome.prompt_logprobs == whole.prompt_logprobs
        assert joined([part for to, part in given if to == number]) == list(outcome.completions)
    all_free(short)


def test_more_samples_than_there_are_pages_go_one_after_another():
    generator, asked = toy_generator(slots=8, length=128, pages=4), prompt(text_of(40), 12, samples=8)
    add(generator, asked)
    assert finished(generator)[0][0].completions == alone(asked, 128)


def test_a_row_with_an_adapter_is_computed_again_with_it():
    generator = toy_generator(slots=4, length=128, pages=5)
    generator.load_adapter("policy", "v1", 7)
    asked = [structs.replace(prompt(text_of(20), 80), adapter=adapter) for adapter in ("policy", None, "policy")]
    add(generator, *asked)
    generator.step()
    generator.unload_adapter("policy")
    outcomes, preempted = finished(generator)
    assert preempted
    for number, one in enumerate(asked):
        expected = alone(one, 128, weights=7 if one.adapter else 0)
        assert outcomes[number].completions[0].tokens == expected[0].tokens
    assert not generator.decoder.loaded


def test_a_stopped_row_keeps_what_old_weights_have_drawn_and_goes_on_with_the_new_ones():
    generator = toy_generator(slots=2, length=128, pages=5)
    prompts = [prompt(text_of(20, number), 90) for number in range(2)]
    add(generator, *prompts)
    while not any(row.resumed for row in generator._admission._queue):
        generator.step()
    drawn = len(generator._admission._queue[0].known) - 20
    generator.update("v1", 5)
    [completion] = finished(generator)[0][1].completions
    assert completion.versions == ((0, ""), (drawn, "v1"))
    assert completion.tokens[:drawn] == alone(prompts[1], 128)[0].tokens[:drawn]
    other = toy_generator(slots=2, length=128)
    other.update("v1", 5)
    begun = structs.replace(prompts[1], begun=(completion.tokens[:drawn],))
    assert run(other, [begun])[0].completions[0].tokens == completion.tokens


def test_a_row_that_all_pages_would_not_hold_is_refused_with_the_cure():
    generator = toy_generator(slots=4, length=128, pages=2)
    [refused, fits] = generator.prepare([prompt(text_of(40), 30), prompt(text_of(40), 24)])
    assert isinstance(refused, BadPrompt)
    assert "70 tokens" in str(refused)
    assert "-B pages=3" in str(refused)
    assert not isinstance(fits, Exception)
