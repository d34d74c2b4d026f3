"""Worker processes: real ones, real signals; proof of life; errors that travel."""

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
from remotes import Far

from gpuinfer import errors
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import BadPrompt, GpuinferError, QueueFull, UnknownName, UsageError, WorkerDied
from gpuinfer.host import child, shared_memory
from gpuinfer.host.child import (
    AWAY_S,
    BEATS,
    HEADER,
    HEARTBEAT_SIZE,
    LARGEST,
    LATE_S,
    START_LATE_S,
    AsyncChannel,
    Channel,
    ChannelClosed,
    Heartbeat,
    HeartbeatWatch,
)
from gpuinfer.host.error_text import nearest_error_type, rebuilt_error
from gpuinfer.runtime import worker_pool
from gpuinfer.runtime.session import Session

HERE = str(Path(__file__).parent)


def session(backend=Doubler, setup=None, **options):
    return Session(backend(setup, **options), AtOnce())


async def collect(workers):
    return [pair async for pair in workers]


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def eventually(holds, seconds=60.0):
    """Whether it came to hold, looked at every few milliseconds."""
    for _ in range(int(seconds / 0.005)):
        if holds():
            return True
        await asyncio.sleep(0.005)
    return holds()


# Messages


async def test_each_worker_has_its_own_way_to_the_backend_and_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("gpuinfer.host.machine.cores", lambda: 6)
    async with session() as infer:
        async with infer.workers("helpers:ask", [{"each": 4}, {"each": 2}]) as workers:
            pairs = await collect(workers)
        async with infer.workers("helpers:watch", [{}, {}]) as workers:
            heard = aiter(workers)
            told = [(await anext(heard))[1] for _ in range(2)]
            await infer.stop()
            assert sorted(pair for pair in await collect(workers) if pair[1]) == [
                (0, {"stopping": True}),
                (1, {"stopping": True}),
            ]
    for worker, answers in ((0, [0, 2, 4, 6]), (1, [0, 2])):
        assert [message["answer"] for index, message in pairs if index == worker and message] == answers
        assert [message for index, message in pairs if index == worker][-1] is None
    assert len({message["pid"] for _, message in pairs if message} | {os.getpid()}) == 3
    assert [(one["threads"], one["max_rows"]) for one in told] == [("3", 64)] * 2
    assert len({one["client"] for one in told}) == 2
    assert "OMP_NUM_THREADS" not in os.environ


PLAIN = {"text": "ä", "bytes": b"\0\xff", "list": [1, 2.5, None, True], "map": {"1": {"2": [3]}}}


async def test_plain_values_survive_the_way_there_and_back_and_one_that_is_too_large_is_not_sent(monkeypatch):
    async with session() as infer, infer.workers("helpers:echo", [PLAIN]) as workers:
        heard = aiter(workers)
        await anext(heard)
        for message in (PLAIN, {"block": bytes(20_000_000)}):  # more than a socket's buffer
            await workers.send(0, message)
            assert await anext(heard) == (0, {"echo": message, "arguments": PLAIN})
        monkeypatch.setattr("gpuinfer.host.child.LARGEST", 1000)
        with pytest.raises(GpuinferError, match="limit of 1,000"):
            await workers.send(0, {"block": bytes(1001)})
        await workers.send(0, {"end": True})
        assert await anext(heard) == (0, None)


async def test_a_channel_that_is_closed_or_is_announced_too_much_says_so():
    """Whatever Python's transports do: in 3.12 one that is closed raises `TypeError` from `writelines`."""
    ours, theirs = socket.socketpair()
    theirs.close()
    closed = await AsyncChannel.open(ours)
    closed.close()
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosed):
        await closed.send({"mark": True})
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.sendall(HEADER.pack(LARGEST + 1))
        with pytest.raises(ChannelClosed, match="announced"):
            channel.receive()
        channel.close()


