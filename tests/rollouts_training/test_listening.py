"""A trainer over HTTP: who may ask, what is answered, in which form, and what becomes of one that dies."""

import asyncio
import contextlib

import msgspec
import pytest
from played import group
from trains import StandInTraining

from gpuinfer.errors import BackendDied, UsageError, WorkError
from gpuinfer.http.client import HttpClient
from gpuinfer.rollouts.trainer_server import TakeResponse, TrainerServer, TrainerServerPlan

PATIENCE_S = 60.0
KEY, ADMIN = "a" * 64, "b" * 64


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


def key_file(folder, name, key):
    path = folder / name
    path.write_text(key + "\n")
    path.chmod(0o600)
    return path


class Run:
    """A run whose groups are there as soon as they are wanted, and its trainer's client."""

    def __init__(self, listening, trains):
        self.listening, self.trains = listening, trains
        self.client = HttpClient(listening.url)
        self.numbers = iter(range(10**6))
        self.told = []

    async def work(self, batches):
        """None: its groups never come."""
        try:
            for step in range(batches) if batches is not None else ():
                wanted = await self.listening.wait_for_request()
                groups = [group(next(self.numbers)) for _ in range(wanted)]
                self.told.append(await self.listening.train(groups, step))
            if batches is None:
                await asyncio.Event().wait()
        finally:
            self.listening.end()

    async def ask(self, path, body=None, key=None, method="POST", headers=()):
        keys = [("Authorization", f"Bearer {key}")] if key else []
        data = b"" if body is None else msgspec.json.encode(body)
        found = await self.client.request(method, f"/v1/rollouts/{path}", data, [*keys, *headers])
        return found.status, msgspec.json.decode(found.body)

    async def take(self, **body):
        status, found = await self.ask("take", {"wait_s": 30, **body})
        assert status == 200, found
        return msgspec.convert(found, TakeResponse)


@contextlib.asynccontextmanager
async def running(batches=3, groups=2, plan=None):
    trains = StandInTraining()
    listening = TrainerServer(plan or TrainerServerPlan("127.0.0.1", 0), groups)
    await listening.meet(trains)
    made = Run(listening, trains)
    working = asyncio.create_task(made.work(batches))
    try:
        yield made
        if not working.done():
            working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()
    finally:
        await made.client.close()
        await listening.close()


def test_a_trainer_takes_batch_after_batch_until_it_is_over():
    async def main():
        async with running() as made:
            done, seen = None, []
            while not (batch := await made.take(done=done)).over:
                seen.append((batch.batch, batch.step, batch.version, batch.again, [one.number for one in batch.groups]))
                assert all(one == group(one.number) for one in batch.groups)  # whole, as it was played
                done = batch.batch
            assert seen == [(1, 0, 0, False, [0, 1]), (2, 1, 0, False, [2, 3]), (3, 2, 0, False, [4, 5])]

    run(main())


def test_a_batch_is_given_again_until_it_is_said_to_be_done():
    async def main():
        async with running() as made:
            first = await made.take()
            again = await made.take()
            assert (again.batch, again.again, again.groups) == (first.batch, True, first.groups)
            assert (await made.ask("ack", {"batch": first.batch}))[0] == 200
            assert (await made.take()).batch == 2
            assert (await made.take(done=1)).batch == 2  # said twice: the answer was lost

    run(main())


def test_msgpack_is_spoken_where_it_is_asked_for():
    async def main():
        async with running() as made:
            body = msgspec.msgpack.encode({"wait_s": 30})
            kinds = [("Content-Type", "application/msgpack"), ("Accept", "application/msgpack")]
            found = await made.client.request("POST", "/v1/rollouts/take", body, kinds)
            assert found.headers["content-type"] == "application/msgpack"
            assert msgspec.msgpack.decode(found.body, type=TakeResponse).groups == (group(0), group(1))

    run(main())


def test_a_wait_has_an_end_and_says_what_it_waits_for():
    async def main():
        async with running(batches=None) as made:
            made.trains.starved_of = "version"
            found = await made.take(wait_s=0.01)
            assert (found.batch, found.over, found.waits_for) == (None, False, "version")

    run(main())


def test_a_version_comes_with_what_is_done_and_only_the_next_one():
    async def main():
        async with running() as made:
            first = await made.take()
            await made.take(done=first.batch, version=1, metrics={"loss": 2.0})
            assert made.trains.updates == [(1, None, None)]
            assert (made.told[0].version, made.told[0].metrics) == (1, {"loss": 2.0})
            status, found = await made.ask("take", {"done": 2, "version": 7})
            assert (status, found["error"]["message"]) == (400, "version 7 cannot come after 1.")
            assert (await made.take()).batch == 2  # it is not done

    run(main())


