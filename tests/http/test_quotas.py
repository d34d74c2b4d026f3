"""What a key may ask in a minute: token buckets on a clock of the test's own."""

from __future__ import annotations

from gpuinfer.http.access import Key, Quotas


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_minutes_worth_may_be_used_at_once_and_comes_back_evenly():
    clock, key = Clock(), Key(b"", "alice", requests=6)
    quotas = Quotas(clock)
    assert [quotas.take(key) for _ in range(6)] == [None] * 6
    exceeded = quotas.take(key)
    assert (exceeded.kind, exceeded.headers) == ("requests", [("Retry-After", "10")])
    clock.now = 9.9
    assert quotas.take(key) is not None
    clock.now = 10.1
    assert quotas.take(key) is None
    clock.now = 1000
    assert [quotas.take(key) is None for _ in range(7)] == [True] * 6 + [False], "no more is saved up than a minute's"


def test_who_has_spent_more_tokens_than_there_were_waits_until_they_are_back():
    clock, key = Clock(), Key(b"", "alice", tokens=600)
    quotas = Quotas(clock)
    assert quotas.take(key) is None
    quotas.spend(key, 800)
    exceeded = quotas.take(key)
    assert (exceeded.kind, exceeded.headers) == ("tokens", [("Retry-After", "21")])
    assert ("x-ratelimit-remaining-tokens", "0") in quotas.headers(key)
    clock.now = 21
    assert quotas.take(key) is None


def test_a_refused_request_costs_nothing_and_keys_of_one_name_share():
    clock = Clock()
    first, second = (Key(digest, "alice", requests=2, tokens=100) for digest in (b"1", b"2"))
    quotas = Quotas(clock)
    quotas.spend(first, 150)
    assert quotas.take(second).kind == "tokens"
    assert ("x-ratelimit-remaining-requests", "2") in quotas.headers(first)


def test_what_is_spent_in_another_process_is_spent_here_too():
    clock, key = Clock(), Key(b"", "alice", requests=10, tokens=100)
    here, there = Quotas(clock), Quotas(clock)
    for _ in range(7):
        assert there.take(key) is None
    there.spend(key, 90)
    here.add_news(there.take_news())
    assert there.take_news() == [], "it is told once"
    assert {("x-ratelimit-remaining-requests", "3"), ("x-ratelimit-remaining-tokens", "10")} <= set(here.headers(key))
    assert [here.take(key) is None for _ in range(4)] == [True] * 3 + [False]
    assert here.take_news() == [("alice", "requests", 3)], "and not what was heard"
