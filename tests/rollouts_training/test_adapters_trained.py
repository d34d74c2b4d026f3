"""A trainer that hands over adapters while games are played, against a real model."""

import asyncio

import pytest
from adapters.random_adapters import peft_folder

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.workloads.rollouts.stream import rollouts

PATIENCE_S = 200.0
ARITHMETIC = "gpuinfer.rollouts.builtin_environments:Arithmetic"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    shape = open_checkpoint(ModelSpec(name="tiny", kind="text")).shape
    place = tmp_path_factory.mktemp("adapters")
    return [str(peft_folder(place / f"{seed}", shape, seed=seed)) for seed in range(3)]


@pytest.mark.thorough
def test_each_version_of_an_adapter_draws_what_is_asked_for_after_it_is_there(folders, tmp_path):
    """Staleness is counted from the spans that the backend tells; the reference is the base under the adapter."""
    options = {"samples_per_group": 2, "max_new_tokens": 6, "plain": True, "context": 256, "batch_size": 8}
    seen = []

    async def main():
        made = rollouts(
            env=ARITHMETIC,
            model="tiny",
            groups=8,
            buffer_depth=1,
            adapter=[f"policy={folders[0]}"],
            reference="inline",
            steps=tmp_path / "steps.jsonl",
            device="cpu",
            **options,
        )
        async with asyncio.timeout(PATIENCE_S), made as stream:
            async for batch in stream:
                seen.extend((batch.version, group.versions) for group in batch.groups)
                if batch.number == 2:
                    with pytest.raises(UsageError):
                        await stream.update(batch.version + 1, "nowhere", adapter="policy")
                await stream.update(batch.version + 1, folders[(batch.version + 1) % 3], adapter="policy")
        assert stream.report["status"] == "done"
        return stream.report["rollouts"]["trainer"]["groups_dropped"]

    dropped = asyncio.run(main())
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [version for version, _ in seen] == list(range(len(found)))
    assert len(found) + dropped == 8  # one that was overtaken twice is too old
    assert all(name.startswith("policy@v") for _, names in seen for name in names)
    assert [one.staleness_max for one in found] == [version - min(_numbers(names)) for version, names in seen]
    assert {one.staleness_max for one in found} <= {0, 1}
    assert max(_numbers(seen[-1][1])) >= len(found) - 2  # what was drawn last was drawn by what came last
    assert all(one.kl > 1e-3 for one in found)  # each is another policy than the base
    assert all(one.adapter_load_s > 0 for one in found)


@pytest.mark.thorough
def test_a_run_that_is_gone_on_with_begins_with_the_weights_that_its_trainer_made_last(folders, tmp_path):
    options = {"samples_per_group": 1, "max_new_tokens": 4, "plain": True, "context": 256, "batch_size": 8}
    words = {"env": ARITHMETIC, "model": "tiny", "groups": 6, "adapter": [f"policy={folders[0]}"], "device": "cpu"}
    files = {"out": tmp_path / "record", "steps": tmp_path / "steps.jsonl", "resume": True}

    async def main(most):
        async with asyncio.timeout(PATIENCE_S), rollouts(**words, **options, **files) as stream:
            async for batch in stream:
                await stream.update(batch.version + 1, folders[1], adapter="policy")
                if batch.number == most:
                    await anext(stream)  # which says that it is done
                    break

    asyncio.run(main(2))
    asyncio.run(main(None))
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [one.version for one in found] == list(range(len(found)))
    assert [(one.weights.version, one.weights.weights) for one in found] == [
        (number + 1, folders[1]) for number in range(len(found))
    ]
    trained = [number for one in found for number in one.numbers]
    assert len(set(trained)) == len(trained)
    assert max(one.staleness_max for one in found) <= 2  # nothing is of v0 because a run began anew


def _numbers(names):
    return [int(name.removeprefix("policy@v")) for name in names]
