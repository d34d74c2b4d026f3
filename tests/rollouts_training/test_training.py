"""The training side as a whole: groups in, batches out, versions back, and a file with the record of each step."""

import asyncio
import itertools
import json

import msgspec
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from played import group, trajectory, turn

from gpuinfer.api import Limits
from gpuinfer.errors import UsageError
from gpuinfer.rollouts.record import Game, Group
from gpuinfer.rollouts.steps import StepRecord, StepsFile, read_steps
from gpuinfer.rollouts.trainer import Consumer, SimulatedTrainer, Trained
from gpuinfer.rollouts.training import Training, TrainingPlan


class Weights:
    """Stands in for a session: takes weights, and remembers them."""

    limits = Limits(4, slots=4)

    def __init__(self):
        self.given = []

    async def counted(self):
        return {}

    async def update(self, version, weights, *, adapter=None, drain=True):
        self.given.append((version, weights, adapter, drain))


async def play(side, numbers, made=None):
    """A loop that plays one group after another, each with the newest weights."""
    made = made or (lambda number: group(number, [f"v{side.version}"]))
    for number in numbers:
        await side.admitted()
        side.started()
        await asyncio.sleep(0)
        one = made(number)
        side.accepted()
        await side.put(one)
    side.end()


async def whole(side, numbers, made=None):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(side.run())
        tasks.create_task(play(side, numbers, made))


def made_side(consumer, plan=None, steps=None, infer=None):
    return Training(infer or Weights(), consumer, plan or TrainingPlan(), steps)


async def test_every_group_is_trained_on_and_every_step_told(tmp_path):
    file, infer = StepsFile(tmp_path / "steps.jsonl"), Weights()
    trainer = SimulatedTrainer(0.0, weights="adapter/", adapter="policy", batch=2)
    side = made_side(trainer, TrainingPlan(depth=4, batch=2), file, infer)
    await whole(side, range(7))
    file.close()
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [(one.step, one.version, one.version_after, one.groups) for one in found] == [
        (0, 0, 1, 2),
        (1, 1, 2, 2),
        (2, 2, 3, 2),
        (3, 3, 4, 1),
    ]
    assert [number for one in found for number in one.numbers] == list(range(7))
    for before, after in itertools.pairwise(found):
        assert after.at_s == pytest.approx(before.at_s + after.wall_s)
        parts = after.absent_s + after.wait_s + after.train_s + after.adapter_load_s
        assert 0 < parts <= after.wall_s + 1e-6
    assert max(one.staleness_max for one in found) <= side.plan.staleness == 2
    facts = side.facts()
    assert (facts["trained_groups"], facts["steps"], facts["adapter_loads"]) == (7, 4, 4)
    # the backend takes the weights, goes on with what is under way, and names the versions itself
    assert infer.given == [(f"v{n}", "adapter/", "policy", False) for n in (1, 2, 3, 4)]
    assert side.version_of_answers() is None


async def test_what_is_too_old_is_dropped_counted_and_played_again_in_its_place():
    """A trainer that counts three versions while groups of the first wait: those go, and others come."""

    class Leaping(Consumer):
        version = 0

        async def wait_for_request(self):
            return 1

        async def train(self, groups, step):
            self.version += 1
            return Trained(version=self.version)

    side, seen = made_side(Leaping(), TrainingPlan(depth=3, max_staleness=1)), []

    def made(number):
        seen.append(number)
        return group(number, ["v0"])  # all by the first weights, however late

    await whole(side, range(20), made)
    assert seen == list(range(20))
    facts = side.facts()
    assert facts["trained_groups"] + facts["groups_dropped"] == 20
    assert facts["groups_dropped"] > 0
    assert facts["staleness_max"] <= 1


def scored(number):
    side = trajectory(turn(logprobs=(-1.0, -2.0), reference=(-1.5, -2.5)), id=f"{number}/0/a")
    games = (Game(sample=0, seed=1, ending="done", trajectories=(side,), steps=1),)
    return Group(id=str(number), number=number, environment="toy", games=games, seconds=3.0, reference_s=1.0)