# Ends


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("target", "arguments", "kind", "message"),
    [
        ("fail", {"which": "usage"}, UsageError, "a bad flag. Use a good one."),
        ("fail", {"which": "unknown"}, UnknownName, "Did you mean 'blobnet'"),
        ("fail", {"which": "queue"}, QueueFull, "no room. Come back."),
        ("fail", {"which": "group"}, UsageError, "inside a group. Look there."),
        ("fail", {"which": "foreign"}, WorkerDied, "worker 0 failed: ZeroDivisionError: divided by nothing"),
        ("fail", {"which": "exit"}, WorkerDied, "worker 0 failed: SystemExit: 7"),
        ("vanish", {"signal": int(signal.SIGTERM)}, WorkerDied, r"worker 0 crashed \(SIGTERM\)"),
        ("vanish", {"code": 3}, WorkerDied, "worker 0 ended with exit code 3 and did not say why"),
        ("vanish", {"code": 0}, WorkerDied, "worker 0 ended with exit code 0"),
    ],
)
async def test_what_a_worker_raises_or_ends_with_is_raised_where_the_workload_listens(target, arguments, kind, message):
    async with session() as infer, infer.workers(f"helpers:{target}", [arguments]) as workers:
        with pytest.raises(kind, match=message) as caught:
            await collect(workers)
        assert type(caught.value) is kind
        assert target == "vanish" or "helpers.py" in caught.value.__notes__[0]
        with pytest.raises(kind, match=message):
            await workers.send(0, {})


async def test_what_cannot_start_in_a_worker_or_travel_there_is_told_as_what_it_is():
    model = Setup(model=ModelSpec("any"))
    async with session(Unreachable, model) as infer, infer.workers("helpers:ask", [{"each": 1}]) as workers:
        with pytest.raises(UsageError, match=r"there is no such device. Use --device cpu\."):
            await collect(workers)
    async with session(Unpicklable) as infer:
        with pytest.raises(UsageError, match="must be picklable"):
            async with infer.workers("helpers:ask", [{"each": 1}]):
                pass
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("helpers:echo", signal.SIGKILL),
        ("helpers:echo", signal.SIGSTOP),
        pytest.param("helpers:busy_in_thread", signal.SIGSTOP, marks=pytest.mark.thorough),
    ],
)
async def test_a_worker_that_is_killed_or_stopped_is_noticed_and_leaves_the_others_untouched(
    target, number, monkeypatch
):
    monkeypatch.setattr(child, "LATE_S", 3.0)
    async with session(Far) as infer, infer.workers(target, [{}, {}]) as workers:
        heard = aiter(workers)
        pids = dict([await anext(heard), await anext(heard)])
        os.kill(pids[1]["pid"], number)
        assert await asyncio.wait_for(anext(heard), 60) == (1, None)
        assert (gone(pids[0]["pid"]), gone(pids[1]["pid"])) == (False, True)
        with pytest.raises(WorkerDied, match=r"worker 1 was killed \(SIGKILL"):
            await workers.send(1, {})
        if target == "helpers:echo":
            await workers.send(0, {"still": "there"})
            assert (await anext(heard))[1]["echo"] == {"still": "there"}


@pytest.mark.parametrize("target", ["echo", "busy_in_thread", "busy_in_loop"])
async def test_leaving_the_context_ends_workers_that_wait_and_even_those_that_cannot_listen(target, monkeypatch):
    if target == "echo":  # they leave by themselves
        monkeypatch.setattr("gpuinfer.runtime.worker_pool.WorkerPool._kill", lambda workers: None)
    monkeypatch.setattr(worker_pool, "GRACE_S", 60.0 if target == "echo" else 0.2)
    pids, cancelled = [], target == "echo"

    async def work():
        async with session() as infer, infer.workers(f"helpers:{target}", [{}]) as workers:
            pids.append((await anext(aiter(workers)))[1]["pid"])
            if cancelled:
                await asyncio.Event().wait()

    task = asyncio.create_task(work())
    assert await eventually(lambda: pids)
    if cancelled:
        task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError | None)
    assert gone(pids[0])


