"""A trainer over HTTP: who may ask, what is answered, in which form, and what becomes of one that dies."""

import asyncio
import contextlib

import msgspec
import pytest
from played import group

from gpuinfer.errors import BackendDied, UsageError, WorkError
from gpuinfer.http.client import HttpClient
from gpuinfer.rollouts.trainer_server import TakeResponse, TrainerServer, TrainerServerPlan

KEY, ADMIN = "a" * 64, "b" * 64
HERE = "127.0.0.1:0"


def plan_of(folder, keys=None, admin=None):
    """A plan with a file for each of these keys."""
    files = []
    for key in (keys, admin):
        path = folder / f"{key}"
        if key is not None:
            path.write_text(f"{key}\n")
            path.chmod(0o600)
        files.append(None if key is None else path)
    return TrainerServerPlan.of(HERE, *files, insecure=False, patience_s=60.0)


class StandInTraining:
    """A run's training as a trainer's side sees it, with nothing behind it."""

    def __init__(self):
        self.version = self.step = 0
        self.updates = []
        self.stale = lambda group: False
        self.starved_of = "rollouts"

    async def update(self, version, weights=None, adapter=None):
        if version not in (self.version, self.version + 1):
            raise UsageError(f"version {version} cannot come after {self.version}.")
        if version != self.version:
            self.updates.append((version, weights, adapter))
        self.version = version

    def facts(self):
        return {"buffer_waiting": 0}

    def too_old(self, groups):
        return [group for group in groups if self.stale(group)]


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


async def test_a_trainer_takes_batch_after_batch_until_it_is_over():
    async with running() as made:
        done, seen = None, []
        while not (batch := await made.take(done=done)).over:
            seen.append((batch.batch, batch.step, batch.version, batch.again, [one.number for one in batch.groups]))
            assert all(one == group(one.number) for one in batch.groups)  # whole, as it was played
            done = batch.batch
        assert seen == [(1, 0, 0, False, [0, 1]), (2, 1, 0, False, [2, 3]), (3, 2, 0, False, [4, 5])]


async def test_a_batch_is_given_again_until_it_is_said_to_be_done():
    async with running() as made:
        first = await made.take()
        again = await made.take()
        assert (again.batch, again.again, again.groups) == (first.batch, True, first.groups)
        assert (await made.ask("ack", {"batch": first.batch}))[0] == 200
        assert (await made.take()).batch == 2
        assert (await made.take(done=1)).batch == 2  # said twice: the answer was lost
        kinds = [("Content-Type", "application/msgpack"), ("Accept", "application/msgpack")]
        body = msgspec.msgpack.encode({"wait_s": 30})
        found = await made.client.request("POST", "/v1/rollouts/take", body, kinds)
        assert found.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(found.body, type=TakeResponse).groups == (group(2), group(3))


async def test_a_version_and_log_probabilities_come_with_what_is_done():
    async with running() as made:
        first = await made.take()
        status, found = await made.ask("ack", {"batch": 1, "logprobs": {"0/0/a": [[-1.0]]}})
        assert (status, "0/0/a the trainer tells [1]" in found["error"]["message"]) == (400, True)
        assert (await made.take()).batch == first.batch
        logprobs = {"0/0/a": [[-1.0, -2.0]]}
        await made.take(done=first.batch, version=1, metrics={"loss": 2.0}, logprobs=logprobs)
        assert made.trains.updates == [(1, None, None)]
        told = made.told[0]
        assert (told.version, told.metrics, told.logprobs) == (1, {"loss": 2.0}, logprobs)
        status, found = await made.ask("take", {"done": 2, "version": 7})
        assert (status, found["error"]["message"]) == (400, "version 7 cannot come after 1.")
        assert (await made.take()).batch == 2  # it is not done


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"groups": 3}, 400, "3 groups, and the run's batches have 2"),
        ({"groups": 0}, 400, "Expected `int` >= 1"),
        ({"wait_s": -1}, 400, "Expected `float` >= 0"),
        ({"grups": 1}, 400, "unknown field `grups`"),
        ({"done": 1}, 409, "batch 1 was never given"),
        ({"metrics": {"loss": "low"}}, 400, "Expected `float`"),
        ([], 400, "Expected `object`"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_reason(body, status, says):
    async with running() as made:
        found = await made.ask("take", body)
        assert (found[0], says in found[1]["error"]["message"]) == (status, True), found
        assert (await made.take()).batch == 1  # and has done nothing


async def test_what_has_grown_too_old_while_nobody_trained_on_it_is_not_given_again():
    async with running() as made:
        await made.take()
        made.trains.stale = lambda one: one.number == 0
        again = await made.take()
        assert (again.batch, [one.number for one in again.groups]) == (1, [1])
        made.trains.stale = lambda one: one.number <= 1
        found = await made.take()
        assert (found.batch, [one.number for one in found.groups]) == (2, [2, 3])


async def test_weights_need_the_admin_key_and_batches_a_key_where_there_is_one(tmp_path):
    update = {"version": 1, "weights": "adapter/", "adapter": "policy", "batch": 1}
    async with running(plan=plan_of(tmp_path, KEY, ADMIN)) as made:
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


async def test_without_keys_no_weights_are_taken_and_no_page_of_a_browser_takes_a_batch():
    async with running() as made:
        status, found = await made.ask("update", {"version": 1, "weights": "x"})
        assert (status, "--admin-key-file" in found["error"]["message"]) == (403, True)
        for origin in ("http://evil.example", "null"):
            assert (await made.ask("take", {}, headers=[("Origin", origin)]))[0] == 403
        assert (await made.client.request("POST", "/v1/rollouts/take", b"", [("X", "y")])).status == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("the adapter has another rank."), 400),
        (BackendDied("the engine is gone."), 503),
        (WorkError("it failed."), 500),
    ],
)
async def test_what_the_backend_says_of_weights_reaches_the_trainer(tmp_path, error, status):
    async def refuse(*what):
        raise error

    async with running(plan=plan_of(tmp_path, None, ADMIN)) as made:
        made.trains.update = refuse
        found = await made.ask("update", {"version": 1, "weights": "x"}, key=ADMIN)
        assert (found[0], found[1]["error"]["message"]) == (status, str(error))


def test_an_address_that_others_reach_needs_a_key_or_a_word():
    with pytest.raises(UsageError, match=r"lets others in.*--api-key-file"):
        TrainerServerPlan.of("0.0.0.0:0", None, None, insecure=False, patience_s=1.0)
    assert TrainerServerPlan.of("0.0.0.0:0", None, None, insecure=True, patience_s=1.0).access().hosts is None
    assert TrainerServerPlan.of("[::1]:9", None, None, insecure=False, patience_s=1.0).host == "::1"


async def test_waits_have_ends_and_name_what_is_waited_for():
    async with running(batches=None) as made:
        made.trains.starved_of = "version"
        found = await made.take(wait_s=0.01)
        assert (found.batch, found.over, found.waits_for) == (None, False, "version")
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