async def test_divergence_coefficient_and_the_trainers_own_log_probabilities_stand_in_each_step(tmp_path):
    class Tells(SimulatedTrainer):
        async def train(self, groups, step):
            trained = await super().train(groups, step)
            said = {f"{one.number}/0/a": [[-1.0, -2.0]] for one in groups}
            return msgspec.structs.replace(trained, logprobs=said, metrics={"loss": 0.5})

    file = StepsFile(tmp_path / "steps.jsonl")
    plan = TrainingPlan(kl_target=0.01, kl_coefficient=0.1, kl_horizon=10)
    await whole(made_side(Tells(0.0), plan, file), range(3), scored)
    file.close()
    found = list(read_steps(tmp_path / "steps.jsonl"))
    for one in found:
        assert one.kl_k1 == pytest.approx(0.5)
        assert one.kl == pytest.approx(2.718281828**-0.5 - 1 + 0.5, rel=1e-6)
        assert one.reference_share == 0.25
        assert (one.ratio_mean, one.ratio_max, one.effective, one.metrics) == (1.0, 1.0, 1.0, {"loss": 0.5})
    assert [one.kl_coefficient for one in found] == pytest.approx([0.1 * 1.02**n for n in (1, 2, 3)])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(0, 3) | st.none(),
    st.integers(1, 25),
    st.integers(1, 4),
    st.integers(0, 4),
)
@pytest.mark.property
def test_any_plan_comes_to_its_end_with_every_group_trained_or_dropped(
    batch, depth, prefill, staleness, groups, players, lag
):
    async def main():
        plan = TrainingPlan(depth=depth, batch=batch, max_staleness=staleness)
        prefilled = min(prefill, (plan.staleness + 1) * batch)
        plan = TrainingPlan(depth=depth, batch=batch, max_staleness=staleness, prefill=prefilled)
        side = made_side(SimulatedTrainer(0.0, batch=batch), plan)
        numbers, left = iter(range(groups)), players

        async def player():
            nonlocal left
            for number in numbers:
                await side.admitted()
                side.started()
                drawn = side.version
                for _ in range(number % 5):
                    await asyncio.sleep(0)
                side.accepted()
                await side.put(group(number, [f"v{max(0, drawn - (lag if number % 3 == 0 else 0))}"]))
            left -= 1
            if not left:
                side.end()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(side.run())
            for _ in range(players):
                tasks.create_task(player())
        facts = side.facts()
        assert facts["trained_groups"] + facts["groups_dropped"] == groups
        assert facts["staleness_max"] <= plan.staleness
        assert not side.recorder._ready
        capacity = side.gate.capacity
        assert (capacity.running, capacity.accepted) == (0, facts["trained_groups"])

    asyncio.run(main())


def record(step):
    return StepRecord(step=step, version=step, at_s=float(step), wall_s=1.0, numbers=(step,), metrics={"loss": 0.5})


def test_each_step_can_be_read_at_once_and_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "steps.jsonl"
    file = StepsFile(path)
    for step in range(3):
        file.add(record(step))
        assert list(read_steps(path)) == [record(one) for one in range(step + 1)]
    file.close()
    line = json.loads(path.read_text().splitlines()[2])
    assert (line["step"], line["verdict"]) == (2, None)
    with path.open("ab") as torn:
        torn.write(b'{"step":3,"ver')
    again = StepsFile(path, resume=True)
    assert again.before == [record(step) for step in range(3)]
    again.add(record(3))
    again.close()
    assert list(read_steps(path)) == [record(step) for step in range(4)]


def test_what_cannot_be_gone_on_with_or_written_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("something else\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no step"):
        StepsFile(path, resume=True)
    StepsFile(path).close()
    assert path.read_bytes() == b""
    with pytest.raises(UsageError, match=r"--steps .* cannot be written"):
        StepsFile(tmp_path / "nowhere" / "steps.jsonl")
