"""Worker processes: real ones, real signals."""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from helpers import AtOnce, Doubler, Unpicklable, Unreachable

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import GpuinferError, QueueFull, UnknownName, UsageError, WorkerDied
from gpuinfer.host.child import HEADER, LARGEST, AsyncChannel, Channel, ChannelClosed
from gpuinfer.runtime import worker_pool
from gpuinfer.runtime.session import Session

HERE = str(Path(__file__).parent)


def session(backend=Doubler, setup=None, **options):
    return Session(backend(setup, **options), AtOnce())


async def collect(workers):
    return [pair async for pair in workers]


def answers(pairs, worker):
    return [message["answer"] for index, message in pairs if index == worker and message]


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def eventually(holds, seconds=60.0):
    """Whether it came to hold, looked at every few milliseconds."""
    for _ in range(int(seconds / 0.005)):
        if holds():
            return True
        await asyncio.sleep(0.005)
    return holds()


def open_files():
    return len(os.listdir("/proc/self/fd"))


async def test_each_worker_has_its_own_way_to_the_backend_and_its_messages_arrive_in_order():
    async with session() as infer, infer.workers("helpers:ask", [{"each": 4}, {"each": 2}]) as workers:
        pairs = await collect(workers)
    assert answers(pairs, 0) == [0, 2, 4, 6]
    assert answers(pairs, 1) == [0, 2]
    assert [pair for pair in pairs if pair[1] is None] in ([(0, None), (1, None)], [(1, None), (0, None)])
    assert len({message["pid"] for _, message in pairs if message} | {os.getpid()}) == 3


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(
            {"text": "ä", "bytes": b"\0\xff", "list": [1, 2.5, None, True], "map": {"1": {"2": [3]}}}, id="every kind"
        ),
        pytest.param({"block": bytes(20_000_000)}, id="more than a socket's buffer"),
    ],
)
async def test_plain_values_survive_the_way_there_and_back(message):
    async with session() as infer, infer.workers("helpers:echo", [message]) as workers:
        heard = aiter(workers)
        await anext(heard)
        await workers.send(0, message)
        assert await anext(heard) == (0, {"echo": message, "arguments": message})
        await workers.send(0, {"end": True})
        assert await anext(heard) == (0, None)


async def test_a_message_for_a_worker_that_has_ended_says_so():
    """Whatever Python's transports do: in 3.12 one that is closed raises `TypeError` from `writelines`."""
    ours, theirs = socket.socketpair()
    theirs.close()
    closed = await AsyncChannel.open(ours)
    closed.close()
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosed):
        await closed.send({"mark": True})


async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr("gpuinfer.host.child.LARGEST", 1000)
    async with session() as infer, infer.workers("helpers:echo", [{}]) as workers:
        with pytest.raises(GpuinferError, match="limit of 1,000"):
            await workers.send(0, {"block": bytes(1001)})


@pytest.mark.parametrize(
    ("which", "kind", "message"),
    [
        pytest.param("usage", UsageError, "a bad flag. Use a good one.", id="bad usage stays bad usage"),
        pytest.param("unknown", UnknownName, "Did you mean 'blobnet'", id="an error that builds its own message"),
        pytest.param("queue", QueueFull, "no room. Come back.", id="a failed request stays one"),
        pytest.param("group", UsageError, "inside a group. Look there.", id="the first of a group of errors"),
        pytest.param("foreign", WorkerDied, "worker 0 failed: ZeroDivisionError: divided by nothing", id="any other"),
        pytest.param("exit", WorkerDied, "worker 0 failed: SystemExit: 7", id="an attempt to leave"),
    ],
)
async def test_what_a_worker_raises_is_raised_where_the_workload_listens(which, kind, message):
    async with session() as infer, infer.workers("helpers:fail", [{"which": which}]) as workers:
        with pytest.raises(kind, match=message) as caught:
            await collect(workers)
        assert type(caught.value) is kind
        assert "helpers.py" in caught.value.__notes__[0]
        with pytest.raises(kind, match=message):
            await workers.send(0, {})


async def test_a_backend_that_cannot_start_in_the_worker_is_reported_as_what_it_is():
    model = Setup(model=ModelSpec("any"))
    async with session(Unreachable, model) as infer, infer.workers("helpers:ask", [{"each": 1}]) as workers:
        with pytest.raises(UsageError, match=r"there is no such device. Use --device cpu\."):
            await collect(workers)


async def test_what_cannot_travel_to_a_worker_is_refused_before_anything_starts():
    async with session(Unpicklable) as infer:
        with pytest.raises(UsageError, match="must be picklable"):
            async with infer.workers("helpers:ask", [{"each": 1}]):
                pass
    assert not multiprocessing.active_children()


