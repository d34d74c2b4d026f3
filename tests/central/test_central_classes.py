"""Classes of requests at the central server: who is turned away when it is full, what they are told, what counts."""

from __future__ import annotations

import pytest
from programs import named, wrong
from servers import serving_held, until

from gpuinfer.api import Priority
from gpuinfer.errors import QueueFull
from gpuinfer.strategies.priority import ByPriority

pytestmark = pytest.mark.usefixtures("children_forked")

WIDTH = 64  # rows of a block, as wide as a batch: 64 of them may wait
LOW, HIGH = 80, 10


def test_a_full_server_turns_the_lowest_class_away_and_says_when_to_come_again():
    with (
        serving_held(in_flight=1, max_rows=WIDTH, strategy=ByPriority()) as (server, hold),
        server.client() as client,
    ):
        client.evaluate(named(1, 0, WIDTH))  # from now on it knows what a batch takes
        hold.close()
        first = client.submit(named(1, LOW + HIGH, WIDTH))
        hold.wait_until_reached()
        rows = [named(1, number, WIDTH) for number in range(LOW + HIGH)]
        asked = [client.submit(rows[number], priority=Priority.LOW) for number in range(LOW)]
        asked += [client.submit(rows[number], priority=Priority.HIGH) for number in range(LOW, LOW + HIGH)]
        hold.open()  # and it finds all of them at once
        assert wrong(named(1, LOW + HIGH, WIDTH), first.result(60)) is None
        refused = []
        for number, pending in enumerate(asked):
            try:
                assert wrong(rows[number], pending.result(60)) is None
            except QueueFull as error:
                refused.append((number, error))
        until(lambda: server.stats().requests == 2 + LOW + HIGH - len(refused), "the count of all requests")
        counted = server.stats().classes
    assert refused
    assert all(number < LOW for number, _ in refused)
    assert all(error.retry_after_s > 0 and "There may be room in" in str(error) for _, error in refused)
    assert counted["high"]["requests"] == HIGH
    assert counted["low"]["requests"] == LOW - len(refused)
    assert counted["low"]["errors"]["rejected"] == len(refused)
    assert counted["normal"]["requests"] == 2
    assert all(sum(count["latency"]["counts"].values()) == count["requests"] for count in counted.values())


@pytest.mark.thorough
def test_no_more_rows_wait_in_the_server_than_it_was_told():
    with (
        serving_held(in_flight=1, max_rows=WIDTH, max_queue_rows=WIDTH) as (server, hold),
        server.client() as client,
    ):
        hold.close()
        asked = [client.submit(named(1, 0, WIDTH))]
        hold.wait_until_reached()
        asked += [client.submit(named(1, number, WIDTH)) for number in range(1, 4)]
        hold.open()
        refused = [error for pending in asked if (error := failure(pending)) is not None]
    assert len(refused) == 2
    assert all("raise max_queue_rows." in str(error) for error in refused)


def failure(pending):
    try:
        pending.result(60)
    except QueueFull as error:
        return error
    return None
