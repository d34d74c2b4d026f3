"""A generator under whatever a server does to it: slots always come back, and answers are what they are alone."""

from __future__ import annotations

import numpy as np
import pytest
from counts import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs
from text.guessing import FreeTokens, guessing
from text.pages_held import all_free, check_pages
from text.test_generator_properties import prompts
from text.toy import LETTERS, add, alone, joined, toy_generator

from gpuinfer.errors import BackendError, BadResult
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling

LENGTH = 64
POISON, NAN = LETTERS.index("?"), LETTERS.index("!")
BEGINNING, ALIKE = "a page begins so", 24  # as many tokens as are worth a copy; so many texts that begin with them
FORMS = [Constraint(choice=("hello there", "hello you", "good bye")), Constraint(regex="[a-f]{2,9}( x)*")]


class Served(RuleBasedStateMachine):
    """`asked`: what is open, with its weights; `expected`: what has been asked, None where weights changed within."""

    @initialize(
        slots=st.integers(2, 5),
        step_tokens=st.sampled_from([1, 3, 16, 300]),
        gather_steps=st.sampled_from([0, 2]),
        pages=st.sampled_from([None, 2, 3, 5, 21, 40]),
        nan=st.sampled_from([None, NAN]),
        ahead=st.booleans(),
        right=st.sampled_from([None, None, 0.6, 1.0]),
    )
    def start(self, slots, step_tokens, gather_steps, pages, nan, ahead, right):
        self.generator = toy_generator(slots, LENGTH, step_tokens, gather_steps=gather_steps, pages=pages, ahead=ahead)
        if right is not None:
            self.generator.speculate(guessing(LENGTH, right), 15, FreeTokens())
        self.generator.decoder.poison, self.generator.decoder.nan = POISON, nan if right is None else None
        self.open: dict[int, Prompt] = {}
        self.given: dict[int, list] = {}
        self.changed: set[int] = set()  # tickets under way when the weights changed
        self.count = self.weights = 0
        self.version = ""

    @rule(prompt=prompts, form=st.sampled_from([None, None, None, *FORMS]), parts=st.booleans(), data=st.data())
    def ask(self, prompt, form, parts, data):
        if form is not None:
            sampling = Sampling(max_tokens=16, constraint=form, temperature=prompt.sampling.temperature)
            prompt = structs.replace(prompt, sampling=sampling)
        elif data.draw(st.booleans(), label="begun"):
            known = alone(prompt, LENGTH, weights=self.weights)
            begun = tuple(one.tokens[: data.draw(st.integers(0, len(one.tokens)))] for one in known)
            prompt = structs.replace(prompt, begun=begun)
        if prompt.samples > self.generator.free_slots:
            return
        self.add(prompt, parts)

    @rule(first=st.integers(0, ALIKE - 1), count=st.integers(17, ALIKE + 6), max_tokens=st.sampled_from([1, 1, 20]))
    def ask_many_that_begin_alike(self, first, count, max_tokens):
        """More of them than the prefix tree looks through for the one that is most alike, and the first ones again when
        they are no more among those.
        """
        for number in range(first, first + count):
            for _ in range(500):
                if self.generator.free_slots:
                    break
                self.take(self.generator.step())
            sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self.add(Prompt(text=BEGINNING + LETTERS[number % ALIKE], sampling=sampling), parts=False)

    def add(self, prompt, parts):
        self.count += 1
        add(self.generator, prompt, first=self.count, parts=parts)
        self.open[self.count] = prompt
        if parts:
            self.given[self.count] = []

    @rule(ticket=st.integers(0, 40))
    def cancel(self, ticket):
        was_open = self.open.pop(ticket, None) is not None
        known = self.generator.cancel(ticket)
        assert known == was_open or ticket in self.finished_unseen()

    def finished_unseen(self):
        return {ticket for ticket, _ in self.generator.answers.finished}

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self.take(self.generator.step())

    @rule(weights=st.integers(0, 2))
    def update(self, weights):
        self.changed |= set(self.open)
        self.weights = weights
        self.version = f"{weights}"
        self.generator.update(self.version, weights)

    @rule(room=st.sampled_from([None, None, 1, 4]))
    def memory(self, room):
        self.generator.decoder.room = room

    def take(self, stepped):
        for ticket, part in stepped.parts:
            if ticket in self.open:
                self.given[ticket].append(part)
        for ticket, outcome in stepped.finished:
            prompt = self.open.pop(ticket, None)
            if prompt is None:
                continue  # it was cancelled as it finished
            if isinstance(outcome, Generation):
                self.check(ticket, prompt, outcome)
            else:
                assert isinstance(outcome, BackendError | BadResult)
                assert self.poisonous(prompt, ticket)

    def check(self, ticket, prompt, outcome):
        assert len(outcome.completions) == prompt.samples
        if prompt.sampling.constraint is None and ticket not in self.changed:
            expected = alone(structs.replace(prompt, begun=()), LENGTH, weights=self.weights)
            assert tuple(structs.replace(one, versions=((0, ""),)) for one in outcome.completions) == expected
            if not prompt.begun:
                assert {one.versions for one in outcome.completions if one.tokens} <= {((0, self.version),)}
        if ticket in self.given and not prompt.begun:
            assert joined(self.given[ticket]) == list(outcome.completions)

    def poisonous(self, prompt, ticket):
        """Whether a token goes through the model for it that no step survives, or that no row does."""
        if ticket in self.changed or prompt.sampling.constraint is not None:
            return True
        [prepared] = self.generator.prepare([prompt])
        sampling = structs.replace(prompt.sampling, stop=())  # tokens that a stop string cuts off have gone through
        drawn = alone(structs.replace(prompt, begun=(), sampling=sampling), LENGTH, weights=self.weights)
        harmful = {POISON, self.generator.decoder.nan}
        return any(harmful & set(tokens) for tokens in [prepared.tokens.tolist(), *(one.tokens for one in drawn)])

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "generator"):
            return
        admission, table = self.generator._admission, self.generator._table
        living = [row for row in table.rows if row is not None]
        check_pages(self.generator)
        assert len(admission._free) == table.slots - len(living)
        assert table.readers == int(table.read.sum()) == sum(row.given is not None for row in living)
        assert all(table.rows[row.slot] is row for row in [*admission.prefilling, *admission._queue])
        assert (table.prompt[[row.slot for row in living]] > 0).all()
        assert {row.work.ticket for row in living} <= set(self.generator.answers.works)
        assert not np.array([table.decodes[slot] for slot in range(table.slots) if table.rows[slot] is None]).any()
        assert set(self.open) == set(self.generator.answers.works) | (self.finished_unseen() & set(self.open))

    def teardown(self):
        if not hasattr(self, "generator"):
            return
        self.generator.decoder.room = None
        for _ in range(3000):
            if not self.generator.busy:
                break
            self.take(self.generator.step())
        assert not self.open
        assert self.generator.free_slots == self.generator.slots
        all_free(self.generator)
        assert not self.generator.sampler._slots.penalised
        self.generator.close()


Served.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestServed = pytest.mark.property(Served.TestCase)
