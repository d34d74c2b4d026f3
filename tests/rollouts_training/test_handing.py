"""Between a run and a trainer that comes when it likes: one batch is out at a time, until it is said to be done."""

import asyncio

import pytest
from played import group
from trains import StandInTraining

from gpuinfer.errors import Closed
from gpuinfer.rollouts.trainer import BatchHandoff, UnknownBatch

PATIENCE_S = 60.0


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


async def met():
    hand = BatchHandoff()
    await hand.meet(StandInTraining())
    return hand


async def training(hand, batches):
    """The run's side: so many batches of as many groups as are asked for; what came of each."""
    told, number = [], 0
    for step in range(batches):
        if (wanted := await hand.asks()) is None:
            break
        groups = [group(number + one) for one in range(wanted)]
        number += wanted
        told.append(await hand.train(groups, step))
    hand.end()
    return told


def test_batches_go_over_one_after_another():
    async def main():
        hand = await met()
        there = asyncio.create_task(training(hand, 3))
        seen = []
        while True:
            hand.want(2)
            if (batch := await hand.next(None)) is None:
                break
            seen.append((batch.number, batch.step, [one.number for one in batch.groups]))
            hand.done(batch.number, metrics={"loss": float(batch.number)})
        assert seen == [(1, 0, [0, 1]), (2, 1, [2, 3]), (3, 2, [4, 5])]
        assert [one.metrics["loss"] for one in await there] == [1.0, 2.0, 3.0]

    run(main())


def test_a_trainer_that_has_died_is_given_its_batch_again_when_it_comes_back():
    async def main():
        hand = await met()
        there = asyncio.create_task(training(hand, 2))
        hand.want(1)
        first = await hand.next(None)
        hand.want(1)  # another process: it knows of nothing
        again = await hand.next(None)
        assert (again, hand.times) == (first, 2)
        hand.done(first.number)
        hand.want(1)
        assert (await hand.next(None)).number == 2
        hand.done(2)
        await there

    run(main())


def test_a_trainer_that_died_while_it_waited_finds_the_batch_when_it_comes_back():
    async def main():
        hand = await met()
        there = asyncio.create_task(training(hand, 1))
        hand.want(1)
        assert await hand.next(0.0) is None
        while hand.batch is None:  # noqa: ASYNC110  a few turns of the loop
            await asyncio.sleep(0)
        assert (hand.times, (await hand.next(0.0)).number) == (0, 1)
        hand.done(1)
        await there

    run(main())


def test_what_is_said_twice_means_nothing_more_and_what_never_was_is_refused():
    async def main():
        hand = await met()
        there = asyncio.create_task(training(hand, 2))
        hand.want(1)
        await hand.next(None)
        hand.done(1)
        hand.want(1)
        batch = await hand.next(None)
        hand.done(1)  # the answer was lost, and it is said again
        assert hand.batch is batch
        for number in (0, 3):
            with pytest.raises(UnknownBatch, match="never given: the newest is 2"):
                hand.done(number)
        hand.done(2)
        await there

    run(main())


def test_who_has_left_takes_no_more():
    async def main():
        hand = await met()
        there = asyncio.create_task(training(hand, 3))
        hand.want(1)
        await hand.next(None)
        hand.leave()
        with pytest.raises(Closed, match="has left"):
            await there

    run(main())


def test_at_the_end_all_who_wait_are_told():
    async def main():
        hand = await met()
        waiting = [asyncio.create_task(hand.next(None)) for _ in range(3)]
        await asyncio.sleep(0)
        hand.end()
        assert await asyncio.gather(*waiting) == [None] * 3
        assert hand.over

    run(main())


def test_waiting_in_vain_leaves_nothing_behind():
    async def main():
        hand = await met()
        for _ in range(20):
            assert await hand.next(0.0) is None
        assert len(hand._changed) == 0

    run(main())
