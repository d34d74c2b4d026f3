"""What a plugin holds for too long is said by name, then given up; a second Ctrl-C ends whatever a plugin does."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from evil import Evil, Far, Few, install_evil
from helpers import AtOnce

from gpuinfer.api import Setup
from gpuinfer.config import blame
from gpuinfer.engine import watchdog
from gpuinfer.engine.watchdog import Held, Patience, Watchdog
from gpuinfer.errors import BackendDied, StrategyError
from gpuinfer.host import compile_status, event_loop, signals
from gpuinfer.runtime.run import run

HERE = str(Path(__file__).parent)
SETUP = Setup(patience=0.1, give_up=0.3)
SLOW = Setup(patience=0.02, give_up=1.0)
LOADING = Setup(patience=0.1, give_up=0.05)  # a start may take six times as long


def go(workload=None, backend=None, strategy=None, **arguments):
    return run(
        workload or Few(), backend or Evil(SETUP), strategy or AtOnce(), roofline=False, update_s=0.02, **arguments
    )


HELD = [
    (Evil(SETUP, hold="infer"), AtOnce(), BackendDied, r"backend 'Evil' .* has had batch 1 \(1 request, 1 row\) for"),
    (Evil(LOADING, hold="start"), AtOnce(), BackendDied, "backend 'Evil' .* has been starting for"),
    (Evil(SLOW), Far(), StrategyError, "strategy 'Far' .* does not cut: 1 request waits, for"),
]


@pytest.mark.sample
@pytest.mark.parametrize(("backend", "strategy", "error", "said"), HELD)
def test_what_is_held_is_said_by_name_then_given_up(backend, strategy, error, said, caplog):
    with pytest.raises(error, match=f"^{said} .*, and is given up. Mend it, or allow more with") as caught:
        go(backend=backend, strategy=strategy)
    assert caught.value.report["status"] == "failed"
    assert any(re.match(f"^{said} .* It is given up after", message) for message in caplog.messages)


def test_a_backend_that_does_not_close_keeps_no_result_from_the_user(caplog):
    seen = []
    made = go(backend=Evil(SETUP, hold="close"), on_report=lambda report: seen.append((report, caplog.text)))
    assert [(report["status"], text) for report, text in seen] == [("done", "")]
    assert made["status"] == "done"
    assert "backend 'Evil' (module evil) has been closing for" in caplog.text
    assert "did not close in time, and is left as it is" in caplog.text


def test_a_workload_that_neither_asks_nor_tells_is_named_and_left_alone(caplog):
    said = "workload 'Few' (module evil) has asked for nothing and told of nothing for"
    made = go(
        Few(mute=True), Evil(Setup(patience=0.02, give_up=0.1)), until=lambda update: said in caplog.text, grace_s=0
    )
    assert made["status"] == "done"


def test_what_blocks_the_loop_of_a_worker_process_is_said_of_the_backend(capfd):
    with pytest.raises(BackendDied, match=r"has kept all else waiting in infer for .* \(it is at .*evil.py:\d+\)"):
        go(Few(workers=1), Evil(SETUP, block="infer"))


# How time is counted


class Noting(Watchdog):
    def __init__(self, held, **patience):
        self.errors = []
        super().__init__(Patience(**patience), self.errors.append)
        self.watch(lambda: held)


def test_words_come_at_doubling_times_and_the_end_once_and_say_that_it_compiles(caplog):
    dog = Noting([Held("batch", Evil(), "has had a batch for {age}", 100.0)], say_s=10.0)
    for second in range(200):
        if second == 30:
            compile_status.begin("step")
        dog.check(1.0)
        compile_status.end("step") if second == 60 else None
    said = [message.split("for ")[1].split(". It")[0] for message in caplog.messages]
    assert said == ["10 s", "20 s", f"40 s ({compile_status.NOTE})", "80 s"]
    assert [type(error) for error in dog.errors] == [BackendDied]


def test_what_moves_is_accused_of_nothing_and_a_process_that_was_suspended_accuses_none(monkeypatch, caplog):
    held = [None]
    dog = Noting(held, say_s=1.0, give_up_s=2.0)
    for batch in range(100):
        held[0] = Held(("batch", batch), Evil(), "has had a batch for {age}", 2.0)
        dog.check(0.9)
    assert (dog.errors, caplog.messages) == ([], [])
    dog = Noting([Held("batch", Evil(), "has had a batch for {age}", 100.0)], say_s=10.0)
    now = dog._checked
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    for seconds in (0.0, 1.0, 3600.0, 1.0):
        now += seconds
        dog.check_again()
    assert (dog.errors, caplog.messages) == ([], [])


def test_who_is_called_by_a_backend_and_does_not_come_back_is_named_in_its_place(caplog):
    dog = Noting([Held("batch", Evil(), "has had a batch for {age}", 20.0)], say_s=10.0)
    dog.check(1.0)
    with blame.calling_within(Few(), "decide"):
        for _ in range(30):
            dog.check(1.0)
    assert caplog.messages == [
        "workload 'Few' (module evil) has kept the model waiting in decide for 10 s. It is given up after 20 s."
    ]
    (error,) = dog.errors
    assert "workload 'Few' (module evil) has kept the model waiting in decide for 20 s, and is given up" in str(error)


# The command


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts `gpuinfer` in a process of its own, with the package installed; returns the process."""
    folder = tmp_path_factory.mktemp("site")
    install_evil(folder)
    paths = [str(folder), HERE, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def start(*words):
        words = [sys.executable, "-m", "gpuinfer", *words, "--backend", "evil", "--patience", "0.1"]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    return start


@pytest.mark.sample
@pytest.mark.parametrize("words", [("-B", "block=infer"), ("-B", "block=infer", "--workers", "1")])
def test_a_second_ctrl_c_ends_it_whatever_the_plugin_does(command, words, tmp_path):
    def until(wanted):
        while wanted not in (line := process.stderr.readline()):
            assert line, f"it never said '{wanted}'"

    target = tmp_path / "report.json"
    with command("few", *words, "--json", str(target)) as process:
        until("backend 'evil' (package evil-pkg 0.1)")
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        until("Ctrl-C: stopping, and keeping what is finished, within 30 s. Once more, and it ends at once.")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)  # far less than any patience but that of the second signal
    assert process.returncode == 3
    assert json.loads(target.read_text())["status"] == "partial"
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_backend_that_blocks_the_loop_is_given_up_with_a_report(command, tmp_path):
    target = tmp_path / "report.json"
    with command("few", "-B", "block=infer", "--give-up", "0.3", "--json", str(target)) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(target.read_text())["status"] == "failed"
    assert "backend 'evil' (package evil-pkg 0.1) has kept all else waiting in infer for" in said
    assert "check it with `gpuinfer plugins check evil-pkg`" in said
    assert "Traceback" not in said


def test_it_ends_with_all_that_it_said_where_no_thread_begins_any_more(tmp_path):
    """Since Python 3.12 none does once the interpreter is ending."""
    script = tmp_path / "ending.py"
    script.write_text(
        "import threading, time\nfrom gpuinfer.host import signals\n"
        "threading.Thread(target=time.sleep, args=(1e6,)).start()\nsignals.own()\nprint('said')\nsignals.soon(5)\n"
        "def refused(self):\n    raise RuntimeError('at interpreter shutdown')\nthreading.Thread.start = refused\n"
    )
    done = subprocess.run([sys.executable, script], timeout=200, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (5, "said\n")


def test_a_process_that_is_not_the_command_s_own_is_never_ended_and_a_loop_leaves_behind_what_does_not_end():
    assert not signals.owned()
    signals.soon(5)
    ended = threading.Event()

    async def stubborn():
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.to_thread(ended.wait, 60)

    async def main():
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        return task

    task = event_loop.run(main())
    assert not task.done()
    ended.set()
