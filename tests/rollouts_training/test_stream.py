"""A trainer in the same process as its rollouts, with the instant model."""

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.workloads.rollouts.stream import rollouts

ARITHMETIC = "gpuinfer.rollouts.builtin_environments:Arithmetic"


def streamed(**options):
    given = {"env": ARITHMETIC, "model": "null", "plain": True, "samples_per_group": 2, "max_new_tokens": 4}
    return rollouts(**{**given, **options})


async def test_batches_come_as_an_iterator_and_versions_go_back(tmp_path):
    seen = []
    async with streamed(groups=7, batch_groups=2, steps=tmp_path / "steps.jsonl") as stream:
        async for batch in stream:
            seen.append((batch.version, [one.number for one in batch.groups]))
            games = [game for group in batch.groups for game in group.games]
            drawn = {one.id: [turn.logprobs for turn in one.turns] for game in games for one in game.trajectories}
            stream.tell(metrics={"loss": 1.0}, logprobs=drawn)
            with pytest.raises(UsageError, match="cannot come after"):
                await stream.update(batch.version + 2)
            await stream.update(batch.version + 1)
        assert stream.version == 4
    assert stream.report["status"] == "done"
    assert [(version, len(numbers)) for version, numbers in seen] == [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert sorted(number for _, numbers in seen for number in numbers) == list(range(7))
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [one.metrics for one in found] == [{"loss": 1.0}] * 4
    assert all(one.ratio_max == 1.0 and one.verdict is not None for one in found)
    assert any(one.output_tokens > 0 for one in found)


async def test_a_trainer_that_has_enough_leaves_and_the_run_ends_with_it():
    async with streamed(groups=10**6) as stream:
        async for batch in stream:
            if batch.number == 3:
                break
    assert stream.report is None


@pytest.mark.parametrize(
    ("steps", "error", "said"),
    [("steps.jsonl", KeyError, "of the trainer"), ("no/steps.jsonl", UsageError, "--steps .* cannot be written")],
)
async def test_what_the_trainer_or_the_run_raises_ends_both(tmp_path, steps, error, said):
    async def train():
        async with streamed(groups=10**6, steps=tmp_path / steps) as stream:
            async for _ in stream:
                raise KeyError("of the trainer")

    with pytest.raises(error, match=said):
        await train()
