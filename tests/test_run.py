"""A whole run: clock, signals, status, and the report that comes out however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jsonschema
import pytest
from helpers import AtOnce, Counting, Doubler, Endless, Modelled, Prepared, Spread, Unreachable
from remotes import Far

from gpuinfer.api import Progress, Roofline, Setup
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models.roofline_process import KeptSearch
from gpuinfer.report import report
from gpuinfer.runtime import run_roofline, session
from gpuinfer.runtime.run import execute, run

pytestmark = pytest.mark.usefixtures("children_forked")

HERE = str(Path(__file__).parent)


def go(workload, backend=Doubler, **arguments):
    return run(workload, backend(), AtOnce(), **{"update_s": 0.01, **arguments})


def checked(made):
    jsonschema.validate(made, report.schema())
    json.dumps(made, allow_nan=False)
    return made


def test_a_run_that_is_done_reports_what_it_did():
    made = checked(go(Counting(total=20), settings={"backend": "double", "out": Path("games")}))
    assert made["status"] == "done"
    assert made["progress"] == {"done": 20, "total": 20, "unit": "questions", "before": 0}
    assert (made["workload"], made["backend"], made["strategy"]) == ("counting", "double", "atonce")
    assert made["settings"] == {"backend": "double", "out": "games"}
    assert made["batches"]["count"] == 20
    assert made["lanes"] == 2
    assert sum(made["time_s"].values()) == pytest.approx(made["wall_s"] * made["lanes"])
    assert made["time_s"]["search"] > 0
    assert made["throughput"]["questions_per_s"] == pytest.approx(20 / made["wall_s"])
    assert made["throughput"]["games_per_min"] == pytest.approx(10 * 60 / made["wall_s"])
    assert made["roofline"] is None


class Refusing(Doubler):
    """Cannot serve what it was asked for, and says so as soon as it is asked."""

    async def check(self):
        raise UsageError("20 stages, and there are 8 layers. Ask for fewer.")


class Pondering(Doubler):
    """Never comes to a conclusion about what it was asked for."""

    async def check(self):
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("kind", "measured"), [pytest.param(Refusing, False, id="refuses"), pytest.param(Pondering, True, id="never says")]
)
def test_a_bare_model_is_measured_only_where_its_backend_does_not_refuse_it(kind, measured, monkeypatch, tmp_path):
    monkeypatch.setattr(session, "ANSWER_S", 0.05)
    monkeypatch.setattr(run_roofline, "bare_model", lambda backend: pytest.fail("it was measured"))
    backend = kind(Setup(model=Modelled().model()), ready_file=str(tmp_path / "ready"))
    with pytest.raises(pytest.fail.Exception if measured else UsageError):
        run_roofline.roofline_of(backend)
    if not measured:
        with pytest.raises(UsageError, match="8 layers"):
            run(Modelled(), backend, AtOnce(), update_s=0.01)
    assert not (tmp_path / "ready").exists()


def test_worker_processes_count_in_the_report_and_batches_where_they_form():
    made = checked(go(Spread(workers=2, each=5)))
    assert (made["status"], made["progress"]["done"], made["lanes"]) == ("done", 10, 4)
    assert sum(made["time_s"].values()) == pytest.approx(made["wall_s"] * made["lanes"])
    made = checked(go(Prepared(workers=2, each=5), Far))
    assert made["throughput"]["rows_per_s"] * made["wall_s"] == pytest.approx(10)  # its own, not those of the far side
    assert (made["batches"]["rows_p50"], made["lanes"], made["device"]["name"]) == (7, 3, "far away")
    assert made["time_s"]["forward"] > 0


def test_updates_show_the_run_and_what_is_asked_as_setup_counts_neither_in_the_clock_nor_in_the_rates():
    updates = []
    made = checked(go(Counting(total=300, prepare=7), on_update=updates.append, update_s=0.0001))
    assert made["batches"]["count"] == 300
    assert made["setup_s"] > 0
    assert updates[0].phase == "starting"
    assert "running" in {update.phase for update in updates} <= {"starting", "warming up", "running"}
    preparing = [update for update in updates if update.progress.setup]
    assert all(update.elapsed_s == 0 and update.phase == "warming up" for update in preparing)
    for told in (
        [update.snapshot.requests for update in updates if update.phase == "running"],
        [update.elapsed_s for update in updates if update.phase == "running"],
    ):
        assert told == sorted(told)


@pytest.mark.parametrize(
    ("workload", "status", "done"),
    [
        pytest.param(Counting(total=10, stop_after=4), "partial", 4, id="what is finished is kept"),
        pytest.param(Counting(total=10, stop_after=10), "done", 10, id="when all is done"),
        pytest.param(Counting(total=10, stop_after=4, stubborn=True), "done", 10, id="it finishes all the same"),
        pytest.param(Endless(), "partial", None, id="cancelled after the grace"),
    ],
)
def test_a_run_that_is_asked_to_stop(workload, status, done):
    made = checked(go(workload, grace_s=0.05 if done is None else 30.0))
    assert made["status"] == status
    assert done in (None, made["progress"]["done"])


def test_the_second_signal_cancels_at_once_and_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupted = []

    def again(update):
        if update.phase == "stopping" and not interrupted:
            interrupted.append(signal.raise_signal(signal.SIGTERM))

    made = go(Endless(), grace_s=3600, on_update=again)
    assert made["status"] == "partial"
    assert interrupted
    assert asyncio.run(asyncio.to_thread(go, Counting(total=3)))["status"] == "done", "outside of the main thread"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("workload", "backend", "message"),
    [
        pytest.param(Counting(total=10, fail_at=3), Doubler, "question 3 makes no sense", id="a workload that raises"),
        pytest.param(Counting(total=10), Unreachable, "no such device", id="a backend that cannot start"),
        pytest.param(Spread(target="helpers:nothing"), Doubler, "no worker function", id="a worker that cannot start"),
        pytest.param(Endless(), Doubler, "the terminal is gone", id="a display that fails"),
    ],
)
def test_a_failure_is_raised_with_the_report_of_what_was_done(workload, backend, message):
    def show(update):
        if isinstance(workload, Endless):
            raise OSError("the terminal is gone")

    with pytest.raises((UsageError, OSError), match=message) as caught:
        go(workload, backend, on_update=show)
    assert checked(caught.value.report)["status"] == "failed"


async def test_cancelling_the_run_ends_the_workload():
    task = asyncio.create_task(execute(Spread(target="helpers:echo"), Doubler(), AtOnce()))
    for _ in range(20):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def serving_a_model():
    return Doubler(Setup(model=Modelled(total=3).model()))


@pytest.mark.parametrize(
    ("rate", "raised", "efficiency"),
    [pytest.param(1e9, False, None, id="less"), pytest.param(0.001, True, 1, id="more")],
)
def test_a_given_roofline_is_compared_with_and_not_measured_again(rate, raised, efficiency):
    made = checked(go(Counting(total=10), roofline=Roofline(rate, 512, "1 forward × 1 thread", (rate,))))
    found = made["roofline"]
    assert (found["at_rows"], found["measured"], bool(found["raised"])) == (512, [rate], raised)
    assert found["efficiency"] == pytest.approx(efficiency or made["throughput"]["rows_per_s"] / rate)
    for arguments in ({"backend": serving_a_model, "roofline": False}, {}):
        assert go(Modelled(total=3), **arguments)["roofline"] is None


class Bare:
    """Stands in for what measures the bare model, and writes down when it does."""

    def __init__(self, told, known=None, rate=2e9, hangs=(), fails=()):
        self.told, self.known, self.fits_beside = told, known, True
        self.rate, self.hangs, self.fails = rate, hangs, fails

    def before(self, stopped):
        return self._measured("before", stopped)

    def again(self, before, seconds, stopped):
        return self._measured("again", stopped)

    def close(self):
        self.told.append("closed")

    def _measured(self, which, stopped):
        self.told.append(which)
        while which in self.hangs and not stopped():
            time.sleep(0.01)
        if which in self.hangs or which in self.fails:
            raise BackendError("it was killed. Start it again.")
        return Roofline(self.rate, 64, "one", (self.rate,))


def measured_by(monkeypatch, **arguments):
    told = []
    monkeypatch.setattr(run_roofline, "BareModel", lambda backend: Bare(told, **arguments))
    return told


class Preparing(Modelled):
    """Is ready before it goes on."""

    prepares = True

    async def run(self, infer):
        self.told.append(f"prepares for {infer.roofline.rows_per_s if infer.roofline else None}")
        yield Progress(0, 3, setup=True)
        self.told.append("ready")
        yield Progress(0, 3)
        self.told.append("goes on")
        async for progress in super().run(infer):
            yield progress


KNOWN = KeptSearch(64, "one", 1e9, 300.0)


FIRST = ["before", "prepares for 2000000000.0", "ready"]  # where the best batch size is needed first
ONCE_READY = ["prepares for 1000000000.0", "ready", "before"]  # where an earlier run has found it


@pytest.mark.timeout(60)
@pytest.mark.parametrize("known", [None, KNOWN], ids=["", "known"])
@pytest.mark.parametrize("wrong", ["", "fails before", "fails again", "hangs before", "hangs again"])
def test_the_bare_model_is_measured_while_nothing_else_computes_and_a_run_goes_on_without_it(
    wrong, known, monkeypatch, caplog
):
    """A signal ends what hangs; what was finished is kept."""
    how, _, which = wrong.partition(" ")
    told = measured_by(monkeypatch, known=known, **({how: (which,)} if how else {}))
    workload, sent, seen = Preparing(total=3), [], []
    workload.told = told

    def watch(update):
        seen.append(update.roofline)
        phase = "measuring the roofline" + " again" * (which == "again")
        if how == "hangs" and update.phase == phase and not sent:  # a third signal would end the tests
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    made = checked(go(workload, serving_a_model, on_update=watch))
    assert told[-1] == "closed"
    assert wrong or told == [*(ONCE_READY if known else FIRST), "goes on", "again", "closed"]
    done = (0, "partial") if wrong == "hangs before" else (3, "done")
    assert (made["progress"]["done"], made["status"]) == done
    measured = None if which == "before" else [2e9] if wrong else [2e9, 2e9]
    assert (made["roofline"] and made["roofline"]["measured"]) == measured
    assert ("the run goes on without it: it was killed" in caplog.text) == (how == "fails")
    assert {one.rows_per_s for one in seen if one} <= {2e9}
    assert sum(made["time_s"].values()) == pytest.approx(made["wall_s"] * made["lanes"]), "its time is not the run's"


STOPPED = """
    import json, os, sys
    sys.path.insert(0, sys.argv[1])
    from helpers import AtOnce, Doubler, Spread
    from gpuinfer.runtime.run import run

    if __name__ == "__main__":
        workload = Spread(workers=2, each=10, target="helpers:until_stopped")
        print(json.dumps(run(workload, Doubler(), AtOnce(), on_update=lambda u: print(u.progress.done, flush=True))))
"""


@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_to_the_whole_group_ends_workers_by_way_of_the_parent(number, tmp_path):
    script = tmp_path / "stopped.py"
    script.write_text(textwrap.dedent(STOPPED))
    command = [sys.executable, script, HERE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        while parent.stdout.readline() != "2\n":
            assert parent.poll() is None
        os.killpg(parent.pid, number)
        out, _ = parent.communicate(timeout=60)
    made = json.loads(out.splitlines()[-1])
    assert parent.returncode == 0
    assert made["status"] == "partial"
    assert made["progress"]["done"] == 4


def test_a_run_ends_as_done_once_it_is_said_to_be_enough_but_a_signal_is_a_stop():
    made = checked(go(Counting(total=10_000_000), until=lambda update: update.progress.done >= 10))
    assert made["status"] == "done"
    assert 10 <= made["progress"]["done"] < 10_000_000
    told = []

    def enough(update):
        told.append(update.phase == "stopping")  # not before: else it was enough, and no signal had come
        return told[-1]

    made = checked(go(Counting(total=10_000_000, stop_after=3), until=enough))
    assert made["status"] == "partial"
