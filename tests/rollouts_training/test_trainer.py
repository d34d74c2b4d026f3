"""The trainer that only takes its time."""

import asyncio

import pytest
from played import group

from gpuinfer.rollouts.trainer import SimulatedTrainer, facts_of


def test_a_simulated_trainer_makes_a_version_each_step():
    async def main():
        trainer = SimulatedTrainer(0.0, batch=2, version=3, weights="somewhere", adapter="policy")
        assert await trainer.asks() == 2
        done = [await trainer.train([group(step)], step) for step in range(2)]
        assert [one.version for one in done] == [4, 5]
        assert (done[0].weights, done[0].adapter) == ("somewhere", "policy")

    asyncio.run(main())


def test_without_weights_it_hands_none_over():
    assert asyncio.run(SimulatedTrainer(0.0).train([group()], 0)).weights is None


@pytest.mark.parametrize("given", [{"seconds": -1.0}, {"seconds": 0.0, "batch": 0}])
def test_what_makes_no_trainer(given):
    with pytest.raises(ValueError, match="at least"):
        SimulatedTrainer(**given)


def test_what_a_batch_holds():
    assert facts_of([group(0, games=2), group(1)]) == {
        "groups": 2,
        "games": 3,
        "calls": 3,
        "given_tokens": 9,
        "drawn_tokens": 6,
    }