def test_the_trainers_logprobs_are_of_the_tokens_that_were_drawn():
    async def main():
        async with running() as made:
            first = await made.take()
            status, found = await made.ask("ack", {"batch": 1, "logprobs": {"0/0/a": [[-1.0]]}})
            assert status == 400
            assert "0/0/a the trainer tells [1]" in found["error"]["message"]
            assert (await made.take()).batch == first.batch
            await made.take(done=1, logprobs={"0/0/a": [[-1.0, -2.0]]})
            assert made.told[0].logprobs == {"0/0/a": [[-1.0, -2.0]]}

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        pytest.param({"groups": 3}, 400, "3 groups, and the run's batches have 2", id="more than a batch"),
        pytest.param({"groups": 0}, 400, "Expected `int` >= 1", id="nothing"),
        pytest.param({"wait_s": -1}, 400, "Expected `float` >= 0", id="a wait that is none"),
        pytest.param({"grups": 1}, 400, "unknown field `grups`", id="a field that there is not"),
        pytest.param({"done": 1}, 409, "batch 1 was never given", id="a batch that there was not"),
        pytest.param({"metrics": {"loss": "low"}}, 400, "Expected `float`", id="a metric that is no number"),
        pytest.param([], 400, "Expected `object`", id="no object"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(body, status, says):
    async def main():
        async with running() as made:
            found = await made.ask("take", body)
            assert found[0] == status
            assert says in found[1]["error"]["message"]
            assert (await made.take()).batch == 1  # and has done nothing

    run(main())


def test_what_has_grown_too_old_while_nobody_trained_on_it_is_not_given_again():
    async def main():
        async with running() as made:
            await made.take()
            made.trains.stale = lambda one: one.number == 0
            again = await made.take()
            assert (again.batch, [one.number for one in again.groups]) == (1, [1])
            made.trains.stale = lambda one: one.number <= 1
            found = await made.take()
            assert (found.batch, [one.number for one in found.groups]) == (2, [2, 3])

    run(main())


def test_weights_need_the_admin_key_and_batches_a_key_where_there_is_one(tmp_path):
    files = key_file(tmp_path, "keys", KEY), key_file(tmp_path, "admin", ADMIN)
    plan = TrainerServerPlan.of("127.0.0.1:0", *files, insecure=False, patience_s=60.0)
    update = {"version": 1, "weights": "adapter/", "adapter": "policy", "batch": 1}

    async def main():
        async with running(plan=plan) as made:
            closed = [route for route in made.listening.routes() if route.path != "/health"]
            assert len(closed) == 4
            for route in closed:
                for key in (None, "c" * 64):
                    answer = await made.ask(route.path.removeprefix("/v1/rollouts/"), {}, key=key, method=route.method)
                    assert answer[0] == 401, route
            assert (await made.ask("update", update, key=KEY))[0] == 401
            assert (await made.ask("take", {"wait_s": 30}, key=KEY))[0] == 200
            assert (await made.ask("update", update, key=ADMIN)) == (200, {"version": 1})
            assert made.trains.updates == [(1, "adapter/", "policy")]
            assert (await made.ask("take", {"wait_s": 30}, key=KEY))[1]["batch"] == 2

    run(main())


def test_without_an_admin_key_nobody_hands_over_weights():
    async def main():
        async with running() as made:
            status, found = await made.ask("update", {"version": 1, "weights": "x"})
            assert status == 403
            assert "--admin-key-file" in found["error"]["message"]

    run(main())


@pytest.mark.parametrize("header", [("Origin", "http://evil.example"), ("Origin", "null")])
def test_no_page_in_a_browser_takes_a_batch(header):
    async def main():
        async with running() as made:
            assert (await made.ask("take", {}, headers=[header]))[0] == 403
            found = await made.client.request("POST", "/v1/rollouts/take", b"", [("X", "y")])
            assert found.status == 200

    run(main())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(UsageError("the adapter has another rank."), 400, id="weights that do not fit"),
        pytest.param(BackendDied("the engine is gone."), 503, id="an engine that is gone"),
        pytest.param(WorkError("it failed."), 500, id="anything else"),
    ],
)
def test_what_the_backend_says_of_weights_reaches_the_trainer(tmp_path, error, status):
    async def refuse(*what):
        raise error

    async def main():
        admin = key_file(tmp_path, "admin", ADMIN)
        plan = TrainerServerPlan.of("127.0.0.1:0", None, admin, insecure=False, patience_s=60.0)
        async with running(plan=plan) as made:
            made.trains.update = refuse
            found = await made.ask("update", {"version": 1, "weights": "x"}, key=ADMIN)
            assert found == (status, found[1])
            assert found[1]["error"]["message"] == str(error)

    run(main())


def test_an_address_that_others_reach_needs_a_key_or_a_word():
    with pytest.raises(UsageError, match=r"lets others in.*--api-key-file"):
        TrainerServerPlan.of("0.0.0.0:0", None, None, insecure=False, patience_s=1.0)
    assert TrainerServerPlan.of("0.0.0.0:0", None, None, insecure=True, patience_s=1.0).access().hosts is None
    assert TrainerServerPlan.of("[::1]:9", None, None, insecure=False, patience_s=1.0).host == "::1"


def test_a_run_that_no_trainer_comes_to_is_given_up():
    async def main():
        listening = TrainerServer(TrainerServerPlan("127.0.0.1", 0, patience_s=0.05), 1)
        await listening.meet(StandInTraining())
        try:
            with pytest.raises(WorkError, match=r"no trainer has asked at http://127.* for 0.05 s"):
                await listening.wait_for_request()
            with pytest.raises(WorkError, match="no trainer has asked"):
                await listening.train([group(0)], 0)
            assert listening.batch is None
        finally:
            await listening.close()

    run(main())
