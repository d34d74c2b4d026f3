"""Versions of adapters side by side: which one a name means, which go, and that nothing stale is ever served."""

from __future__ import annotations

import random

import pytest
from counts import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs
from random_adapters import stepped
from text.toy import WAIT_S, Gate, alone, prompt, run, submitted, toy_generator

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.text.generator import Driver
from gpuinfer.text.transformer import PAGE

LONG = "the quick brown fox jumps over the lazy"


def of(adapter, one):
    return structs.replace(one, adapter=adapter)


def wanted(one, weights, version):
    return alone(one, weights=weights, version=version)


@pytest.fixture
def generator():
    return toy_generator(step_tokens=16, max_adapters=3)


def load(generator, name, version, weights):
    generator.load_adapter(name, version, generator.read_adapter(name, str(weights)))


def test_what_one_has_cached_serves_it_alone(generator):
    load(generator, "policy", "v1", 5)
    [first, again] = [*run(generator, [of("policy", prompt(LONG))]), *run(generator, [of("policy", prompt(LONG))])]
    [base] = run(generator, [prompt(LONG)])
    load(generator, "policy", "v2", 7)
    [newer] = run(generator, [of("policy", prompt(LONG))])
    [old] = run(generator, [of("policy@v1", prompt(LONG))])
    load(generator, "policy", "v1", 9)
    [renewed] = run(generator, [of("policy", prompt(LONG))])
    answers = (first, again, base, newer, old, renewed)
    assert [one.cached_tokens for one in answers] == [0, PAGE, 0, 0, PAGE, 0]
    assert old.completions == first.completions == wanted(prompt(LONG), 5, "policy@v1")
    assert newer.completions == wanted(prompt(LONG), 7, "policy@v2")
    assert renewed.completions == wanted(prompt(LONG), 9, "policy@v1")


def test_what_is_unloaded_is_refused_and_goes_with_its_last_answer(generator):
    load(generator, "policy", "v1", 5)
    load(generator, "policy", "v2", 6)
    generator.unload_adapter("policy@v1")
    assert generator.adapters == ("policy", "policy@v2")
    [refused] = generator.prepare([of("polcy", prompt("ab"))])
    assert "policy, policy@v2" in str(refused)
    waiting, late = generator.prepare([of("policy", prompt("ab", 9)), of("policy", prompt("cd"))])
    generator.add(0, waiting)
    generator.step()
    generator.unload_adapter("policy")
    assert (generator.adapters, generator.decoder.loaded) == ((), {2: 6})
    generator.add(1, late)
    finished = {}
    while generator.busy:
        finished |= dict(generator.step().finished)
    assert isinstance(finished[1], BadPrompt)
    assert finished[0].version == "policy@v2"
    assert generator.decoder.loaded == {}
    with pytest.raises(UsageError, match="this model has none"):
        generator.unload_adapter("policy")


def test_the_newest_version_of_each_name_keeps_its_place(generator):
    for name in ("a", "b", "c"):
        load(generator, name, "1", 5)
    load(generator, "a", "2", 6)
    assert "a@1" not in generator.adapters
    with pytest.raises(UsageError, match="max_adapters=6"):
        load(generator, "d", "1", 7)
    generator.unload_adapter("b")
    load(generator, "d", "1", 7)
    for name in ("", "a@b", " a", "x" * 200, "a\nb"):
        with pytest.raises(UsageError, match="cannot be called"):
            load(generator, name, "1", 5)


def test_the_base_may_change_under_an_adapter_and_the_answer_says_so(generator):
    load(generator, "policy", "v1", 5)
    answer, _ = stepped(generator, of("policy", prompt("ab", 9)), {4: ("w2", 64)})
    assert answer.completions[0].versions == ((0, "policy@v1"), (4, "policy@v1+w2"))
    [after] = run(generator, [of("policy", prompt("ab", 9))])
    assert after.completions == wanted(prompt("ab", 9), 5 ^ 64, "policy@v1+w2")


def test_a_driver_loads_between_steps_and_refuses_without_ending():
    generator = toy_generator(max_adapters=1)
    driver, gate = Driver(generator), Gate(generator)
    try:
        loading = driver.load_adapter("policy", "v1", 5)
        loading.result(WAIT_S)
        [early] = submitted(driver, of("policy", prompt("ab", 9)))
        assert gate.reached.wait(WAIT_S)
        second, third = driver.load_adapter("policy", "v2", 6), driver.load_adapter("other", "v2", 6)
        gate.open.set()
        second.result(WAIT_S)
        with pytest.raises(UsageError, match="no more"):
            third.result(WAIT_S)
        [late] = submitted(driver, of("policy", prompt("ab", 9)))
        assert early.result(WAIT_S).version == "policy@v1"
        assert late.result(WAIT_S).version == "policy@v2"
        with pytest.raises(UsageError):
            driver.unload_adapter("nobody").result(WAIT_S)
    finally:
        driver.close()


class Swapping(RuleBasedStateMachine):
    """Loads, unloads, prompts, cancels and steps in any order, against what each prompt was promised."""

    def __init__(self):
        super().__init__()
        self.dice = random.Random(0)
        self.generator = toy_generator(slots=4, step_tokens=12, max_adapters=3, pages=5)
        self.meant, self.promised, self.weights = {}, {}, {}
        self.tickets = 0

    @rule(name=st.sampled_from("abcd"))
    def loads(self, name):
        version = f"v{len(self.weights)}"
        try:
            load(self.generator, name, version, len(self.weights) * 8191 + 3)
        except UsageError:
            assert len(self.meant) == 3
            assert name not in self.meant
            return
        self.weights[f"{name}@{version}"] = len(self.weights) * 8191 + 3
        self.meant[name] = f"{name}@{version}"

    @precondition(lambda self: self.meant)
    @rule(data=st.data())
    def unloads(self, data):
        name = data.draw(st.sampled_from(sorted(self.meant)))
        self.generator.unload_adapter(name)
        del self.meant[name]

    @precondition(lambda self: self.generator.free_slots)
    @rule(
        name=st.sampled_from(["", "a", "b", "c", "d"]), cut=st.integers(12, 38), count=st.integers(1, 9), more=st.data()
    )
    def asks(self, name, cut, count, more):
        samples = more.draw(st.integers(1, self.generator.free_slots))
        one = prompt(LONG[:cut], count, samples)
        [prepared] = self.generator.prepare([of(name or None, one)])
        if name and name not in self.meant:
            assert isinstance(prepared, BadPrompt)
            return
        self.generator.add(self.tickets, prepared)
        self.promised[self.tickets] = one, self.meant[name] if name else ""
        self.tickets += 1

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def cancels(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.promised)))
        self.generator.cancel(ticket)
        del self.promised[ticket]

    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            for ticket, answer in self.generator.step().finished:
                one, version = self.promised.pop(ticket)
                assert answer.completions == wanted(one, self.weights.get(version, 0), version)

    @invariant()
    def what_is_loaded_has_a_name_or_an_answer(self):
        under_way = {version for _, version in self.promised.values() if version}
        loaded = list(self.generator.decoder.loaded.values())
        assert len(loaded) <= 3 + len(under_way)
        assert {self.weights[version] for version in under_way} <= set(loaded)
        assert {self.weights[version] for version in self.meant.values()} <= set(loaded)

    def teardown(self):
        while self.generator.busy:
            self.steps(1)
        for name in self.meant:
            self.generator.unload_adapter(name)
        assert not self.generator.decoder.loaded
        assert not self.generator._table.adapted


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