async def test_a_killed_worker_is_noticed_and_leaves_the_others_untouched():
    async with session() as infer, infer.workers("helpers:echo", [{}, {}]) as workers:
        heard = aiter(workers)
        pids = dict([await anext(heard), await anext(heard)])
        os.kill(pids[1]["pid"], signal.SIGKILL)
        assert await asyncio.wait_for(anext(heard), 60) == (1, None)
        with pytest.raises(WorkerDied, match=r"worker 1 was killed \(SIGKILL"):
            await workers.send(1, {})
        await workers.send(0, {"still": "there"})
        assert (await anext(heard))[1]["echo"] == {"still": "there"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"signal": int(signal.SIGTERM)}, r"worker 0 crashed \(SIGTERM\)", id="a signal"),
        pytest.param({"code": 3}, "worker 0 ended with exit code 3 and did not say why", id="an exit code"),
        pytest.param({"code": 0}, "worker 0 ended with exit code 0", id="a silent success"),
    ],
)
async def test_a_worker_that_vanishes_without_a_word_is_an_error(arguments, message):
    async with session() as infer, infer.workers("helpers:vanish", [arguments]) as workers:
        with pytest.raises(WorkerDied, match=message):
            await collect(workers)


async def test_leaving_the_context_ends_workers_that_wait_for_a_message(monkeypatch):
    monkeypatch.setattr(
        "gpuinfer.runtime.worker_pool.WorkerPool._kill", lambda workers: None
    )  # they leave by themselves
    monkeypatch.setattr(worker_pool, "GRACE_S", 60.0)
    async with session() as infer:
        async with infer.workers("helpers:echo", [{}, {}]) as workers:
            heard = aiter(workers)
            pids = [(await anext(heard))[1]["pid"] for _ in range(2)]
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("target", ["busy_in_thread", "busy_in_loop"])
async def test_leaving_the_context_ends_even_workers_that_cannot_listen(target, monkeypatch):
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.2)
    async with session() as infer:
        async with infer.workers(f"helpers:{target}", [{}]) as workers:
            pid = (await anext(aiter(workers)))[1]["pid"]
        assert gone(pid)


async def test_cancelling_the_workload_ends_its_workers_too():
    pids = []

    async def work():
        async with session() as infer, infer.workers("helpers:echo", [{}]) as workers:
            pids.append((await anext(aiter(workers)))[1]["pid"])
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    assert await eventually(lambda: pids)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pids[0])


@pytest.mark.thorough
async def test_nothing_is_left_behind_by_many_workers():
    async def once():
        async with session() as infer, infer.workers("helpers:ask", [{"each": 1}] * 3) as workers:
            await collect(workers)

    await once()  # the first start also starts multiprocessing's own resource tracker
    before = open_files()
    await once()
    await once()
    assert await eventually(lambda: open_files() <= before)  # fewer: earlier tests' are collected meanwhile
    assert not multiprocessing.active_children()


async def test_the_cores_are_shared_out_and_the_variables_put_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("gpuinfer.host.machine.cores", lambda: 6)
    async with session() as infer, infer.workers("helpers:watch", [{}, {}]) as workers:
        _, told = await anext(aiter(workers))
        assert told["threads"] == "3"
        assert told["max_rows"] == 64
    assert "OMP_NUM_THREADS" not in os.environ


async def test_a_request_to_stop_reaches_every_worker():
    async with session() as infer, infer.workers("helpers:watch", [{}, {}]) as workers:
        heard = aiter(workers)
        assert len({(await anext(heard))[1]["client"] for _ in range(2)}) == 2
        await infer.stop()
        told = [pair for pair in await collect(workers) if pair[1]]
        assert sorted(told) == [(0, {"stopping": True}), (1, {"stopping": True})]


ORPHANS = """
    import asyncio, os, sys
    sys.path.insert(0, sys.argv[1])
    from helpers import AtOnce, Doubler
    from gpuinfer.runtime.session import Session

    async def main():
        async with Session(Doubler(), AtOnce()) as infer, infer.workers(sys.argv[2], [{}, {}]) as workers:
            async for _, message in workers:
                print(message["pid"], flush=True)

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.sample
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("helpers:echo", id="workers that wait"),
        pytest.param("helpers:busy_in_thread", id="workers with a kernel in a thread"),
        pytest.param("helpers:busy_in_loop", id="workers that block their own loop"),
    ],
)
def test_workers_whose_parent_is_killed_do_not_outlive_it(target, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(ORPHANS))
    parent = subprocess.Popen([sys.executable, script, HERE, target], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        family = pids + [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        parent.kill()
    assert asyncio.run(eventually(lambda: all(gone(pid) for pid in family)))  # busy ones would be so for 600 s


def test_a_worker_of_the_command_loads_neither_the_command_line_nor_torch():
    code = "import gpuinfer.__main__, gpuinfer.runtime.worker, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"gpuinfer.runtime.worker", "asyncio"} <= set(loaded)
    assert not {"typer", "rich", "torch", "numba", "numpy", "gpuinfer.cli"} & set(loaded)


def test_an_announced_size_over_the_limit_ends_a_channel_before_memory_is_taken():
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.sendall(HEADER.pack(LARGEST + 1))
        with pytest.raises(ChannelClosed, match="announced"):
            channel.receive()
        channel.close()