@pytest.mark.thorough
async def test_nothing_is_left_behind_by_many_workers():
    async def once():
        async with session() as infer, infer.workers("helpers:ask", [{"each": 1}] * 3) as workers:
            await collect(workers)

    await once()  # the first start also starts multiprocessing's own resource tracker
    before = len(os.listdir("/proc/self/fd"))
    await once()
    await once()
    assert await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)  # fewer: earlier tests' are collected
    assert not multiprocessing.active_children()


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
@pytest.mark.parametrize("target", ["helpers:echo", "helpers:busy_in_thread", "helpers:busy_in_loop"])
def test_workers_whose_parent_is_killed_do_not_outlive_it(target, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(ORPHANS))
    with subprocess.Popen([sys.executable, script, HERE, target], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        family = pids + [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        parent.kill()
    assert asyncio.run(eventually(lambda: all(gone(pid) for pid in family)))  # busy ones would be so for 600 s


def test_a_worker_of_the_command_loads_neither_the_command_line_nor_torch():
    code = "import gpuinfer.__main__, gpuinfer.runtime.worker, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"gpuinfer.runtime.worker", "asyncio"} <= set(loaded)
    assert not {"typer", "rich", "torch", "numba", "numpy", "gpuinfer.cli"} & set(loaded)


# Proof of life


class Watched:
    """A watch on a clock of its own, and what beats."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        descriptor, self.memory = shared_memory.create(HEARTBEAT_SIZE)
        os.close(descriptor)
        monkeypatch.setattr(child.time, "monotonic", lambda: self.now)
        self.watch = HeartbeatWatch(self.memory)

    def beat(self, started):
        BEATS.pack_into(self.memory, 0, BEATS.unpack_from(self.memory)[0] + 1, started)

    def looks(self, pid=None, every_s=1.0):
        """How many looks without a beat until the process is stuck."""
        for count in range(1, 1000):
            self.now += every_s
            if self.watch.is_stuck(pid or os.getpid()):
                return count
        raise AssertionError("never")


@pytest.mark.parametrize(("started", "patience_s"), [(True, LATE_S), (False, START_LATE_S)])
def test_a_process_is_stuck_after_so_long_without_a_beat_however_long_the_watcher_was_away(
    started, patience_s, monkeypatch
):
    watched = Watched(monkeypatch)
    for _ in range(2):
        for _ in range(100):
            watched.beat(started)
            watched.now += 1.0
            assert not watched.watch.is_stuck(os.getpid())
        assert watched.looks() == patience_s + 1
    watched.beat(started)
    assert not watched.watch.is_stuck(os.getpid())
    assert watched.looks(every_s=3600.0) == patience_s // AWAY_S + 1


def test_a_process_that_was_stopped_while_it_starts_is_stuck_sooner(monkeypatch):
    watched = Watched(monkeypatch)
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        watched.watch.late_s()
        assert watched.looks(stopped.pid) == LATE_S + 1
    finally:
        stopped.kill()
        stopped.communicate()


async def test_a_heartbeat_beats_by_itself_and_says_when_the_start_is_over(monkeypatch):
    monkeypatch.setattr(child, "BEAT_S", 0.01)
    descriptor, memory = shared_memory.create(HEARTBEAT_SIZE)
    Heartbeat(shared_memory.Descriptor(descriptor)).started()
    assert await eventually(lambda: BEATS.unpack_from(memory) > (3, True))


@pytest.mark.thorough
async def test_a_worker_that_computes_on_its_loop_is_left_alone(monkeypatch):
    monkeypatch.setattr(worker_pool, "LOOK_S", 0.5)
    async with session(Far) as infer, infer.workers("remotes:busy", [{"steps": 10**8}]) as workers:
        told = [message for _, message in await collect(workers) if message]
    assert told == [{"total": (10**8 - 1) * 10**8 // 2}]


# Errors


class Own(BadPrompt):
    """One that another process does not know."""


def test_every_error_of_ours_comes_back_as_it_was_and_a_special_one_as_the_nearest_of_ours():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, GpuinferError):
            assert nearest_error_type(kind.__new__(kind)) == kind.__name__
            error = rebuilt_error(kind.__name__, "too long. Cut it.")
            assert (type(error), str(error)) == (kind, "too long. Cut it.")
    assert nearest_error_type(Own("too long. Cut it.")) == "BadPrompt"
    assert nearest_error_type(ValueError("odd")) is None
    assert rebuilt_error("ValueError", "odd") is rebuilt_error("unwrap", "odd") is None
