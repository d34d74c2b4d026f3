"""The training side as a whole: groups in, batches out, versions back, and a record of each step."""

import asyncio
import itertools

import msgspec
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from played import group, trajectory, turn

from gpuinfer.api import Infer, Limits
from gpuinfer.errors import UsageError
from gpuinfer.rollouts.record import Game, Group
from gpuinfer.rollouts.steps import StepsFile, read_steps
from gpuinfer.rollouts.trainer import Consumer, SimulatedTrainer, Trained
from gpuinfer.rollouts.training import Training, TrainingPlan

PATIENCE_S = 60.0


class Weights(Infer):
    """Takes weights, and remembers them; `refuses` some."""

    limits = Limits(4, slots=4)

    def __init__(self, refuses=()):
        self.given, self.refuses = [], refuses

    async def __call__(self, payload, **ways):
        raise NotImplementedError

    def stream(self, payload, **ways):
        raise NotImplementedError

    def client(self):
        raise NotImplementedError

    def lane(self, name):
        raise NotImplementedError

    def workers(self, target, arguments):
        raise NotImplementedError

    async def update(self, version, weights, *, adapter=None, drain=True):
        if weights in self.refuses:
            raise UsageError(f"{weights} does not fit.")
        self.given.append((version, weights, adapter, drain))


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


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


def test_every_group_is_trained_on_and_every_step_told(tmp_path):
    async def main():
        file = StepsFile(tmp_path / "steps.jsonl")
        plan = TrainingPlan(depth=4, batch=2)
        side = made_side(SimulatedTrainer(0.0, batch=2), plan, file)
        await whole(side, range(7))
        file.close()
        return side

    side = run(main())
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert [one.step for one in found] == [0, 1, 2, 3]
    assert [(one.version, one.version_after) for one in found] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [number for one in found for number in one.numbers] == list(range(7))
    assert [one.groups for one in found] == [2, 2, 2, 1]
    for before, after in itertools.pairwise(found):
        assert after.at_s == pytest.approx(before.at_s + after.wall_s)
        parts = after.absent_s + after.wait_s + after.train_s + after.adapter_load_s
        assert 0 < parts <= after.wall_s + 1e-6
    assert max(one.staleness_max for one in found) <= side.plan.staleness == 2
    assert side.facts()["trained_groups"] == 7
    assert side.facts()["steps"] == 4


def test_weights_are_handed_to_the_backend_and_answers_under_way_go_on():
    async def main():
        infer = Weights()
        side = made_side(SimulatedTrainer(0.0, weights="adapter/", adapter="policy"), infer=infer)
        assert side.version_of_answers() is None
        await whole(side, range(3))
        assert infer.given == [(f"v{n}", "adapter/", "policy", False) for n in (1, 2, 3)]
        assert side.version_of_answers() is None  # the backend names them itself
        assert side.facts()["adapter_loads"] == 3

    run(main())


def test_what_is_too_old_is_dropped_counted_and_played_again_in_its_place():
    """A trainer that counts three versions while groups of the first wait: those go, and others come."""

    class Leaping(Consumer):
        def __init__(self):
            self.version = 0

        async def wait_for_request(self):
            return 1

        async def train(self, groups, step):
            self.version += 1
            return Trained(version=self.version)

    async def main():
        side = made_side(Leaping(), TrainingPlan(depth=3, max_staleness=1))
        seen = []

        def made(number):
            seen.append(number)
            return group(number, ["v0"])  # all by the first weights, however late

        await whole(side, range(20), made)
        assert seen == list(range(20))
        facts = side.facts()
        assert facts["trained_groups"] + facts["groups_dropped"] == 20
        assert facts["groups_dropped"] > 0
        assert facts["staleness_max"] <= 1

    run(main())


def scored(number):
    side = trajectory(turn(logprobs=(-1.0, -2.0), reference=(-1.5, -2.5)), id=f"{number}/0/a")
    games = (Game(sample=0, seed=1, ending="done", trajectories=(side,), steps=1),)
    return Group(id=str(number), number=number, environment="toy", games=games, seconds=3.0, reference_s=1.0)


def test_the_divergence_and_its_coefficient_stand_in_each_step(tmp_path):
    async def main():
        file = StepsFile(tmp_path / "steps.jsonl")
        plan = TrainingPlan(kl_target=0.01, kl_coefficient=0.1, kl_horizon=10)
        await whole(made_side(SimulatedTrainer(0.0), plan, file), range(3), scored)
        file.close()

    run(main())
    found = list(read_steps(tmp_path / "steps.jsonl"))
    assert all(one.kl_k1 == pytest.approx(0.5) for one in found)
    assert all(one.kl == pytest.approx(2.718281828**-0.5 - 1 + 0.5, rel=1e-6) for one in found)
    assert [one.kl_coefficient for one in found] == pytest.approx([0.1 * 1.02**n for n in (1, 2, 3)])
    assert all(one.reference_share == 0.25 for one in found)


def test_what_the_trainer_thinks_of_the_tokens_is_held_against_the_samplers(tmp_path):
    class Tells(SimulatedTrainer):
        async def train(self, groups, step):
            trained = await super().train(groups, step)
            said = {f"{one.number}/0/a": [[-1.0, -2.0]] for one in groups}
            return msgspec.structs.replace(trained, logprobs=said, metrics={"loss": 0.5})

    async def main():
        file = StepsFile(tmp_path / "steps.jsonl")
        await whole(made_side(Tells(0.0), steps=file), range(2), scored)
        file.close()

    run(main())
    for one in read_steps(tmp_path / "steps.jsonl"):
        assert (one.ratio_mean, one.ratio_max, one.effective) == (1.0, 1.0, 1.0)
        assert one.metrics == {"loss": 0.5}


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

    run(main())
