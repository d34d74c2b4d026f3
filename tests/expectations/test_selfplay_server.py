"""What users of a central server for self-play expect: parity on their own model, a run that outlives its server, what
the server's batches bring, and which parameter does what.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_outcomes import made_document, outcome

from gpuinfer.api import Limits, ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.fallback import LocalPlan, weights_identity, with_fallback
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine.arrivals import ClosedLoop
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, WorkError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.loop.loop_figures import step_figures
from gpuinfer.lab.loop.loop_runner import LoopStep
from gpuinfer.lab.loop.loop_summary import device_use, loop_page
from gpuinfer.lab.simulate import simulate
from gpuinfer.lab.verify.module_answers import answers_of_module
from gpuinfer.lab.verify.rows_verification import RowsRoute, RowsVerification, planned, rows_to_verify
from gpuinfer.lab.verify.verify_setup import VerifyOptions
from gpuinfer.models.positions import positions_of
from gpuinfer.runtime.run import execute
from gpuinfer.stats import Snapshot
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload

pytestmark = pytest.mark.usefixtures("children_forked")

WAIT_S = 120
SKIPPED = "there are 60 rows. Give more rows, or a higher --limit"


class ServerKiller:
    """Kills the server of a run with SIGKILL, each time that it serves, once games are under way."""

    def __init__(self, backend):
        self.backend, self.killed, self.live = backend, [], []

    def look(self, update):
        from gpuinfer.cli.screen.live_view import health_of

        self.live += health_of(update, {})[:1]
        server = self.backend._primary._server
        if update.elapsed_s and update.snapshot.rows and server is not None and not server.lost:
            pid = server._child.pid
            if pid not in self.killed:
                self.killed.append(pid)
                os.kill(pid, signal.SIGKILL)


def played(folder, backend_of, look=lambda backend: lambda update: None, until=lambda update: False, games=10**6):
    """Self-play to its end, or until `until` says that it is enough. `look` makes what sees each update."""
    play = SelfPlayWorkload(
        Setup(),
        model="blobnet-small",
        games=games,
        games_in_flight=32,
        simulations=24,
        workers=2,
        out=folder,
        deterministic=True,
    )
    setup = Setup(model=play.model(), processes=play.processes, deterministic=play.deterministic)
    backend = backend_of(setup)

    async def run():
        done = execute(
            play, backend, Dynamic(setup), roofline=False, on_update=look(backend), until=until, update_s=0.05
        )
        return await asyncio.wait_for(done, WAIT_S)

    return asyncio.run(run())


def played_with_a_killed_server(folder, until=lambda update: False, games=10**6, **options):
    killers = []

    def look(backend):
        killers.append(ServerKiller(backend))
        return killers[0].look

    def backend_of(setup):
        return with_fallback(Central(setup, **options), "central", "inprocess", InProcess, {})

    return played(folder, backend_of, look, until, games), killers[0]


def test_a_run_goes_on_in_its_own_processes_when_the_server_is_killed(tmp_path, caplog):
    def enough(update):
        """Each worker has been answered in its own process."""
        lines = update.snapshot.fallback.values()
        return any(line["processes"] == 2 and line["batches"] > 20 for line in lines) and update.progress.done > 0

    report, killer = played_with_a_killed_server(tmp_path / "out", enough)
    assert len(killer.killed) == 1
    assert (report["status"], report["errors"]["failed"]) == ("done", 0)
    gone_on = report["fallback"]
    assert (gone_on["backend"], gone_on["processes"]) == ("inprocess", 2)
    assert 0 < gone_on["rows"] < report["throughput"]["rows_per_s"] * report["wall_s"]
    assert 1 <= report["errors"]["retried"] <= 4, "two blocks of each worker"
    assert "gone" in gone_on["why"]
    said = [record.getMessage() for record in caplog.records if "as --fallback says" in record.getMessage()]
    assert len(said) == 1, "once for the run, and not once for each worker"
    assert any("inprocess goes on" in line for line in killer.live)


@pytest.mark.thorough
def test_a_run_whose_servers_restarts_are_used_up_plays_the_games_that_it_would_have_played(tmp_path, caplog):
    games = 400  # enough work that the run is not over before the server has died twice
    report, killer = played_with_a_killed_server(tmp_path / "killed", games=games, restart=True)
    assert len(killer.killed) >= 2
    assert "It is started again." in caplog.text
    assert (report["status"], report["errors"]["failed"]) == ("done", 0)
    assert report["fallback"]["backend"] == "inprocess"
    undisturbed = played(tmp_path / "whole", InProcess, games=games)
    assert undisturbed["fallback"] is None
    found, right = (positions_of([tmp_path / name]) for name in ("killed", "whole"))
    for name in ("observation", "policy", "value"):
        assert np.array_equal(getattr(found, name), getattr(right, name))


@asynccontextmanager
async def engine_over(backend):
    engine = Engine(backend, Dynamic(backend.setup))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain=False)


@pytest.mark.thorough
async def test_texts_go_on_in_this_process_where_the_killed_server_stopped(tmp_path):
    setup = Setup(ModelSpec("tiny", kind="text"), devices=("cpu",), deterministic=True)
    backend = with_fallback(Central(setup, slots=4, context=1024), "central", "inprocess", InProcess, {})
    sampling = Sampling(max_tokens=500, ignore_eos=True)
    prompts = [Prompt(text=f"prompt {number}", key=f"{number}", sampling=sampling) for number in range(6)]
    async with engine_over(backend) as engine:
        first = asyncio.Event()
        read = [[] for _ in prompts]

        def on_part(number):
            def keep(part):
                read[number] += part.tokens
                first.set()

            return keep

        tasks = [
            asyncio.create_task(engine.submit(prompt, on_part=on_part(number))) for number, prompt in enumerate(prompts)
        ]
        await asyncio.wait_for(first.wait(), WAIT_S)
        os.kill(backend._primary._server._child.pid, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
        assert backend.lost is None
        assert Snapshot.from_wire(backend.counted_here()).fallback["inprocess"]["requests"] > 0
    async with engine_over(InProcess(setup, slots=4, context=1024)) as engine:
        right = await asyncio.wait_for(asyncio.gather(*map(engine.submit, prompts)), WAIT_S)
    tokens = [list(answer.completions[0].tokens) for answer in right]
    assert [list(answer.completions[0].tokens) for answer in answers] == tokens
    assert read == tokens, "nothing is missing, and nothing came twice"


@pytest.mark.thorough
def test_a_fleet_that_is_gone_is_replaced_too(tmp_path):
    ready = tmp_path / "ready"
    words = ["serve", "--model", "blobnet-small", "--features", "8", "--actions", "4", "--seats", "2", "--port", "0"]
    process = subprocess.Popen([sys.executable, "-m", "gpuinfer", *words, "--ready-file", str(ready), "--quiet"])
    try:
        until(ready.exists, process)
        url = "http://{host}:{port}".format(**json.loads(ready.read_text()))
        setup = Setup(ModelSpec("blobnet-small", inputs=8, arguments={"actions": 4, "seats": 2}))
        fleet = with_fallback(FleetBackend(setup, endpoint=url, retry=0.5), "fleet", "inprocess", InProcess, {})
        before, after = asyncio.run(evaluated_before_and_after(fleet, process))
        for one, other in zip(before, after, strict=True):
            assert np.allclose(one, other, atol=1e-5)
    finally:
        process.kill()
        process.wait(WAIT_S)


async def evaluated_before_and_after(backend, process):
    """The same rows through the server, and once it has been killed."""
    rows = np.eye(8, dtype=np.float32)
    async with engine_over(backend) as engine:
        before = await asyncio.wait_for(engine.submit(rows, rows=8), WAIT_S)
        process.kill()
        process.wait(WAIT_S)
        return before, await asyncio.wait_for(engine.submit(rows, rows=8), WAIT_S)


def until(condition, process):
    """Wait for something that a running process does."""
    for _ in range(WAIT_S * 20):
        if condition():
            return
        assert process.poll() is None, "it has ended"
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def test_a_fallback_without_a_server_to_lose_is_refused_with_a_cure(gpuinfer, empty_folder):
    model = ("selfplay", "--model", "blobnet-small", "--games", "1")
    refused = {
        ("--fallback", "inprocess"): "choose --backend central",
        ("--backend", "central", "--fallback", "central"): "--fallback inprocess",
        ("--backend", "central", "--fallback", "nowhere"): "no backend named 'nowhere'",
    }
    for words, cure in refused.items():
        code, _, err = gpuinfer(*model, *words)
        assert (code, cure in err) == (2, True), err


def test_a_fallback_of_a_server_for_others_is_refused(gpuinfer, empty_folder, monkeypatch):
    monkeypatch.setenv("GPUINFER_FALLBACK", "inprocess")
    code, _, err = gpuinfer("serve", "--model", "blobnet-small", "--features", "8", "--backend", "central")
    assert (code, "GPUINFER_FALLBACK: a fallback is for a run" in err) == (2, True), err


def test_a_fallback_never_goes_on_with_other_weights(tmp_path):
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"one")
    spec = ModelSpec("blobnet-small", str(weights), 8, arguments={"actions": 4, "seats": 2})
    plan = LocalPlan("inprocess", InProcess, Setup(model=spec), {}, weights_identity(spec))
    assert isinstance(plan.make(), InProcess)
    weights.write_bytes(b"two")
    with pytest.raises(BackendDied, match="weights of 'blobnet-small' have changed"):
        plan.make()


# Parity


def verified(gpuinfer, tmp_path, model, *words):
    place = tmp_path / "verify.json"
    flags = ("--model", f"row_networks:{model}", "--features", "12", "--json", str(place), "--batch-sizes", "1,16")
    code, out, err = gpuinfer("verify", *flags, *words)
    return code, json.loads(place.read_text()), out + err


def test_verify_shows_the_largest_difference_of_policy_and_value_by_every_way_to_the_model(gpuinfer, tmp_path):
    words = ("--actions", "9", "--seats", "2", "--through", "central")
    code, found, said = verified(gpuinfer, tmp_path, "sound", *words)
    checks = {check["name"]: check for check in found["checks"]}
    assert (code, found["holds"]) == (0, True), said
    assert list(checks) == ["in one batch", "inprocess, 1 a request", "inprocess, 16 a request", "central"]
    for check in checks.values():
        policy, value = check["outputs"]
        assert (policy["name"], value["name"], policy["same_best"]) == ("policy", "value", 1.0)
        assert policy["largest_difference"] <= found["tolerance"]
        assert check["compared"] == found["rows"]
    assert "best policy" in said


def test_verify_names_a_network_whose_answers_depend_on_the_batch_and_ends_with_4(gpuinfer, tmp_path):
    words = ("--actions", "9", "--seats", "2", "--through", "inprocess")
    code, found, said = verified(gpuinfer, tmp_path, "batch_dependent", *words)
    in_one_batch = found["checks"][0]
    assert (code, found["holds"], in_one_batch["status"]) == (4, False, "fails")
    policy, value = in_one_batch["outputs"]
    assert policy["largest_difference"] <= found["tolerance"] < value["largest_difference"]
    assert "the module itself" in " ".join(said.split())


def test_verify_takes_rows_of_a_file_and_outputs_of_any_name(gpuinfer, tmp_path):
    rows = tmp_path / "rows.npy"
    np.save(rows, np.random.default_rng(1).standard_normal((50, 12)).astype(np.float32))
    code, found, said = verified(gpuinfer, tmp_path, "named", "--rows", str(rows), "--through", "inprocess")
    assert (code, found["rows"]) == (0, 50), said
    assert [one["name"] for one in found["checks"][0]["outputs"]] == ["logits", "score"]
    assert found["checks"][0]["outputs"][1]["same_best"] is None, "it has one entry a row"


def module_answers(model, rows=20):
    spec = ModelSpec(f"row_networks:{model}", None, 12, "float32", {"actions": 9, "seats": 2})
    drawn = np.random.default_rng(1).standard_normal((rows, 12)).astype(np.float32)
    return answers_of_module(spec, Setup(model=spec, devices=("cpu",)), drawn)


def test_verify_names_what_stays_in_training_mode_where_the_module_raises_for_one_row():
    with pytest.raises(
        WorkError, match=r"raised for one row alone.*In training mode in spite of .*'norm' \(BatchNorm1d"
    ):
        module_answers("in_training")


def test_verify_ends_with_4_and_the_words_of_a_network_that_raises_for_several_rows(gpuinfer, tmp_path):
    code, found, said = verified(gpuinfer, tmp_path, "one_row", "--through", "inprocess")
    assert (code, found["holds"], {check["status"] for check in found["checks"]}) == (4, False, {"fails"}), said
    assert "raised for 400 rows: RuntimeError: one row, please" in found["checks"][0]["why"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("in_training_spread", "In training mode in spite of eval(): 'norm'"),
        ("batch_dependent", "its rows depend on one another"),
        ("not_a_number", "answers NaN in value"),
        ("dropping", "does not answer alike when it is called twice"),
        ("counting", "does not answer alike when it is called twice"),
    ],
)
def test_verify_says_why_the_module_itself_answers_otherwise_in_a_batch(model, why):
    spec = ModelSpec(f"row_networks:{model}", None, 12, "float32", {"actions": 9, "seats": 2})
    verification = RowsVerification(VerifyOptions(model=spec.name), Setup(model=spec, devices=("cpu",)), spec)
    module = module_answers(model)
    verification._compared(route := RowsRoute("in one batch", answers=module.batched), module)
    assert (route.status, why in route.why) == ("fails", True), route.why


def test_verify_draws_as_many_rows_as_the_largest_batch_needs_and_lists_a_size_with_too_few():
    spec = ModelSpec("row_networks:sound", None, 12, "float32")
    sizes = {"model": spec.name, "batch_sizes": [500, 2], "through": ["inprocess"]}
    for limit, rows in (({}, 500), ({"limit": 1000}, 1000), ({"limit": 60}, 60)):
        options = VerifyOptions(**sizes, **limit)
        assert len(rows_to_verify(options, spec, 0)) == rows
        large, small = planned(options, rows)["inprocess"]
        assert sum(small.sizes) == rows
        assert (sum(large.sizes), large.why) == ((rows, "") if rows >= 500 else (0, SKIPPED)), large


def test_verify_takes_the_backend_options_of_the_process_and_says_which_size_it_left_out(gpuinfer, tmp_path):
    words = ("--through", "inprocess", "--limit", "8", "-B", "parallel=layers", "-B", "split_points=1")
    place = tmp_path / "verify.json"
    model = ("--model", "blobnet-small", "--batch-sizes", "2,16", "--json", str(place))
    code, _, err = gpuinfer("verify", *model, *words)
    assert code == 0, err
    checks = {check["name"]: check["status"] for check in json.loads(place.read_text())["checks"]}
    expected = {"in one batch": "holds", "inprocess, 16 a request": "skipped", "inprocess, 2 a request": "holds"}
    assert checks == expected
    code, _, err = gpuinfer("verify", *model, "-B", "split_points=1")
    assert (code, "parallel=data it is not cut" in " ".join(err.split())) == (2, True), err


@pytest.mark.thorough
def test_verify_asks_a_fleet_too(gpuinfer, tmp_path):
    words = ("--actions", "9", "--seats", "2", "--replicas", "2")
    code, found, said = verified(gpuinfer, tmp_path, "sound", *words)
    assert code == 0, said
    assert [check["name"] for check in found["checks"]][-2:] == ["central", "fleet of 2"]


def test_verify_refuses_options_of_the_other_kind_of_model(gpuinfer, empty_folder):
    refused = {
        ("--model", "row_networks:sound"): "--features N",
        ("--model", "row_networks:sound", "--features", "3", "--prompts", "x"): "for models of text",
        ("--model", "tiny", "--rows", "x.npy"): "for networks of rows",
        ("--model", "tiny", "--features", "3"): "belongs to a network of rows",
        ("--model", "row_networks:sound", "--features", "3", "--rows", "x.npy"): "Give a .npy file",
        ("--model", "row_networks:sound", "--features", "3", "--batch-sizes", "0"): "Use 1 to 4096",
        ("--model", "row_networks:of_sizes", "--features", "3"): "Give --actions N and --seats N",
        ("--model", "row_networks.py:sound", "--features", "3"): "Write 'row_networks:sound'",
        ("--model", "some/row_networks.py:sound", "--features", "3"): "Write 'some.row_networks:sound'",
    }
    for words, cure in refused.items():
        code, _, err = gpuinfer("verify", *words)
        assert (code, cure in err) == (2, True), err


# Batches with a server and without


def test_bench_compare_sets_the_mean_batches_side_by_side_and_says_what_they_bring():
    series = outcome({"inprocess": [100.0, 101.0, 102.0], "central": [150.0, 151.0, 152.0]})
    for run in series.runs:
        if run.variant == "central":
            run.report["batches"]["rows_mean"] = 640.0
    made = made_document(series)
    first, second = made["comparison"]
    assert first["rows_per_batch_to_first"] == 1.0
    assert second["rows_per_batch_to_first"] == pytest.approx(640 / first["rows_per_batch"])
    page = bench_page(made)
    column = page.table.columns.index("rows/batch")
    assert page.table.rows[1][column] == f"640 ({640 / first['rows_per_batch']:.2g}×)"
    said = dict(page.notes)["batches"]
    assert said.startswith("central computes batches of 640 rows")
    assert "as fast" in said


# The loop


def games_report(**device):
    return {
        "setup_s": 1.0,
        "wall_s": 2.0,
        "progress": {"done": 40},
        "throughput": {"games_per_min": 1200.0},
        "batches": {"rows_mean": 512.0},
        "device": {"name": "a GPU", "utilisation": 0.2, "utilisation_mean": 0.87, "reserved_mb": 2048.0, **device},
    }


def test_the_loops_table_and_its_tracked_figures_show_batches_and_use_of_the_device(tmp_path):
    step = LoopStep("games", 1, [], tmp_path / "games.json")
    figures = step_figures(step, games_report(), False)
    assert figures["loop/rows_per_batch"] == 512
    assert (figures["loop/device_utilisation"], figures["loop/device_mb"]) == (0.87, 2048)
    on_cpu = games_report(utilisation=None, utilisation_mean=None, reserved_mb=None)
    assert "loop/device_utilisation" not in step_figures(step, on_cpu, False)
    iteration = dict.fromkeys(("games", "games_s", "loss", "training_s", "strength", "gate"))
    lines = [
        {**iteration, "iteration": 1, **device_use(games_report())},
        {**iteration, "iteration": 2, **device_use(on_cpu)},
    ]
    whole = {"iterations": lines, "strength": None, "command": "gpuinfer loop", "staleness": None, "time": None}
    table = loop_page(whole, {}).table
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert (rows[0]["rows/batch"], rows[0]["device"]) == ("512", "87% busy, 2.15 GB")
    assert (rows[1]["rows/batch"], rows[1]["device"]) == ("512", "–")


# Which parameter does what


@pytest.fixture
def benchmarks(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    return folder


TOO_LITTLE = {  # of the GPU's usual rate, at most
    "max_rows": (64, 0.1),
    "workers": (1, 0.2),
    "games": (256, 0.2),
    "request_rows": (64, 0.5),
}


def test_too_little_of_each_parameter_costs_a_gpu_most_of_its_rate_and_too_much_wait_some(benchmarks):
    from selfplay_machines import GPU, USUAL, simulated

    usual = USUAL[GPU.name]
    rate = simulated(GPU, usual).served_rows_per_s
    for field, (value, share) in TOO_LITTLE.items():
        assert simulated(GPU, replace(usual, **{field: value})).served_rows_per_s < share * rate, field
    assert simulated(GPU, replace(usual, max_wait_s=0.1)).served_rows_per_s < 0.9 * rate
    assert simulated(GPU, replace(usual, games=160_000)).served_rows_per_s > rate, "more games than needed cost no rate"


def test_sixteen_workers_fill_a_gpu_by_a_server_better_than_each_by_itself(benchmarks):
    from selfplay_machines import GPU, USUAL, simulated

    play = USUAL[GPU.name]
    together, alone = simulated(GPU, play), simulated(GPU, replace(play, max_rows=play.games * 3 // 32))
    assert together.mean_batch_rows > 4 * alone.mean_batch_rows
    assert together.served_rows_per_s > 1.1 * alone.served_rows_per_s


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["parameter_tables", "selfplay_workers"])
def test_the_pages_hold_what_the_benchmarks_write(name, benchmarks, tmp_path):
    import importlib

    import written_section

    script = importlib.import_module(name)
    kept = json.loads(script.KEPT.read_text()) if script.KEPT.exists() else {}
    assert written_section.written(script.PAGE, script.SECTION) == "\n".join(script.lines(kept)).strip("\n")


def test_blocks_of_one_worker_are_searched_one_after_the_other():
    """A worker that thinks for longer than the model computes gives no more than one block at a time."""
    service, limits = ServiceModel(alpha=0.0, beta=0.001), Limits(8)
    for blocks in (1, 2, 4):
        load = ClosedLoop(blocks, 0.01, constant=True, blocks=blocks)
        found = simulate(load, service, Dynamic, limits, requests=2_000)
        assert found.served_requests_per_s == pytest.approx(1 / 0.011 if blocks == 1 else 1 / 0.01, rel=0.02)
