"""A trainer in the same process as its rollouts, with the instant model."""

import asyncio

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.workloads.rollouts.stream import rollouts

PATIENCE_S = 120.0
ARITHMETIC = "gpuinfer.rollouts.builtin_environments:Arithmetic"


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


def streamed(**options):
    given = {"env": ARITHMETIC, "model": "null", "plain": True, "samples_per_group": 2, "max_new_tokens": 4}
    return rollouts(**{**given, **options})


def test_batches_come_as_an_iterator_and_versions_go_back(tmp_path):
    async def main():
        seen = []
        async with streamed(groups=7, batch_groups=2, steps=tmp_path / "steps.jsonl") as stream:
            async for batch in stream:
                seen.append((batch.version, [one.number for one in batch.groups]))
                drawn = {
                    played.id: [turn.logprobs for turn in played.turns]
                    for group in batch.groups
                    for game in group.games
                    for played in game.trajectories
                }
                stream.tell(metrics={"loss": 1.0}, logprobs=drawn)
                await stream.update(batch.version + 1)
            assert stream.version == 4
        assert stream.report["status"] == "done"
        assert [version for version, _ in seen] == [0, 1, 2, 3]
        assert sorted(number for _, numbers in seen for number in numbers) == list(range(7))
        assert [len(numbers) for _, numbers in seen] == [2, 2, 2, 1]

    run(main())
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [one.metrics for one in found] == [{"loss": 1.0}] * 4
    assert all(one.ratio_max == 1.0 for one in found)
    assert all(one.verdict is not None for one in found)
    assert any(one.output_tokens > 0 for one in found)


def test_a_trainer_that_has_enough_leaves_and_the_run_ends_with_it():
    async def main():
        async with streamed(groups=10**6) as stream:
            async for batch in stream:
                if batch.number == 3:
                    break
        assert stream.report is None

    run(main())


def test_what_the_trainer_raises_ends_the_run_and_is_raised():
    async def main():
        async with streamed(groups=10**6) as stream:
            async for _ in stream:
                raise KeyError("of the trainer")

    with pytest.raises(KeyError, match="of the trainer"):
        run(main())


def test_what_the_run_raises_reaches_the_trainer(tmp_path):
    async def main():
        async with streamed(groups=3, steps=tmp_path / "nowhere" / "steps.jsonl") as stream:
            async for _ in stream:
                pass

    with pytest.raises(UsageError, match=r"--steps .* cannot be written"):
        run(main())


def test_a_version_that_is_not_the_next_is_refused_and_the_run_goes_on():
    async def main():
        async with streamed(groups=2) as stream:
            async for batch in stream:
                with pytest.raises(UsageError, match="cannot come after"):
                    await stream.update(batch.version + 2)
                await stream.update(batch.version + 1)
            assert stream.version == 2

    run(main())
